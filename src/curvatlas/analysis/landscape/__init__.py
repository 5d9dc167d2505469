"""The loss around the weights: Taylor terms, learning rates, convergence with the data."""
