r"""Checks of products on a device whose answer the host does not wait for.

A product that makes the host wait costs its launch times again. So on a device the truth values of
the checks stay there, and nobody is misled meanwhile: where the weights have changed behind
PyTorch's back, the product is overwritten by NaN before anyone can read it. The host learns of it

- at once, if the answer has come by the time the product is launched: it is computed anew;
- at the next product, if it has come by then, or where an estimate meets NaN (``confirm``): an
  error says what happened.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_CHANGED, _VECTOR, _PRODUCT = range(3)


class Answer:
    """Truth values on their way from a device to the host."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))

    @property
    def arrived(self) -> bool:
        """Whether ``read`` returns without waiting; no, where nothing tells."""
        return self._event is not None and bool(self._event.query())  # type: ignore[no-untyped-call]

    def read(self) -> list[bool]:
        """The values; the host waits for them."""
        values: list[bool] = (self._host if self.arrived else self.values).tolist()
        return values

    @property
    def known_true(self) -> bool:
        """Whether a value is known by now to be true."""
        return self.arrived and any(self.read())


class LateChecks:
    """What went wrong in products that were returned before the host could know."""

    def __init__(self) -> None:
        self._wrong: Tensor | None = None  # (3,) of all products since the last answer
        self._answer: Answer | None = None

    def guard(self, product: Tensor, columns: Sequence[Tensor], changed: Answer | None) -> None:
        """Overwrite a product of other weights by NaN, in place, and note what is wrong with it.

        columns: the vectors multiplied, in any number of pieces.
        """
        if changed is not None:
            product.masked_fill_(changed.values, torch.nan)
        vector = torch.stack(torch._foreach_norm(list(columns), torch.inf)).max()
        wrong = ~torch.isfinite(torch.stack([vector, torch.linalg.vector_norm(product, torch.inf)]))
        flags = torch.cat([wrong.new_zeros(1) if changed is None else changed.values, wrong])
        self._wrong = flags if self._wrong is None else self._wrong | flags
        if self._answer is None:
            self._answer = Answer(self._wrong)

    def heard(self) -> str | None:
        """What is wrong with an earlier product, as far as it can be told without waiting."""
        if self._answer is None or not self._answer.arrived:
            return None
        wrong, self._answer = self._answer.read(), None
        return self._told(wrong)

    def confirm(self) -> str | None:
        """What is wrong with an earlier product; the host waits."""
        return None if self._wrong is None else self._told(self._wrong.tolist())

    def _told(self, wrong: list[bool]) -> str | None:
        if not any(wrong):
            return None
        self._wrong = self._answer = None
        if wrong[_CHANGED]:
            return (
                "weights, buffers or the loss were changed in a way that PyTorch does not count "
                "(through .data, or by a foreign kernel), and earlier products are NaN: take them "
                "again, and call release() on the operator after such changes."
            )
        if wrong[_VECTOR]:
            return "the vector of an earlier product holds NaN or infinities."
        return (
            "an earlier product is not finite: the second derivative overflows; try float64 or "
            "smaller weights."
        )
