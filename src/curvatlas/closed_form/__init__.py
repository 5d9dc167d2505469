"""Closed forms: the Hessians of norms, attention, feed-forward parts and whole blocks, written out.

``modules`` holds the modules a user calls, ``result`` what they return. Beneath them ``hessian`` is
the operator of one block with its diagonal, norms and dense matrix, ``blocks`` says which maps a
block is made of, ``chain`` differentiates them twice, and ``assembly`` writes the matrix.
"""
