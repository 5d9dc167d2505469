"""Products by PyTorch: graphs of the first derivative, kept and differentiated once more."""
