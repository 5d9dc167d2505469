"""Closed forms: the second derivatives of norms, attention, feed-forward parts and whole blocks.

Modules with a Hessian stand in ``layer_norm``, ``feed_forward``, ``attention`` and ``block``;
``losses`` says what they differentiate, ``stack`` multiplies by the Hessian of many blocks.
"""
