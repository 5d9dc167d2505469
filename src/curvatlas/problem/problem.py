"""Problem: what is differentiated. A model, a loss, data, and the parameters that vary."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvatlas import parallel
from curvatlas.anatomy import Anatomy, anatomy_of
from curvatlas.errors import NoGradientPath, ProblemError
from curvatlas.files import in_memory
from curvatlas.problem import fingerprint, large_heads, truth
from curvatlas.problem.batches import (
    HOLD_BYTES,
    Batch,
    as_tensors,
    batches_of,
    checked,
    described,
    has_rows,
    sample_digests,
    shapes,
    size_in_bytes,
)
from curvatlas.problem.checkpointing import checkpointed, repeated_blocks, shortened
from curvatlas.problem.cross_entropy import Reduction
from curvatlas.problem.evaluation import (
    arguments_of,
    block_by_block,
    block_places,
    call,
    check_compute_dtype,
    check_finite_loss,
    check_mode,
    check_same_loss,
    check_same_parameters,
    check_weights,
    evaluation,
    fresh_leaves,
    is_own_leaf,
    kinds,
    listed,
    refuse_sharded,
    unwrap,
    whole_parameters,
)
from curvatlas.problem.fingerprint import LiveTensors, content
from curvatlas.problem.kernels import explained, failing_function, is_told, unwatched
from curvatlas.problem.losses import Loss, LossLike, main_tensor
from curvatlas.problem.named_losses import CallableLoss, as_loss, refuse_options
from curvatlas.problem.objective import LABELS, Objective, OwnLoss, settled, with_decoder_inputs
from curvatlas.problem.parameters import Layout, Parameters, as_module, choose_parameters
from curvatlas.problem.sample_axis import SampleAxes
from curvatlas.problem.sharding import ShardedWeights
from curvatlas.problem.state import as_it_was, open_scopes

_USUAL = (RuntimeError, TypeError, IndexError, ValueError)  # that say what is wrong by themselves

# --- from a user's data to checked batches --------------------------------------------------------


@dataclass(frozen=True)
class FirstPass:
    """What one look at all data tells."""

    held: list[Batch] | None  # None: too large to hold
    total: float  # valid targets
    seen: int  # batches
    kinds: frozenset[tuple[torch.Size, ...]]  # shapes of their tensors


@dataclass
class LastPass:
    """The batches that a complete pass over shared data has seen, in order, and their samples."""

    digest: bytes = b""


@dataclass(frozen=True)
class BatchStream:
    """The batches of ``data``, made anew at every pass."""

    data: Iterable[Any]
    objective: Objective
    device: torch.device
    sharded: bool  # every process sees the same data and takes its own share
    finder: SampleAxes  # of the samples in a batch
    last_pass: LastPass = field(default_factory=LastPass)

    def __iter__(self) -> Iterator[Batch]:
        return self.batches(self.data)

    def batches(self, raws: Iterable[Any]) -> Iterator[Batch]:
        """Raw batches, from the first one on, as checked ones."""
        loss = self.objective.loss
        dealt = 0  # samples so far
        compared = self.sharded and parallel.world_size() > 1
        seen = hashlib.blake2b(digest_size=16)
        for index, raw in enumerate(raws):
            if compared:
                seen.update(content(raw))
            if self.sharded and not loss.additive and not _is_mine(index):
                continue
            inputs, labels = self.objective.parted(raw, index)
            inputs = checked(inputs, what="inputs", device=self.device, index=index)
            labels = checked(labels, what="targets", device=self.device, index=index)
            inputs, targets = self.objective.assembled(
                inputs, labels, mapping=isinstance(raw, Mapping)
            )
            batch = Batch(
                inputs=inputs,
                targets=targets,
                count=loss.count(targets),
                index=index,
                finder=self.finder,
            )
            if self.sharded and loss.additive:
                # one where they cannot be told apart: the batch goes to one process as it is
                first, last = _my_share(dealt, batch.samples)
                dealt += batch.samples
                seen.update(f"{batch.samples};".encode())
                if first == last:
                    continue
                batch = batch.part(first, last, loss.count)
            yield batch
        if compared:
            self.last_pass.digest = seen.digest()

    def first_pass(self, raws: Iterable[Any]) -> FirstPass:
        """Check and count; hold the batches when they are small enough."""
        held: list[Batch] | None = []
        total, bytes_so_far, seen = 0.0, 0, 0
        kinds: set[tuple[torch.Size, ...]] = set()
        for batch in self.batches(raws):
            seen += 1
            total += batch.count
            kinds.add(shapes(batch))
            bytes_so_far += size_in_bytes(batch)
            if held is not None:
                held.append(batch)
                if bytes_so_far > HOLD_BYTES:
                    held = None
        return FirstPass(held, total, seen, frozenset(kinds))


def _is_mine(index: int) -> bool:
    return index % parallel.world_size() == parallel.rank()


def _my_share(dealt: int, samples: int) -> tuple[int, int]:
    """First and last of this process's samples in a batch that comes after ``dealt`` others.

    Samples are dealt one after the other to the processes in turn, over the bounds of batches, so
    that batches smaller than the group are shared as evenly as large ones. As many as fall to a
    process in one batch lie side by side there: a batch is cut, not shuffled.
    """
    world, rank = parallel.world_size(), parallel.rank()

    def taken(up_to: int) -> int:
        """How many of the first samples have gone to the ranks before and up to this one."""
        return up_to // world * (rank + 1) + min(up_to % world, rank + 1)

    last = taken(dealt + samples) - taken(dealt)
    mine = (dealt + samples - rank - 1) // world - (dealt - rank - 1) // world
    return last - mine, last


@dataclass(frozen=True)
class EngineChoice:
    """Which engine computes a problem's products, "tangent" or "autograd", and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}"


