"""How one product with a Hessian is computed: by kept autograd graphs, or by hand-written passes.

``autograd`` differentiates any model; ``tangent`` has the passes of Transformer blocks written out.
Neither imports the other: each is the other's oracle.
"""
