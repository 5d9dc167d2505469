"""What Transformer layers are made of: their description, activations, norms, masks, losses."""
