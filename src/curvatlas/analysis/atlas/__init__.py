"""Where curvature lives: norms and traces of H, H_o and H_f over layers and roles."""
