"""Who may attend to whom: masks of every shape as one bias and one permission of the logits."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from curvatlas.layers.structure import BlockSpec

Keyless = Literal["refuse", "zero"]  # what a query without keys gets


def attention_mask(
    spec: BlockSpec,
    mask: Tensor | None,
    *,
    samples: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    keyless: Keyless = "refuse",
    queries: slice | None = None,
    keys: int | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Additive bias and boolean permission of the logits, each broadcastable to (n, H, L, L).

    ``queries``: the rows of these positions only, (n, H, m, L). ``keys``: how many there are where
    they are not the queries' own tokens; the mask then has four axes, or is (n, keys).

    ``mask`` is boolean, True where attention is allowed: (n, L) for keys (padding), (L, L),
    (n, L, L) or (n, H, L, L) for pairs; or of floating dtype, added to the logits, with the same
    shapes except (n, L). Where n = L a boolean mask of two axes is read as (n, L).
    ``spec.causal`` forbids keys after the query on top of it, ``spec.window`` those too far before
    it. A row that may attend to nothing has no softmax and is refused, or is all zero with
    ``keyless="zero"``, as in ``F.scaled_dot_product_attention``.
    """
    allowed: Tensor | None = None
    bias: Tensor | None = None
    if spec.window is not None and not spec.causal:
        raise ValueError(f"a window of {spec.window} keys needs causal attention: causal=True.")
    if spec.window is not None and spec.window < 1:
        raise ValueError(f"the window must hold at least the query's own key, got {spec.window}.")
    start, stop = (0, length) if queries is None else (queries.start, queries.stop)
    if spec.causal:
        allowed = torch.ones(stop - start, length, dtype=torch.bool, device=device)
        allowed = allowed.tril_(start)[None, None]
        if spec.window is not None:
            allowed = allowed.triu(1 - spec.window + start)
    if mask is not None:
        if mask.device != device:
            raise ValueError(f"the mask is on {mask.device}, the input on {device}.")
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(
                f"the mask must be boolean (True = attend) or floating (added), got {mask.dtype}."
            )
        shaped = _to_four_axes(
            mask, samples, spec.n_heads, length, length if keys is None else keys
        )
        if queries is not None and shaped.shape[2] > 1:
            shaped = shaped[:, :, queries]
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
        if keyless == "refuse" and bool(empty.any()):
            where = empty.nonzero()[0].tolist()
            raise ValueError(
                f"query {where[-1] + start} of sample {where[0]} may attend to no key: its softmax "
                "is not defined; unmask at least one key of every row."
            )
    return bias, allowed


def _to_four_axes(mask: Tensor, samples: int, heads: int, length: int, keys: int) -> Tensor:
    full = (samples, heads, length, keys)
    if mask.ndim == 4 and all(a in (1, b) for a, b in zip(mask.shape, full, strict=True)):
        return mask.expand(*mask.shape[:3], keys)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {
        (length, keys): (1, 1, length, keys),
        (samples, length, keys): (samples, 1, length, keys),
    }
    if mask.dtype == torch.bool:
        shapes[(samples, keys)] = (samples, 1, 1, keys)
    if tuple(mask.shape) not in shapes:
        raise ValueError(
            f"the mask's shape {tuple(mask.shape)} is none of (n, L) = ({samples}, {keys}), "
            "(L, L), (n, L, L), (n, H, L, L)."
        )
    return mask.view(shapes[tuple(mask.shape)])
