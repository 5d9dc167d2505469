"""The second-order tape: a model and its loss recorded once, differentiated twice by rules."""