class Problem:
    r"""The objective L(θ) = Σ_b c_b ℓ_b(θ) / Σ_b c_b over batches b with c_b valid targets.

    Weighting by valid targets makes uneven batches and padding exact: the result is that of one big
    batch. The flat vector θ follows ``model.named_parameters()`` (trainable ones; tied ones once).

    model: any ``nn.Module`` that can be differentiated twice; wrappers (DDP, compile) are removed.
        Or a function of its parameters, ``model(parameters, inputs)``, with ``parameters={name:
        tensor}``.
    loss: ``"cross_entropy"``, ``"mse"``, ``"bce_with_logits"``, a loss of ``torch.nn`` (module or
        function; a sum stays a sum), any ``(outputs, targets) -> mean``, or ``"model"``: the loss
        that a Hugging Face model computes from its labels (also the default, for such a model).
    data: one batch, a list of batches or a re-iterable loader. A batch is ``(inputs, targets)`` or
        a mapping with ``labels``, which mean what they mean to the model: the loss is held to
        the model's own on the first batch. NumPy arrays are copied, floats into the parameters'
        dtype. A mapping of inputs is passed by keyword, or as one argument where the model takes
        one and none of the keys.
    parameters: names, globs, roles, regular expressions (``re.compile``, searched in the names) or
        parameters that vary; the others are held fixed.
    count: number of valid targets of a callable loss (default: entries, ignoring −100).
    reduction: ``"sum"`` for a callable loss that returns a sum over the targets.
    shift: whether targets are next-token labels, to be moved by one (default: as the model does
        it for ``labels`` of a mapping; targets of a pair stay where they are).
    keep_float64: keep float64 models in float64 where libraries round to float32 inside
        (Llama's norms, eager softmax); False follows the model as it is.
    compute_dtype: float32 or float64, for weights that are stored in another floating dtype
        (bfloat16 and float16 checkpoints). They stay as they are; a block's are cast when a pass
        goes through it and let go of after. Vectors and products are of this dtype. The numbers are
        those of the network with the rounded weights, exactly as it is stored.
    checkpoint_activations: keep only the inputs of the model's repeated blocks and compute what is
        inside again when a product needs it: slower, with the memory of one block at a time.
    distributed: sum over the process group's ranks (default: when one is initialised). Ranks that
        differ in weights, buffers or loss are refused, whenever a sum is taken.
    roles: what parameters are, where their names do not say it: ``{"*.net.1.weight": "up"}``, by
        globs of parameter names; see ``problem.anatomy``.
    shard: every rank passes the same data and works on its own share of the samples; ranks that
        see other data are refused.
    """

    sharded: ShardedWeights | None = None  # weights that stay spread over processes (FSDP2)
    _in_call = False  # whether a block of a call under way has asked for its weights
    _state: tuple[object, bytes] | None  # version and digest of weights, buffers and loss
    # Which engine made the last operator's products; operators choose on their first one.
    engine = EngineChoice("undecided", "no product has been made yet")

    def __init__(
        self,
        model: nn.Module | Callable[..., Any],
        loss: str | Callable[[Any, Any], Tensor] | Loss | None = None,
        data: Any = None,
        *,
        parameters: Parameters | Mapping[str, Tensor] | None = None,
        count: Callable[[Any], float] | None = None,
        reduction: Reduction | None = None,
        shift: bool | None = None,
        keep_float64: bool = True,
        compute_dtype: torch.dtype | None = None,
        checkpoint_activations: bool = False,
        batch_axis: int | None = None,
        distributed: bool | None = None,
        shard: bool = False,
        roles: Mapping[str, str] | None = None,
    ) -> None:
        self.roles = dict(roles or {})
        self.keep_float64 = keep_float64
        self.compute_dtype = check_compute_dtype(compute_dtype)
        self.checkpoint_activations = checkpoint_activations
        self.distributed = parallel.world_size() > 1 if distributed is None else distributed
        self._shard = shard and self.distributed
        self._batch_axis = batch_axis
        self._separable: bool | None = None
        self._held: list[Batch] | None = None
        self._total: float | None = None
        self._steady: object = None  # the weights whose loss was seen to be the same twice
        self.truth = truth.Truth()
        self._read_data(
            lambda: self._prepare(model, loss, data, parameters, count, reduction, shift)
        )

    def _prepare(
        self,
        model: nn.Module | Callable[..., Any],
        loss: str | Callable[[Any, Any], Tensor] | Loss | None,
        data: Any,
        parameters: Parameters | Mapping[str, Tensor] | None,
        count: Callable[[Any], float] | None,
        reduction: Reduction | None,
        shift: bool | None,
    ) -> None:
        """The model, the parameters that vary, the loss and the data, before the first pass."""
        module, varying = as_module(model, parameters)
        self._set_model(unwrap(module))
        if self.sharded is None:
            refuse_sharded(self._everything)
        if not self._everything:
            raise ProblemError(f"{type(self.model).__name__} has no parameters.")
        self.parameter_names = choose_parameters(self.model, self._everything, varying)
        first = self._everything[self.parameter_names[0]]
        self.dtype, self.device = self.compute_dtype or first.dtype, first.device
        if self.sharded is not None:
            self.sharded.dtype = self.dtype
        if data is None:
            raise ProblemError("no data: pass Problem(model, loss, data).")
        self.data = batches_of(data, dtype=self.dtype)
        if loss is None or (isinstance(loss, str) and loss == "model"):
            refuse_options(count=count, reduction=reduction)
            self._requested: tuple[Loss | None, bool | None] = (None, shift)
        else:
            self._requested = (as_loss(loss, count=count, reduction=reduction), shift)

    # --- parameters -----------------------------------------------------------------------------

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
        return anatomy_of(
            self.model, list(self.parameter_names), run=self._run_briefly, roles=self.roles
        )

    def _run_briefly(self, model: nn.Module) -> None:
        """Call a copy of the model on two samples, or on the first batch if it cannot be cut."""
        batch = next(self.all_batches(), None)
        if batch is None:
            raise ProblemError("this process has no batch to read the roles on: give it some data.")
        try:
            call(model, {}, batch.part(0, min(2, batch.samples), self.loss.count).inputs)
        except Exception:  # whatever the model says of a cut batch, the batch itself is right
            call(model, {}, batch.inputs)

    @property
    def parameters(self) -> Tensor:
        """θ as a flat vector (P,), a copy."""
        with self.present(self.parameter_names) as weights:
            return torch.cat([weights[n].reshape(-1) for n in self.parameter_names])

    @property
    def in_place(self) -> bool:
        """Whether passes compute with the model's own tensors, as they lie in memory."""
        if self.sharded is not None:
            return False
        if self.compute_dtype is None:
            return True
        return all(not self._is_cast(weight) for weight in self._everything.values())

    def _is_cast(self, weight: Tensor) -> bool:
        return (
            self.compute_dtype is not None
            and weight.is_floating_point()
            and weight.dtype != self.compute_dtype
        )

    @contextlib.contextmanager
    def present(
        self, names: Iterable[str], *, following: Iterable[str] = ()
    ) -> Iterator[dict[str, Tensor]]:
        """Some weights by name, whole and in the dtype that is computed in, detached.

        The one place where a pass gets hold of weights. Where ``in_place`` holds they are the
        model's own tensors; else copies that are made on the way in and let go of on the way out:
        cast from half precision here, and a sharded model gathers them at the same spot. Passes
        over a large model open it block by block and keep nothing of what it gave, so that the
        copies of one block are all there is at a time. ``following``: what will be asked for next,
        for a source that can fetch it meanwhile; casting needs no head start.
        """
        if self.sharded is not None:
            with self.sharded.present(names, following) as gathered:
                yield gathered
            return
        weights = self._detached(names)
        try:
            yield weights
        finally:
            weights.clear()

    @unwatched
    def _detached(self, names: Iterable[str]) -> dict[str, Tensor]:
        everything = self._everything
        return {
            name: everything[name].detach().to(self.dtype)
            if self._is_cast(everything[name])
            else everything[name].detach()
            for name in names
        }

    def named_weights(self) -> dict[str, Tensor]:
        """All parameters by name in the dtype that is computed in, also those that do not vary.

        The live model's own tensors where ``in_place`` holds, else copies of all at once.
        """
        if self.sharded is not None:
            with self.present(self._everything) as gathered:
                return dict(gathered)
        return {
            name: weight.detach().to(self.dtype) if self._is_cast(weight) else weight
            for name, weight in self._everything.items()
        }

    def copied_model(self) -> nn.Module:
        """A copy of the model in the dtype that is computed in, whose weights may be moved."""
        model = copy.deepcopy(self.model)
        if self.compute_dtype is not None:
            for parameter in model.parameters():
                if self._is_cast(parameter):
                    parameter.data = parameter.data.to(self.dtype)
        return model

    def own_tensors(self) -> list[Tensor]:
        """Parameters and buffers: memory that is there without any graph."""
        held = [*self._own_parameters().values(), *self.model.buffers()]
        return [part for tensor in held for part in in_memory(tensor)]

    def _own_parameters(self) -> dict[str, Tensor]:
        """The parameters in this process's memory, its rows of those that are spread."""
        if self.sharded is None:
            return self._everything
        return {name: self.sharded.local(name) for name in self.sharded.parameters}

    @functools.cached_property
    def shards(self) -> parallel.Shards | None:
        """Which entries of a vector this process holds where weights are spread, else None."""
        return None if self.sharded is None else self.sharded.shards(self.layout)

    def joined(self) -> contextlib.AbstractContextManager[Any]:
        """Where weights are spread: work in which processes gather for each other.

        All of them enter and leave it together, whatever each one does inside.
        """
        return contextlib.nullcontext() if self.sharded is None else self.sharded.joined()

    def weights_version(self) -> tuple[bytes, bytes]:
        """Changes with any value of the weights, the buffers or the loss's own tensors."""
        if self.sharded is not None:
            self.sharded.reshard()
        with as_it_was(self.model) if open_scopes else contextlib.nullcontext():
            weights = self._model_tensors.fingerprint()
        if self._gathered is not None and self._gathered != weights:
            raise ProblemError(
                "the sharded weights have changed since the Problem gathered them: make a new "
                "Problem after each update."
            )
        return weights, self._loss_tensors.fingerprint()

    def weights_changed(self, version: tuple[bytes, bytes]) -> bool | Tensor:
        """Whether ``weights_version`` would give another version than this one.

        A truth value on the device where the host would have to wait for the answer.
        """
        if not self.deferring or self._gathered is not None:
            return self.weights_version() != version
        with as_it_was(self.model) if open_scopes else contextlib.nullcontext():
            weights = self._model_tensors.changed(version[0])
        loss = self._loss_tensors.changed(version[1])
        if weights is True or loss is True:
            return True
        flags = [flag for flag in (weights, loss) if isinstance(flag, Tensor)]
        if len(flags) == 2 and flags[0].device != flags[1].device:
            return self.weights_version() != version
        return functools.reduce(torch.logical_or, flags) if flags else False

    @property
    def deferring(self) -> bool:
        """Whether the host does not wait for the device in a product: it hears of errors later.

        Not among several processes, which have to stop together.
        """
        return self.device.type != "cpu" and not self.distributed and self.sharded is None

    @property
    def all_parameters(self) -> Mapping[str, Tensor]:
        """The model's parameters by name, those held fixed too, gathered where they are sharded."""
        return self._everything

    @property
    def options(self) -> dict[str, Any]:
        """What decides the objective beside model, loss and data."""
        return {
            "shift": self._requested[1],
            "keep_float64": self.keep_float64,
            **({} if self.compute_dtype is None else {"compute_dtype": str(self.compute_dtype)}),
            "shard": self._shard,
        }

    @property
    def data_digest(self) -> bytes:
        """Of the batches of the last pass, where every rank has to see the same (``shard``)."""
        return self._stream.last_pass.digest

    def content(self) -> list[Any]:
        """Everything that decides the numbers: weights, buffers, loss, parameters and data.

        The data count as a set of samples over all processes, however they are dealt.
        """
        samples = sum(sample_digests(batch) for batch in self.batches())
        if self.distributed:
            samples = sum(parallel.from_every_process(samples % 2**61))
        if self.sharded is not None:
            self.sharded.look()  # they may have been trained
        options = {name: value for name, value in self.options.items() if name != "shard"}
        state = fingerprint.state_of(self)
        return [list(self.parameter_names), options, state, self.total_count, samples % 2**61]

    def mark(self, version: tuple[bytes, bytes] | None = None) -> parallel.Mark | None:
        """What this process's part of a sum rests on; None without others to compare with.

        version: the weights' version where the caller has just asked for it.
        """
        if not self.spread:
            return None
        version = version or self.weights_version()
        if self._state is None or self._state[0] != version:
            state = fingerprint.state_of(self, weights=self.sharded is None)
            self._state = version, fingerprint.content(state)
        digest = hashlib.blake2b(self._state[1] + self.data_digest, digest_size=16)
        return parallel.Mark(digest.digest())

    def refuse_differing_ranks(self) -> None:
        """Say on every rank what it is that differs; called by all of them together."""
        fingerprint.refuse_differing(fingerprint.facts_of(self))

    def settle(self) -> None:
        """After a forward pass: what it has left in the model's attributes is no weight."""
        self._model_tensors.settle()

    def _set_model(self, model: nn.Module) -> None:
        self.model = model
        self._model_tensors = LiveTensors(model)
        self._generation = self._model_tensors.generation
        together = self.distributed or parallel.world_size() == 1
        self.sharded = ShardedWeights.of(model) if together else None
        self._named = (
            whole_parameters(model) if self.sharded is None else dict(self.sharded.parameters)
        )
        self._kinds = kinds(self._named)
        self._head = large_heads.HeadSearch(model)
        self._state = None
        gathered = self.sharded is None and any(
            hasattr(p, "placements") for p in model.parameters()
        )
        self._gathered = self._model_tensors.fingerprint() if gathered else None

    @property
    def _everything(self) -> dict[str, Tensor]:
        """The live model's parameters by name, also after some were replaced."""
        if self._in_call or self.sharded is not None:  # the model may hold others for the moment
            return self._named
        self._model_tensors.follow()
        if self._generation != self._model_tensors.generation and self._gathered is None:
            named = whole_parameters(self.model)
            check_same_parameters(self._kinds, named)
            self._generation, self._named = self._model_tensors.generation, named
            self._head = large_heads.HeadSearch(self.model)
        return self._named

    # --- data -----------------------------------------------------------------------------------

    def _read_data(self, prepare: Callable[[], None] | None = None) -> None:
        """First pass: check and count; hold the batches when they are small enough.

        Here the processes of a group meet: they hear of each other's errors, and whether they hold
        the same (``fingerprint.py``).
        """

        def read() -> list[int]:
            if prepare is not None and not together:
                self._meet_first(prepare)
            with self.joined():
                return look()

        def look() -> list[int]:
            raws, leading = iter(self.data), []
            for raw in raws:  # the first that has rows tells how the model is called
                leading.append(raw)
                if has_rows(raw):
                    break
            first = leading[-1] if leading and has_rows(leading[-1]) else None
            self._objective = self._settled(first)
            self.sample_axes = SampleAxes(self._without_data(), self._batch_axis)
            self._stream = BatchStream(
                self.data, self._objective, self.device, self._shard, self.sample_axes
            )
            total, seen = 0.0, 0
            if leading:
                summary = self._stream.first_pass(itertools.chain(leading, raws))
                self._held, self._batch_kinds = summary.held, summary.kinds
                total, seen = summary.total, summary.seen
            self._loss_tensors = LiveTensors(self.loss, beside=self._model_tensors)
            self._counted = self._loss_tensors.fingerprint()
            if isinstance(self.loss, CallableLoss) and (self.distributed or seen > 1):
                self._check_callable(self.loss)
            bits = struct.unpack("<q", struct.pack("<d", total))[0]
            if not together:
                return [bits, seen]
            digest = fingerprint.content(fingerprint.facts_of(self))
            return [bits, seen, *parallel.halves(digest)]

        together = self.spread
        if together and prepare is not None:
            self._meet_first(prepare)
        ranks = parallel.shared(read, 4) if together else [read()]
        if any(row[2:] != ranks[0][2:] for row in ranks):
            self.refuse_differing_ranks()
        total = sum(struct.unpack("<d", struct.pack("<q", row[0]))[0] for row in ranks)
        if not sum(row[1] for row in ranks):
            raise ProblemError("the data are empty: there is no batch to differentiate.")
        if total <= 0:
            empty = self._held is not None and not any(batch.length for batch in self._held)
            why = "no batch has a row" if empty else "every target is ignored"
            raise ProblemError(f"no valid target in the data: {why}.")
        self._total = self._summed_total = total

    def _meet_first(self, prepare: Callable[[], None]) -> None:
        """Take up the model, and stop where processes have other ones: they could not gather."""

        def take_up() -> list[int]:
            prepare()
            return list(parallel.halves(fingerprint.content(fingerprint.model_facts(self))))

        ranks = parallel.shared(take_up, 2) if self.spread else [take_up()]
        if any(row != ranks[0] for row in ranks):
            fingerprint.refuse_differing(fingerprint.model_facts(self))
        if self.sharded is not None:
            self.sharded.look()

    def _check_callable(self, loss: CallableLoss) -> None:
        batch = next((b for b in self.batches() if b.length > 1), None)
        if batch is None:
            return
        try:
            with self.evaluating(), torch.no_grad():
                outputs = self.outputs(batch, {})
                parts_fit = loss.value(outputs, batch.targets).isfinite()
        except (ProblemError, RuntimeError, TypeError, ValueError, IndexError):
            return  # said where the first number is asked for
        if parts_fit:
            loss.check_weights(outputs, batch.targets)

    def _settled(self, first: Any) -> Objective:
        """The objective of data that begin with the raw batch ``first`` (None: no data)."""
        loss, shift = self._requested
        if first is None:
            return Objective(loss or OwnLoss(), self.model, shift)

        def forward(inputs: Any) -> Any:
            moved = checked(inputs, what="inputs", device=self.device, index=0)
            batch = Batch(inputs=moved, targets=None, count=1.0, index=0)
            with self.evaluating(), torch.no_grad():
                return self._called(batch, {})

        raw = dict(first) if isinstance(first, Mapping) else first
        on_device = tree_map(lambda t: t.to(self.device) if torch.is_tensor(t) else t, raw)
        return settled(self.model, loss, shift, on_device, forward)

    @property
    def loss(self) -> Loss:
        """The loss that is differentiated."""
        return self._objective.loss

    def _sum(
        self,
        fill: Callable[[Tensor], None],
        shape: list[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        def marked(total: Tensor) -> parallel.Mark | None:
            with self.joined():
                fill(total)
            return self.mark()

        return parallel.summed(
            marked,
            shape,
            dtype=dtype or self.dtype,
            device=device or self.device,
            distributed=self.distributed,
            differ=self.refuse_differing_ranks,
        )

    def batches(self, *, ignored: bool = False) -> Iterator[Batch]:
        """The batches with at least one valid target, in order; ``ignored``: the others as well."""
        self._count_again()
        for batch in self._held if self._held is not None else self._stream:
            if batch.count > 0 or ignored:
                yield batch

    def all_batches(self) -> Iterator[Batch]:
        """``batches`` of all ranks where every rank sees the same data, else this rank's own."""
        if not self._shard or parallel.world_size() == 1:
            return self.batches()
        return (batch for batch in replace(self._stream, sharded=False) if batch.count > 0)

    @property
    def held(self) -> bool:
        """Whether the batches are in memory, the same in every pass."""
        return self._held is not None

    @property
    def total_count(self) -> float:
        """Σ_b c_b, the number of valid targets over all batches (and ranks)."""
        self._count_again()
        assert self._total is not None
        return self._total

    @property
    def normaliser(self) -> float:
        """What Σ_b c_b ℓ_b is divided by: the number of valid targets, or 1 where L is a sum."""
        return self.total_count / self._summed_total if self.loss.summed else self.total_count

    def _count_again(self) -> None:
        """Follow the loss's own tensors: class weights weigh the targets."""
        version = self._loss_tensors.fingerprint()
        if version == self._counted:
            return
        if self._held is None:
            self._read_data()
            return
        counts = [self.loss.count(batch.targets) for batch in self._held]
        if counts != [batch.count for batch in self._held]:
            if self.distributed or (self.loss.summed and self._summed_total != self._total):
                raise ProblemError("the loss's weights have changed: make a new Problem.")
            self._held = [replace(b, count=c) for b, c in zip(self._held, counts, strict=True)]
            self._total = self._summed_total = sum(counts)
        self._counted = version

    def require_mean(self, purpose: str) -> None:
        """Refuse a loss that is a sum where samples are compared with their mean."""
        if self.loss.summed:
            raise ProblemError(
                f"{purpose} compares samples with their mean and {self.loss.name} is a sum: use "
                "the same loss with reduction='mean'."
            )

    @property
    def spread(self) -> bool:
        """Whether the data lie on several processes, each of which knows its own."""
        return self.distributed and parallel.world_size() > 1

    @property
    def owns_data(self) -> bool:
        """Whether this process knows a part of the data that no other one does."""
        return self.spread and not self._shard

    def require_one_process(self, purpose: str, *, maker: str = "Problem") -> None:
        """Refuse data on several processes where one has to know all of them.

        maker: what the caller made, which takes ``distributed``.
        """
        if self.spread:
            raise ProblemError(
                f"{purpose} needs all data in one process, and these are spread over "
                f"{parallel.world_size()}: make the {maker} with distributed=False, or call it "
                "outside the process group."
            )

    @property
    def separable(self) -> bool:
        """Whether batches may be cut into samples.

        The loss has to be a sum over targets, and a probe has to find the samples apart in model
        and loss (``sample_axis.py``); it runs once, when this is asked for the first time.
        """
        if self._separable is None:
            layouts = (b.layout for b in itertools.islice(self.batches(), 8) if b.length > 1)
            self._separable = self.loss.additive and next(layouts, ...) is not None
        return self._separable

    @property
    def largest_samples(self) -> int:
        """The most ``units`` of any batch."""
        if self._held is not None:
            return max((self.units(batch) for batch in self._held), default=1)
        first = next(self.batches(), None)
        layout = None if first is None else first.layout
        place, axis = 0, 0
        if layout is not None and self.separable:
            axes = enumerate(layout.leaves)
            place, axis = next((i, a) for i, a in axes if a is not None)
        return max((k[place][axis] for k in self._batch_kinds if len(k[place]) > axis), default=1)

    def units(self, batch: Batch) -> int:
        """A measure of a batch's size: its samples, or its length where they are not told apart."""
        return batch.samples if self.separable else batch.length

    def with_data(self, data: Any, *, parameters: Iterable[str] | None = None) -> Problem:
        """The same model and loss on other data, with the same or with other parameters."""
        loss, shift = self._requested
        other = Problem(
            self.model,
            loss,
            data,
            parameters=list(parameters or self.parameter_names),
            shift=shift,
            keep_float64=self.keep_float64,
            compute_dtype=self.compute_dtype,
            checkpoint_activations=self.checkpoint_activations,
            batch_axis=self._batch_axis,
            distributed=self.distributed,
            shard=self._shard,
            roles=self.roles,
        )
        other.sample_axes.learn(self.sample_axes)
        if other.parameter_names == self.parameter_names:
            other.truth = self.truth
        return other

    def with_model(self, model: nn.Module) -> Problem:
        """The same problem for a copy of the model with other weights."""
        other = self._copy(without=("anatomy",))
        # these belong to the model they were made for
        other._set_model(model)
        other._loss_tensors = LiveTensors(self.loss, beside=other._model_tensors)
        other._objective = replace(self._objective, model=model)
        other.sample_axes = SampleAxes(other._without_data(), self._batch_axis)
        other.sample_axes.learn(self.sample_axes)
        other._stream = replace(self._stream, objective=other._objective, finder=other.sample_axes)
        if self._held is not None:
            other._held = [batch.attached(other.sample_axes) for batch in self._held]
        other._steady = None
        return other

    def with_fewer_blocks(self, keep: int) -> Problem:
        """The problem of the first ``keep`` layers of each of the model's stacks."""
        short = shortened(self.model, keep)
        left = {name for name, _ in short.named_parameters()}
        other = self._copy(without=("layout", "shards"))
        other.parameter_names = tuple(name for name in self.parameter_names if name in left)
        return other.with_model(short)

    def _without_data(self) -> Problem:
        """Model, parameters and loss only: what batches may hold on to."""
        return self._copy(without=("data", "sample_axes", "_held", "_stream"))

    def _copy(self, *, without: Iterable[str] = ()) -> Problem:
        """A second Problem with the same attributes, some of them left out."""
        other = copy.copy(self)
        for name in without:
            vars(other).pop(name, None)
        return other

    def with_batches(self, batches: Iterable[Batch]) -> Problem:
        """The same problem on some of this process's own batches.

        A loss that is a sum is scaled to all targets, so that the batches' shares of them weigh
        their operators to the whole, as for a mean.
        """
        other = self._copy()
        other._held = list(batches)
        other.distributed, other._steady, other._separable = False, None, None
        other._total = sum(batch.count for batch in other._held)
        if other._total <= 0:
            raise ProblemError("no valid target in the chosen batches.")
        return other

    # --- evaluation -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """The scope in which the model is called and differentiated."""
        strict = self.keep_float64 and self.dtype == torch.float64
        with (
            self.unwrapped(),
            evaluation(self.model, stay_double=strict, compute_dtype=self.compute_dtype),
            explained(),
        ):
            yield

    def unwrapped(self) -> contextlib.AbstractContextManager[None]:
        """The scope in which a spread model is the one that was given to ``fully_shard``."""
        return contextlib.nullcontext() if self.sharded is None else self.sharded.plain()

    @contextlib.contextmanager
    def whole_model(self) -> Iterator[None]:
        """The scope in which a spread model holds all weights, in every process; all enter it."""
        if self.sharded is None:
            yield
            return
        values = self.named_weights()
        with self.sharded.plain(), self.sharded.holding(values):
            yield

    def leaves(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Leaves of the autograd graph for the parameters that vary.

        The model's own parameters where ``in_place`` holds: a weight is then followed wherever it
        is read, in a list, a view made in ``__init__``, or the loss's closure, and not only where
        its module's attribute is. Else copies, and copies of what autograd would not follow.
        """
        chosen = list(self.parameter_names if names is None else names)
        names = self._everything.keys() - self.truth.computed_before if self.in_place else ()
        own = {n: p for n in names if is_own_leaf(p := self._everything[n])}
        with self.present(name for name in chosen if name not in own) as weights:
            fresh = fresh_leaves(weights)
        return {name: own[name] if name in own else fresh[name] for name in chosen}

    def outputs(self, batch: Batch, leaves: Mapping[str, Tensor]) -> Any:
        """What the loss reads of the model's output; parameters not in ``leaves`` stay fixed."""
        return self.read(self._called(batch, leaves), batch)

    def model_outputs(self, batch: Batch, leaves: Mapping[str, Tensor]) -> Any:
        """The part of the model's output that the loss reads, axes as the model has them."""
        return self.loss.outputs_of(self._called(batch, leaves))

    def read(self, raw: Any, batch: Batch) -> Any:
        """What the loss reads of a model's return value, checked against the targets."""
        outputs = self.loss.arranged(self.loss.outputs_of(raw), batch.targets)
        self.loss.check(outputs, batch.targets)
        return outputs

    def _called(self, batch: Batch, leaves: Mapping[str, Tensor]) -> Any:
        try:
            scope = checkpointed if self.checkpoint_activations else contextlib.nullcontext
            with self.weights_for_call(leaves) as values, scope(self.model):
                return call(self.model, values, self._computed(batch.inputs))
        except Exception as error:  # whatever the model's own code does
            if is_told(error):
                raise
            told = str(error) if isinstance(error, _USUAL) else f"{type(error).__name__}: {error}"
            raise ProblemError(
                f"{failing_function(error) or 'the model'} fails on batch {batch.index} with "
                f"inputs {described(batch.inputs)} (parameters are {self.dtype}): {told}"
            ) from error

    def _computed(self, inputs: Any) -> Any:
        """The inputs, those in half precision in the dtype that is computed in."""
        if self.compute_dtype is None:
            return inputs

        def cast(leaf: Any) -> Any:
            half = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.itemsize < 4
            return leaf.to(self.dtype) if half else leaf

        return tree_map(cast, inputs)

    @contextlib.contextmanager
    def weights_for_call(
        self,
        leaves: Mapping[str, Tensor],
        change: Callable[[str, Tensor], Tensor] | None = None,
    ) -> Iterator[dict[str, Tensor]]:
        """What the model's parameters are replaced by: ``leaves``, the others as they stand.

        Copies of a block's weights are made when it runs; a graph keeps those that it needs.
        change: what is made of each of these copies, for weights that are not ``in_place``.
        """

        @contextlib.contextmanager
        def changed(names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
            with self._present_in_call(names) as weights:
                if change is not None:
                    weights.update({name: change(name, w) for name, w in weights.items()})
                yield weights

        everything = self._everything
        fixed = [name for name in everything if name not in leaves]
        if self.truth.elsewhere:
            self.refuse_elsewhere(leaves)
        if self.in_place:
            with self.present(fixed) as weights:
                yield {n: leaves[n] if n in leaves else weights[n] for n in everything}
            return
        blocks = repeated_blocks(self.model)
        places = block_places(self.model, blocks, everything, without=leaves)
        inside = {name for named in places.values() for name in named.values()}
        outside = [name for name in fixed if name not in inside]
        with changed(outside) as weights, block_by_block(places, changed):
            yield {**leaves, **weights}

    def refuse_elsewhere(self, leaves: Mapping[str, Tensor]) -> None:
        """Refuse to replace weights that are read other than through their module's attribute."""
        everything = self._everything
        missed = sorted(
            name
            for name in self.truth.elsewhere
            if name in leaves and leaves[name] is not everything[name]
        )
        if missed:
            raise ProblemError(
                f"{listed(missed)}: read other than through the module's attribute (in a list, a "
                "view or a closure, or by the loss), so that the model can only be called with its "
                "own weights: make them trainable, without hooks and in the dtype that is computed "
                "in, or read them as attributes."
            )

    @contextlib.contextmanager
    def _present_in_call(self, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
        """``present`` for a block while the model is called, or a part of it called again."""
        outer, self._in_call = self._in_call, True
        try:
            with self.present(names) as weights:
                yield weights
        finally:
            self._in_call = outer

    def predictions(
        self, batch: Batch, leaves: Mapping[str, Tensor], *, logit_room: int | None = None
    ) -> Any:
        """``outputs``, or hidden states and the head's weights where the logits are too large.

        logit_room: bytes for parts of the logits (default 64 MiB; logits within half of it are
        made whole).
        """
        room = large_heads.logit_room(None) if logit_room is None else logit_room

        def read(some: Batch, values: Mapping[str, Tensor]) -> Tensor:
            return main_tensor(self._called(some, values), self.loss.name)

        def on_one_sample() -> Callable[[], Tensor]:
            return functools.partial(read, batch.part(0, 1, self.loss.count), {})

        last = None
        if self.loss.factored and not self._objective.labels_in_call:
            itemsize = self.dtype.itemsize
            last = self._head.beyond(
                room // 2, batch.targets, self._everything, on_one_sample, itemsize=itemsize
            )
        if last is None:
            return self.outputs(batch, leaves)
        with large_heads.without(last):
            hidden = read(batch, leaves)
        own = [name for name in (last.weight, last.bias) if name is not None]
        with self.present(own) as weights:
            logits = large_heads.factored_logits(last, hidden, weights, leaves, room)
        plain = logits.shape[:-1] == batch.targets.shape and not batch.targets.is_floating_point()
        # Of logits (B, L, L) torch's module reads the second axis as the classes.
        if not plain or self.loss.class_axis(logits.shape, batch.targets) != -1:
            return self.outputs(batch, leaves)  # another layout, or class probabilities
        self.loss.check(logits, batch.targets)
        return logits

    def training_loss(self, data: Any) -> Tensor:
        """The loss of other batches by the live model in its present mode, for ``backward()``.

        data: what ``Problem`` takes; the loss, the labels' shift and the rest are this Problem's.
        """
        stream = replace(self._stream, data=batches_of(data, dtype=self.dtype), sharded=False)
        total, count = torch.zeros((), dtype=self.dtype, device=self.device), 0.0
        for batch in stream:
            args, kwargs = arguments_of(self.model, batch.inputs)
            outputs = self.read(self.model(*args, **kwargs), batch)
            total = total + batch.count * self.loss.value(outputs, batch.targets)
            count += batch.count
        if not count > 0:
            raise ProblemError("no valid target in the data: every target is ignored.")
        return total if self.loss.summed else total / count

    def check(self, *, derivatives: bool = True) -> None:
        """Refuse what would give a wrong number: state of the weights, the mode, randomness.

        derivatives: at first use, hold the gradient to differences of the loss as well.
        """
        check_same_parameters(self._kinds, self._everything)
        check_weights(self._own_parameters(), self.parameter_names, self.compute_dtype)
        check_mode(self.model)
        batch = next(self.batches(), None)
        if batch is None:
            return
        look = derivatives and not self.truth.looked and self.sharded is None
        if not look and self._steady == (version := self.weights_version()):
            return
        version = self.weights_version()
        with self.evaluating(), torch.no_grad():
            # The look compares two calls as well.
            values = [
                float(self.loss.value(self.predictions(batch, {}), batch.targets))
                for _ in range(1 if look else 2)
            ]
        check_finite_loss(values[0], batch.index)
        check_same_loss(values[0], values[-1], eps=torch.finfo(self.dtype).eps)
        if look:
            large = size_in_bytes(batch) > 2**20 or self.size > 2**23
            few = batch
            if self._separable or (large and self.separable):
                few = batch.part(0, min(truth.SAMPLES, batch.samples), self.loss.count)
            truth.look(self, few if few.count > 0 else batch, batch)
        self._steady = version

    def value(self) -> float:
        """L(θ), the mean loss over all valid targets."""

        def fill(total: Tensor) -> None:
            self.check(derivatives=False)
            with self.evaluating(), torch.no_grad():
                for batch in self.batches():
                    value = float(self.loss.value(self.predictions(batch, {}), batch.targets))
                    check_finite_loss(value, batch.index)
                    total += batch.count * value

        scalar = self._sum(fill, [1], dtype=torch.float64, device=torch.device("cpu"))
        return float(scalar) / self.normaliser

    def gradient(self) -> Tensor:
        """∇L(θ) as a flat vector (P,)."""

        def fill(total: Tensor) -> None:
            self.check()
            with self.evaluating():
                for batch in self.batches():
                    leaves = self.leaves()
                    loss = self.loss.value(self.predictions(batch, leaves), batch.targets)
                    check_finite_loss(float(loss.detach()), batch.index)
                    if not loss.requires_grad:
                        raise NoGradientPath(
                            f"no gradient path from the loss to any of {listed(list(leaves))}: is "
                            "the output detached, computed under no_grad, or independent of them?"
                        )
                    grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
                    total.add_(self.layout.join(grads, like=total), alpha=batch.count)

        return self._sum(fill, [self.size]).div_(self.normaliser)

    def __repr__(self) -> str:
        size = f"{self.total_count:.0f} targets"
        return f"Problem({type(self.model).__name__}, {self.loss.name}, P={self.size}, {size})"


def own_targets(
    model: nn.Module,
    loss: LossLike | None,
    inputs: Any,
    *,
    distributed: bool | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[Problem, str]:
    """The Problem whose targets are the model's own predictions, and what they are in words.

    For cross-entropy the most likely class of every output, for mean squared error zero. loss None:
    cross-entropy for a model with a head, else mean squared error. A decoder reads the tokens of
    the encoder, moved as labels would be.
    """
    if loss is None:
        slices = anatomy_of(model).slices
        has_head = any(s.sublayer == "head" or "head" in " ".join(s.tied) for s in slices)
        loss = "cross_entropy" if has_head else "mse"
    name = loss if isinstance(loss, str) else getattr(loss, "name", "")
    if name not in ("cross_entropy", "mse"):
        raise ValueError(f"the loss {name or 'that was passed'!r} needs targets: pass them too.")
    first = next(model.parameters(), None)
    dtype = torch.get_default_dtype() if first is None else compute_dtype or first.dtype
    read = as_tensors(inputs, dtype, 0)
    if isinstance(read, Mapping):
        read = {key: value for key, value in read.items() if key != LABELS}
        read = with_decoder_inputs(model, read, read.get("input_ids"))
    weights = {
        n: p.to(dtype) if compute_dtype is not None and p.is_floating_point() else p
        for n, p in model.named_parameters()
    }
    scope = evaluation(model, stay_double=False, compute_dtype=compute_dtype)
    with scope, torch.no_grad():
        outputs = main_tensor(call(model, weights, read), name)
    del weights
    if name == "cross_entropy":
        target, origin = outputs.argmax(-1), "the model's own most likely classes"
    else:
        target, origin = torch.zeros_like(outputs), "zero"
    data = [(read, target)]
    return Problem(model, loss, data, distributed=distributed, compute_dtype=compute_dtype), origin
