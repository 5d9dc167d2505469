"""How curvature travels from the loss back to the embedding, sublayer by sublayer."""
