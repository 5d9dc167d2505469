"""What the operators say about a model: atlas, propagation, landscape, diagnostics."""
