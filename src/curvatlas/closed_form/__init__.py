"""Closed forms: the Hessians of norms, attention, feed-forward parts and whole blocks, written out.

``layer_norm``, ``feed_forward``, ``attention`` and ``block`` hold the modules a user calls,
``result`` what they return. Beneath them ``derivatives`` is the operator of one block with its
diagonal, norms and dense matrix; ``terms`` (``moments`` of attention, ``tail`` behind it) gives the
tensors of every token, ``families`` says which parameters they belong to, and ``assembly`` writes
the matrix.
"""
