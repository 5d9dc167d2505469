"""What can go wrong, as exceptions whose message says what to do about it."""

from __future__ import annotations


class ProblemError(ValueError):
    """The model, the loss or the data cannot be used as given."""


class NoGradientPath(ProblemError):
    """The loss does not depend on any of the parameters in question."""


class NonFiniteError(ProblemError):
    """A weight, an input, a loss or a product is NaN or infinite."""


class DifferentiationError(RuntimeError):
    """The model cannot be differentiated twice, or its second derivative is inconsistent."""


class NotSymmetricError(ValueError):
    """Products that should be those of a symmetric operator are not, beyond rounding."""


class UnmappedModuleError(TypeError):
    """A module that the closed forms do not cover; the message says why."""


class ConvergenceError(RuntimeError):
    """An iteration stopped before its tolerance, where only a settled number may be returned."""


class OutOfMemory(MemoryError):
    """Memory ran out: the message says in which part of the model, and which option helps."""


class UserCodeError(RuntimeError):
    """A function or module of the user's raised: the message says what and where."""


class StepMissing(RuntimeError):
    """A step of a run needs the result of another one, which failed."""


# What a measurement may meet in somebody's model: one of these ends its step, not the run.
CURVATURE_ERRORS = (
    ProblemError,
    DifferentiationError,
    NotSymmetricError,
    UnmappedModuleError,
    ConvergenceError,
    UserCodeError,
    FloatingPointError,
    StepMissing,
)


class PeerError(RuntimeError):
    """Another process of the group failed: its own error says why, and all stop with it."""

    def __init__(self, message: str, *, wrong_input: bool = False) -> None:
        super().__init__(message)
        self.wrong_input = wrong_input  # what the user gave there is at fault


def is_wrong_input(error: BaseException) -> bool:
    """Whether what the user gave is at fault, not the computation."""
    if isinstance(error, PeerError):
        return error.wrong_input
    return isinstance(error, (ValueError, TypeError, OSError, ImportError, KeyError))
