"""Which operation has no second derivative, and what to do: from PyTorch's own messages."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from curvatlas.errors import DifferentiationError

_PLAIN = "compute it by plain PyTorch operations instead"
_ATTENTION = "use eager or sdpa attention (attn_implementation='eager' for Hugging Face)"
_RECURRENT = (
    "call curvatlas under `with torch.backends.cudnn.flags(enabled=False):`, which differentiates "
    "the layer by plain operations"
)

# Part of the operation's name → what people call it, and what to do instead.
OPERATIONS: dict[str, tuple[str, str]] = {
    "scaled_dot_product": ("a fused attention kernel", _ATTENTION),
    "flash_att": ("a fused attention kernel", _ATTENTION),
    "flex_attention": ("flex attention", _ATTENTION),
    "memory_efficient": ("a fused attention kernel", _ATTENTION),
    "ctc_loss": (
        "CTC loss",
        "FunctionalHessian, which needs its slope only, is available; for others write the loss as "
        "its forward recursion with torch.logsumexp",
    ),
    "multi_margin_loss": (
        "multi-margin loss",
        "write it as (margin - x[y] + x).clamp(min=0) ** p over the other classes",
    ),
    "multilabel_margin_loss": (
        "multi-label margin loss",
        "write it as (1 - x[y] + x).clamp(min=0) over pairs of classes",
    ),
    "cdist": (
        "torch.cdist",
        "write (x.unsqueeze(-2) - y.unsqueeze(-3)).norm(dim=-1), or pass "
        "compute_mode='use_mm_for_euclid_dist'",
    ),
    "pdist": ("torch.pdist", "write (x.unsqueeze(-2) - x.unsqueeze(-3)).norm(dim=-1)"),
    "embedding_bag": ("nn.EmbeddingBag", "use nn.Embedding and a sum or mean over the bag"),
    "segment_reduce": ("torch.segment_reduce", "use index_add or scatter_add"),
    "sparse_mm_reduce": ("a sparse product with a reduction", "use torch.sparse.mm"),
    "grid_sampler": ("grid_sample", "use a later PyTorch, or interpolate by indexing"),
    "cudnn_rnn": ("a recurrent layer of cuDNN", _RECURRENT),
    "miopen_rnn": ("a recurrent layer of MIOpen", _RECURRENT),
    "mkldnn_rnn": ("a recurrent layer of oneDNN", "use torch.backends.mkldnn.flags(enabled=False)"),
    "roi_align": ("torchvision's roi_align", "crop by grid_sample"),
    "deform_conv2d": ("torchvision's deform_conv2d", _PLAIN),
    "igamma": ("torch.igamma by its first argument", "hold that argument fixed"),
}

_MISSING = (
    r"derivative for '?(?P<name>[\w:.]+)[^']*'? is not implemented",
    r"Trying to backward through (?P<name>[\w:.]+) but no autograd formula",
    r"double backwards? (?:on|for) (?P<name>\w+) (?:is )?not (?:supported|implemented)",
    r"(?P<name>[\w:.]+) (?:doesn't|does not) support double backward",
    r"(?P<name>[\w:.]+) (?:is not|isn't) (?:twice )?differentiable",
)
_COMPILED = "aot_autograd does not currently support double backward"
_ONCE = "marked with @once_differentiable"
_REENTRANT = ("use_reentrant", "Checkpointing is not compatible")


def explanation(message: str) -> str | None:
    """What to say instead of PyTorch's message, or None where it is about something else."""
    if _COMPILED in message:
        return (
            "code compiled by torch.compile has no second derivative, and it ran compiled although "
            "curvatlas asks for eager code: pass the module or function before compiling."
        )
    if any(mark in message for mark in _REENTRANT):
        return (
            "reentrant activation checkpointing cannot be differentiated twice: use "
            "torch.utils.checkpoint(..., use_reentrant=False) or switch checkpointing off."
        )
    if _ONCE in message:
        return (
            "an autograd.Function marked once_differentiable has no second derivative: "
            f"{_PLAIN}, or write its backward in them and remove the mark."
        )
    for pattern in _MISSING:
        match = re.search(pattern, message)
        if match:
            return missing(match["name"])
    return None


def missing(operation: str) -> str:
    """That ``operation``, by PyTorch's name, has no second derivative, and the way round."""
    if "::" not in operation and hasattr(torch.ops.aten, operation):
        operation = f"aten::{operation}"
    for part, (name, instead) in OPERATIONS.items():
        if part in operation:
            return f"{name} ({operation}) has no second derivative in PyTorch: {instead}."
    if ("::" in operation and not operation.startswith("aten::")) or operation.count(".") >= 2:
        return (
            f"the custom operator {operation} has no second derivative: register one with "
            f"torch.library.register_autograd for it and for its backward, or {_PLAIN}."
        )
    return f"the operation {operation} has no second derivative in PyTorch: {_PLAIN}."


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Errors about missing second derivatives name the operation and the way round it."""
    try:
        yield
    except DifferentiationError:
        raise
    except RuntimeError as error:
        instead = explanation(str(error))
        if instead is None:
            raise
        raise DifferentiationError(instead) from error
