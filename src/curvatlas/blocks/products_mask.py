"""Who may attend to whom: causal order, padding and additive biases in one place."""

from __future__ import annotations

import torch
from torch import Tensor

from curvatlas.blocks.structure import BlockSpec


def attention_mask(
    spec: BlockSpec,
    mask: Tensor | None,
    *,
    samples: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Tensor | None, Tensor | None]:
    """Additive bias and boolean permission of the logits, each broadcastable to (n, H, L, L).

    ``mask`` is boolean, True where attention is allowed: (n, L) for keys (padding), (L, L),
    (n, L, L) or (n, H, L, L) for pairs; or of floating dtype, added to the logits, with the same
    shapes except (n, L). Where n = L a boolean mask of two axes is read as (n, L).
    ``spec.causal`` forbids keys after the query on top of it, ``spec.window`` those too far before
    it. A row that may attend to nothing has no softmax and is refused.
    """
    allowed: Tensor | None = None
    bias: Tensor | None = None
    if spec.window is not None and not spec.causal:
        raise ValueError(f"a window of {spec.window} keys needs causal attention: causal=True.")
    if spec.window is not None and spec.window < 1:
        raise ValueError(f"the window must hold at least the query's own key, got {spec.window}.")
    if spec.causal:
        allowed = torch.ones(length, length, dtype=torch.bool, device=device).tril_()[None, None]
        if spec.window is not None:
            allowed = allowed.triu(1 - spec.window)
    if mask is not None:
        if mask.device != device:
            raise ValueError(f"the mask is on {mask.device}, the input on {device}.")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(
                f"the mask must be boolean (True = attend) or floating (added), got {mask.dtype}."
            )
        shaped = _to_four_axes(mask, samples, spec.n_heads, length)
        if mask.dtype == torch.bool:
            allowed = shaped if allowed is None else allowed & shaped
        elif spec.softmax:
            bias = shaped.to(dtype)
        else:
            raise ValueError("an additive mask needs softmax attention: pass a boolean mask.")
    if not spec.softmax:
        return None, allowed
    if allowed is not None:
        forbidden = torch.zeros((), dtype=dtype, device=device).masked_fill(~allowed, -torch.inf)
        bias = forbidden if bias is None else bias + forbidden
    if mask is not None and bias is not None:
        empty = bias.isneginf().all(-1)
        if bool(empty.any()):
            where = empty.nonzero()[0].tolist()
            raise ValueError(
                f"query {where[-1]} of sample {where[0]} may attend to no key: its softmax is not "
                "defined; unmask at least one key of every row."
            )
    return bias, allowed


def _to_four_axes(mask: Tensor, samples: int, heads: int, length: int) -> Tensor:
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {
        (length, length): (1, 1, length, length),
        (samples, length, length): (samples, 1, length, length),
        (samples, 1, length, length): (samples, 1, length, length),
        (samples, heads, length, length): (samples, heads, length, length),
    }
    if mask.dtype == torch.bool:
        shapes[(samples, length)] = (samples, 1, 1, length)
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"the mask's shape {tuple(mask.shape)} is none of (n, L) = ({samples}, {length}), "
            "(L, L), (n, L, L), (n, H, L, L)."
        )
    return mask.view(shapes[tuple(mask.shape)])
