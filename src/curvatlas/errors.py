"""What can go wrong, as exceptions whose message says what to do about it."""

from __future__ import annotations


class ProblemError(ValueError):
    """The model, the loss or the data cannot be used as given."""


class NonFiniteError(ProblemError):
    """A weight, an input, a loss or a product is NaN or infinite."""


class DifferentiationError(RuntimeError):
    """The model cannot be differentiated twice, or its second derivative is inconsistent."""


class ConvergenceError(RuntimeError):
    """An iteration stopped before its tolerance, where only a settled number may be returned."""
