"""Products with the Hessian of Transformer blocks by hand-written tangent and adjoint passes.

``reading`` turns modules into a ``BlockSpec`` (``structure``) with weights; ``linear``, ``norm``,
``attention``, ``feed_forward`` and ``head`` are the stages, ``block`` and ``stack`` chain them, and
``losses`` says what is differentiated. What ``BlockStack.linearise`` gives is a ``LinearOperator``.
"""
