"""Problem: what is differentiated. A model, a loss, data, and the parameters that vary."""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from curvatlas import parallel
from curvatlas.anatomy import Anatomy, anatomy_of
from curvatlas.errors import ProblemError
from curvatlas.problem import guards, head
from curvatlas.problem.batches import (
    HOLD_BYTES,
    Batch,
    batches_of,
    checked,
    size_in_bytes,
    split_batch,
)
from curvatlas.problem.checkpointing import checkpointed
from curvatlas.problem.chunked import HiddenLogits
from curvatlas.problem.evaluation import (
    call,
    evaluation,
    explained,
    refuse_sharded,
    unwrap,
    whole_parameters,
)
from curvatlas.problem.layout import Layout
from curvatlas.problem.losses import Loss, as_loss, main_tensor

_UNKNOWN = object()
_nothing = contextlib.nullcontext

Parameters = str | nn.Parameter | Sequence["str | nn.Parameter"]


class Problem:
    r"""The objective L(θ) = Σ_b c_b ℓ_b(θ) / Σ_b c_b over batches b with c_b valid targets.

    Weighting by valid targets makes uneven batches and padding exact: the result is that of one big
    batch. The flat vector θ follows ``model.named_parameters()`` (trainable ones; tied ones once).

    model: any ``nn.Module`` that can be differentiated twice; wrappers (DDP, compile) are removed.
    loss: ``"cross_entropy"``, ``"mse"``, a torch loss module, or ``(outputs, targets) -> mean``.
    data: one batch, a list of batches or a re-iterable loader. A batch is ``(inputs, targets)`` or
        a mapping with ``labels``; causal language models have their labels shifted by one.
    parameters: names, globs, roles or parameters that vary; the others are held fixed.
    count: number of valid targets of a callable loss (default: entries, ignoring −100).
    shift: whether ``labels`` are next-token labels (default: told from the model and the data).
    keep_float64: keep float64 models in float64 where libraries round to float32 inside
        (Llama's norms, eager softmax); False follows the model as it is.
    checkpoint_activations: keep only the inputs of the model's repeated blocks and compute what is
        inside again when a product needs it: slower, with the memory of one block at a time.
    distributed: sum over the process group's ranks (default: when one is initialised).
    shard: every rank passes the same data and works on its own share of the batches.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: str | Callable[[Any, Any], Tensor] | Loss,
        data: Any,
        *,
        parameters: Parameters | None = None,
        count: Callable[[Any], float] | None = None,
        shift: bool | None = None,
        keep_float64: bool = True,
        checkpoint_activations: bool = False,
        distributed: bool | None = None,
        shard: bool = False,
    ) -> None:
        self.model = unwrap(model)
        self.loss = as_loss(loss, count=count)
        self.keep_float64 = keep_float64
        self.checkpoint_activations = checkpoint_activations
        self.distributed = parallel.world_size() > 1 if distributed is None else distributed
        self._everything = whole_parameters(self.model)
        refuse_sharded(self._everything)
        if not self._everything:
            raise ProblemError(f"{type(self.model).__name__} has no parameters.")
        self.parameter_names = self._select(parameters)
        first = self._everything[self.parameter_names[0]]
        self.dtype, self.device = first.dtype, first.device
        self._shift = shift
        self._shard = shard and self.distributed
        self.data = batches_of(data)
        self._held: list[Batch] | None = None
        self._total: float | None = None
        self._head: Any = _UNKNOWN  # looked for when logits are large
        self._steady: object = None  # the weights whose loss was seen to be the same twice
        self.largest_samples = 1  # of any batch
        self._read_data()

    # --- parameters -----------------------------------------------------------------------------

    def _select(self, wanted: Parameters | None) -> tuple[str, ...]:
        trainable = [name for name, p in self._everything.items() if p.requires_grad]
        if wanted is None:
            if not trainable:
                raise ProblemError(
                    f"every parameter is frozen ({guards.listed(list(self._everything))}): "
                    "set requires_grad on some, or name them in parameters=."
                )
            return tuple(trainable)
        chosen: set[str] = set()
        for item in [wanted] if isinstance(wanted, (str, nn.Parameter)) else wanted:
            if isinstance(item, str):
                chosen |= set(self._matching(item))
            else:
                chosen |= {name for name, p in self._everything.items() if p is item}
        if not chosen:
            raise ProblemError("parameters= selects nothing.")
        return tuple(name for name in self._everything if name in chosen)

    def _matching(self, pattern: str) -> list[str]:
        direct = [name for name in self._everything if fnmatch.fnmatchcase(name, pattern)]
        if direct:
            return direct
        slices = anatomy_of(self.model, list(self._everything)).select(pattern)
        names = list(dict.fromkeys(piece.parameter for piece in slices))
        covered = dict.fromkeys(names, 0)
        for piece in slices:
            covered[piece.parameter] += piece.size
        for name in names:
            if covered[name] != self._everything[name].numel():
                raise ProblemError(
                    f"{pattern!r} is only a part of the fused parameter {name!r}: take the whole "
                    "parameter here and the part by H[rows, columns]."
                )
        return names

    @functools.cached_property
    def layout(self) -> Layout:
        """Names, shapes and places of the parameters in the flat vector."""
        shapes = [self._everything[name].shape for name in self.parameter_names]
        return Layout(self.parameter_names, shapes)

    @property
    def size(self) -> int:
        """P, the length of the flat vector."""
        return self.layout.size

    @functools.cached_property
    def anatomy(self) -> Anatomy:
        """Every parameter slice with its layer, sublayer and role."""
        return anatomy_of(self.model, list(self.parameter_names))

    @property
    def parameters(self) -> Tensor:
        """θ as a flat vector (P,), a copy."""
        return torch.cat([self._everything[n].detach().reshape(-1) for n in self.parameter_names])

    def own_tensors(self) -> list[Tensor]:
        """Parameters and buffers: memory that is there without any graph."""
        return [*self._everything.values(), *self.model.buffers()]

    def weights_version(self) -> tuple[tuple[int, int], ...]:
        """Changes whenever a weight is updated in place or replaced."""
        return tuple((p._version, p.data_ptr()) for p in self._everything.values())

    # --- data -----------------------------------------------------------------------------------

    def _read_data(self) -> None:
        """First pass: check and count; hold the batches when they are small enough."""

        def fill(numbers: Tensor) -> None:
            self._held, numbers[0], numbers[1] = self._first_pass()

        total, seen = self._sum(fill, [2], dtype=torch.float64).tolist()
        if not seen:
            raise ProblemError("the data are empty: there is no batch to differentiate.")
        if total <= 0:
            raise ProblemError("no valid target in the data: every target is ignored.")
        self._total = total

    def _sum(
        self, fill: Callable[[Tensor], None], shape: list[int], *, dtype: torch.dtype | None = None
    ) -> Tensor:
        return parallel.summed(
            fill,
            shape,
            dtype=dtype or self.dtype,
            device=self.device,
            distributed=self.distributed,
        )

    def _first_pass(self) -> tuple[list[Batch] | None, float, bool]:
        """Batches to hold (None: too large), valid targets, and whether there was any batch."""
        held: list[Batch] | None = []
        total, bytes_so_far, seen = 0.0, 0, False
        for batch in self._stream():
            seen = True
            total += batch.count
            self.largest_samples = max(self.largest_samples, batch.samples)
            bytes_so_far += size_in_bytes(batch)
            if held is not None:
                held.append(batch)
                if bytes_so_far > HOLD_BYTES:
                    held = None
        return held, total, seen

    def _stream(self) -> Iterator[Batch]:
        for index, raw in enumerate(self.data):
            if self._shard and not self.loss.additive and not _is_mine(index):
                continue
            inputs, targets = split_batch(raw, index, shift=self._is_next_token)
            inputs = checked(inputs, what="inputs", device=self.device, index=index)
            targets = checked(targets, what="targets", device=self.device, index=index)
            batch = Batch(
                inputs=inputs, targets=targets, count=self.loss.count(targets), index=index
            )
            if self._shard and self.loss.additive:
                first, last = _my_share(batch.samples)
                if first == last:
                    continue
                batch = batch.part(first, last, self.loss.count)
            yield batch

    def _is_next_token(self, inputs: Mapping[str, Any], labels: Any) -> bool:
        if self._shift is not None:
            return self._shift
        if not isinstance(labels, Tensor) or labels.ndim != 2:
            return False
        kind = type(self.model).__name__
        if "CausalLM" in kind or "LMHeadModel" in kind:
            return True
        tokens = inputs.get("input_ids")
        if not isinstance(tokens, Tensor) or tokens.shape != labels.shape:
            return False
        valid = labels != -100
        # Labels that repeat the inputs can only mean the next token; masked-LM labels cover few.
        return bool(valid.any()) and bool((tokens == labels)[valid].all())

    def batches(self) -> Iterator[Batch]:
        """The batches with at least one valid target, in order."""
        for batch in self._held if self._held is not None else self._stream():
            if batch.count > 0:
                yield batch

    @property
    def held(self) -> bool:
        """Whether the batches are in memory, the same in every pass."""
        return self._held is not None

    @property
    def total_count(self) -> float:
        """Σ_b c_b, the number of valid targets over all batches (and ranks)."""
        assert self._total is not None
        return self._total

    def with_data(self, data: Any) -> Problem:
        """The same model, loss and parameters on other data."""
        return Problem(
            self.model,
            self.loss,
            data,
            parameters=list(self.parameter_names),
            shift=self._shift,
            keep_float64=self.keep_float64,
            checkpoint_activations=self.checkpoint_activations,
            distributed=self.distributed,
            shard=self._shard,
        )

    def with_model(self, model: nn.Module) -> Problem:
        """The same problem for a copy of the model with other weights."""
        other = Problem.__new__(Problem)
        other.__dict__.update({k: v for k, v in self.__dict__.items() if k != "anatomy"})
        other.model, other._everything = model, whole_parameters(model)
        other._head, other._steady = _UNKNOWN, None  # both belong to the model they were seen on
        return other

    def with_batches(self, batches: Iterable[Batch]) -> Problem:
        """The same problem on some of this process's own batches."""
        other = Problem.__new__(Problem)
        other.__dict__.update(self.__dict__)
        other._held, other.distributed, other._steady = list(batches), False, None
        other._total = sum(batch.count for batch in other._held)
        other.largest_samples = max((batch.samples for batch in other._held), default=1)
        if other._total <= 0:
            raise ProblemError("no valid target in the chosen batches.")
        return other

    # --- evaluation -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The scope in which the model is called and differentiated."""
        strict = self.keep_float64 and self.dtype == torch.float64
        with evaluation(self.model, stay_double=strict), explained():
            yield

    def leaves(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Fresh leaf tensors that share the weights' memory, for the parameters that vary."""
        chosen = self.parameter_names if names is None else tuple(names)
        return {name: _leaf(self._everything[name]) for name in chosen}

    def outputs(self, batch: Batch, leaves: Mapping[str, Tensor]) -> Any:
        """What the loss reads of the model's output; parameters not in ``leaves`` stay fixed."""
        outputs = self.loss.outputs_of(self._called(batch, leaves))
        self.loss.check(outputs, batch.targets)
        return outputs

    def _called(self, batch: Batch, leaves: Mapping[str, Tensor]) -> Any:
        values = {n: leaves[n] if n in leaves else p.detach() for n, p in self._everything.items()}
        try:
            with checkpointed(self.model) if self.checkpoint_activations else _nothing():
                return call(self.model, values, batch.inputs)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            if isinstance(error, RuntimeError) and "not enough memory" in str(error):
                raise
            raise ProblemError(
                f"the model fails on batch {batch.index} with inputs {_described(batch.inputs)} "
                f"(parameters are {self.dtype}): {error}"
            ) from error

    def predictions(
        self, batch: Batch, leaves: Mapping[str, Tensor], *, logit_room: int | None = None
    ) -> Any:
        """``outputs``, or hidden states and the head's weights where the logits are too large.

        logit_room: bytes for parts of the logits (default 64 MiB; logits within half of it are
        made whole).
        """
        room = head.logit_room(None) if logit_room is None else logit_room
        last = self._head_beyond(batch, room // 2)
        if last is None:
            return self.outputs(batch, leaves)
        with head.without(last):
            hidden = self._called(batch, leaves)
        values = {**self._everything, **leaves}
        weight = values[last.weight]
        bias = None if last.bias is None else values[last.bias]
        if last.weight not in leaves:
            weight = weight.detach()
        if last.bias is not None and last.bias not in leaves and bias is not None:
            bias = bias.detach()
        logits = HiddenLogits(main_tensor(hidden, self.loss.name), weight, bias, room)
        self.loss.check(logits, batch.targets)
        return logits

    def _head_beyond(self, batch: Batch, size: int) -> head.Head | None:
        """The model's last linear layer if its result for this batch takes more than ``size``."""
        if not self.loss.factored:
            return None
        if head.largest_logits(self.model, batch.targets, self.dtype.itemsize) <= size:
            return None
        if self._head is _UNKNOWN:
            one = batch.part(0, 1, self.loss.count)

            def run() -> Tensor:
                return main_tensor(self._called(one, {}), self.loss.name)

            with torch.no_grad():
                self._head = head.find_head(self.model, self._everything, run)
        found = self._head
        if isinstance(found, head.Head):
            width = found.module.out_features
            if batch.targets.numel() * width * self.dtype.itemsize > size:
                return found
        return None

    def check(self) -> None:
        """Refuse what would give a wrong number: state of the weights, the mode, randomness."""
        guards.check_weights({name: self._everything[name] for name in self.parameter_names})
        guards.check_mode(self.model)
        batch = next(self.batches(), None)
        if batch is None or self._steady == (version := self.weights_version()):
            return
        with self.evaluating(), torch.no_grad():
            values = [
                float(self.loss.value(self.predictions(batch, {}), batch.targets)) for _ in "ab"
            ]
        guards.check_finite_loss(values[0], batch.index)
        guards.check_same_loss(values[0], values[1], eps=torch.finfo(self.dtype).eps)
        self._steady = version

    def value(self) -> float:
        """L(θ), the mean loss over all valid targets."""

        def fill(total: Tensor) -> None:
            self.check()
            with self.evaluating(), torch.no_grad():
                for batch in self.batches():
                    value = float(self.loss.value(self.predictions(batch, {}), batch.targets))
                    guards.check_finite_loss(value, batch.index)
                    total += batch.count * value

        return float(self._sum(fill, [1], dtype=torch.float64)) / self.total_count

    def gradient(self) -> Tensor:
        """∇L(θ) as a flat vector (P,)."""

        def fill(total: Tensor) -> None:
            self.check()
            with self.evaluating():
                for batch in self.batches():
                    leaves = self.leaves()
                    loss = self.loss.value(self.predictions(batch, leaves), batch.targets)
                    guards.check_finite_loss(float(loss.detach()), batch.index)
                    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                    total.add_(self.layout.join(grads, like=total), alpha=batch.count)

        return self._sum(fill, [self.size]).div_(self.total_count)

    def __repr__(self) -> str:
        size = f"{self.total_count:.0f} targets"
        return f"Problem({type(self.model).__name__}, {self.loss.name}, P={self.size}, {size})"


def _is_mine(index: int) -> bool:
    return index % parallel.world_size() == parallel.rank()


def _my_share(samples: int) -> tuple[int, int]:
    world, rank = parallel.world_size(), parallel.rank()
    return samples * rank // world, samples * (rank + 1) // world


def _leaf(parameter: Tensor) -> Tensor:
    value = parameter.detach()
    if value.is_inference():
        value = value.clone()
    return value.requires_grad_(True)


def _described(inputs: Any) -> str:
    def one(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        return type(value).__name__

    if isinstance(inputs, Mapping):
        return "{" + ", ".join(f"{k}: {one(v)}" for k, v in inputs.items()) + "}"
    if isinstance(inputs, tuple):
        return "(" + ", ".join(one(v) for v in inputs) + ")"
    return one(inputs)
