"""What is differentiated when data carry labels: the loss the model itself would report.

A batch with labels for a Hugging Face model has a loss of its own, ``model(**batch).loss``, and it
is the arbiter: whether labels are shifted, which formula they enter, and whether the model must see
them in its call (a decoder that makes its inputs from the labels) is read off the first batch by
comparing numbers, never guessed from names where a number can tell.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from curvatlas.errors import ProblemError
from curvatlas.problem.cross_entropy import CrossEntropy, positions_more
from curvatlas.problem.large_heads import largest_logits
from curvatlas.problem.losses import IGNORE_INDEX, Loss, Rebuild, Uniform
from curvatlas.problem.named_losses import BinaryCrossEntropy, MeanSquaredError

LABELS = "labels"
# What other models than those of Hugging Face call the argument that holds their labels.
LABEL_NAMES = (LABELS, "label", "targets", "target", "y", "ys", "y_true", "ground_truth")
_WHOLE = ""  # as the name of the labels: the model takes a batch as one argument
SPAN = ("start_positions", "end_positions")
# Libraries round their own loss to float32 even in float64 models; a wrong shift, a missing
# auxiliary loss or other weights differ by 1e-4 and more.
AGREEMENT = 1e-5
_LARGE_LOGITS = 2**28  # bytes: beyond, one sample of the first batch is compared

Forward = Callable[[Any], Any]  # inputs of a batch → what the model returns


class SpanCrossEntropy(CrossEntropy):
    """Question answering: the mean of the cross-entropies of start and end positions.

    Logits (B, 2, L), targets (B, 2); a position outside the sequence is ignored.
    """

    name = "span cross_entropy"

    @property
    def factored(self) -> bool:
        return False

    def outputs_of(self, raw: Any) -> Tensor:
        return torch.stack([raw["start_logits"], raw["end_logits"]], 1)

    def count(self, targets: Any) -> float:
        starts, ends = (targets != self.ignore_index).sum(0).tolist()
        if starts != ends:
            raise ProblemError(
                f"{starts} start and {ends} end positions lie inside their sequences, so that "
                "their means weigh differently: set both positions of a span that is cut off to "
                "the sequence's length."
            )
        return super().count(targets)


class OwnLoss(Loss):
    """The loss a model returns when it is called with labels, as it is.

    It is known as a number only: H is its second derivative; a part of H that needs the loss as a
    function of the model's outputs does not exist.
    """

    name = "model"

    def outputs_of(self, raw: Any) -> Tensor:
        value = own_loss(raw)
        if value is None:
            raise ProblemError("the model returns no loss: pass a loss instead of 'model'.")
        return value

    def value(self, outputs: Any, targets: Any) -> Tensor:
        scalar: Tensor = outputs.reshape(())
        return scalar

    def count(self, targets: Any) -> float:
        return _valid(targets)

    def curvature(self, outputs: Tensor, targets: Any) -> Callable[[Tensor], Tensor] | None:
        raise self._refusal()

    def fixed_slopes(
        self, outputs: list[Tensor], rebuild: Rebuild, targets: Any
    ) -> tuple[float, list[Tensor]]:
        raise self._refusal()

    def residual(self, outputs: Tensor, targets: Any) -> tuple[Tensor, int]:
        raise self._refusal()

    def sample_residual(self, outputs: Tensor, targets: Any, uniform: Uniform) -> Tensor:
        raise self._refusal()

    def _refusal(self) -> ProblemError:
        return ProblemError(
            "the model's own loss is not one of the formulas known here, so that only its Hessian "
            "exists: for GaussNewton, FunctionalHessian or Fisher pass 'cross_entropy', 'mse' or a "
            "callable (outputs, targets) -> mean loss."
        )


def own_loss(raw: Any) -> Tensor | None:
    """The scalar loss in a model's return value, or None.

    By its name, or as the value itself, or the first of a tuple, or the scalar among its parts.
    """
    value = raw.get("loss") if isinstance(raw, Mapping) else getattr(raw, "loss", None)
    if value is None and isinstance(raw, (tuple, list)) and raw:
        scalars = [part for part in raw if isinstance(part, Tensor) and not part.ndim]
        value = raw[0] if _is_loss(raw[0]) else scalars[0] if scalars else None
    if value is None and isinstance(raw, Tensor) and not raw.ndim:
        value = raw
    return value if _is_loss(value) else None


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _valid(targets: Any) -> float:
    """Labels that count: of classes those that are not ignored, of numbers all."""
    first = targets if isinstance(targets, Tensor) else next(iter(targets.values()))
    if first.is_floating_point():
        return float(first.shape[0]) if first.ndim else 1.0
    return float((first != IGNORE_INDEX).sum())


@dataclass(frozen=True)
class Objective:
    """How raw batches are read: the loss, and what becomes of their labels."""

    loss: Loss
    model: nn.Module
    shift: bool | None = None  # labels are next-token labels; None: told from each batch
    labels_in_call: bool = False  # the model is called with the labels
    label: str = LABELS  # what batches and the model call them
    prompt: int = 0  # positions that the model puts before the tokens, with logits of their own

    def split(self, raw: Any, index: int) -> tuple[Any, Any]:
        """(inputs, targets) of one raw batch; next-token labels are moved onto their logits."""
        inputs, labels = self.parted(raw, index)
        return self.assembled(inputs, labels, mapping=isinstance(raw, Mapping))

    def assembled(self, inputs: Any, labels: Any, *, mapping: bool) -> tuple[Any, Any]:
        """(what the model is called with, targets) of what ``parted`` gave.

        mapping: whether the batch named its labels, so that the model's conventions hold for them.
        """
        if self.labels_in_call and self.label == _WHOLE:
            called: Any = ((*(inputs if isinstance(inputs, tuple) else (inputs,)), labels),)
        elif self.labels_in_call:
            named = labels if isinstance(labels, dict) else {self.label: labels}
            called = {**_named(self.model, inputs), **named}
            called = {key: value for key, value in called.items() if value is not None}
        else:
            called = with_decoder_inputs(self.model, inputs, labels)
        if labels is None:
            return called, torch.zeros(_length(called), device="cpu")  # one target a sample
        if isinstance(self.loss, SpanCrossEntropy):
            return called, _spans(labels, inputs)
        if self.prompt:
            ignored = labels.new_full((labels.shape[0], self.prompt), self._ignore_index)
            labels = torch.cat([ignored, labels], dim=1)
        shifted = isinstance(labels, Tensor) and self._shifts(inputs, labels, mapping=mapping)
        return called, next_tokens(labels, self._ignore_index) if shifted else labels

    def parted(self, raw: Any, index: int) -> tuple[Any, Any]:
        """(inputs, labels) as they stand in the batch; labels None: the model needs none."""
        if isinstance(raw, Mapping):
            present = [key for key in (self.label, *SPAN) if raw.get(key) is not None]
            inputs = {key: value for key, value in raw.items() if key not in (self.label, *SPAN)}
            if self.label in present:
                return inputs, raw[self.label]
            if present:
                return inputs, {key: raw[key] for key in present}
            if isinstance(self.loss, OwnLoss):
                return inputs, None
            raise ProblemError(
                f"batch {index} is a mapping without {LABELS!r}: it has {sorted(map(str, raw))}."
            )
        if isinstance(raw, (tuple, list)) and len(raw) >= 2:
            positional = raw[0] if len(raw) == 2 else tuple(raw[:-1])
            # A decoder reads the labels: by name, so that they reach it.
            named = _has_decoder(self.model)
            return _named(self.model, positional) if named else positional, raw[-1]
        raise ProblemError(
            f"batch {index} is a {type(raw).__name__}: expected (inputs, targets) or a mapping "
            f"with {LABELS!r}."
        )

    @property
    def _ignore_index(self) -> int:
        return self.loss.ignore_index if isinstance(self.loss, CrossEntropy) else IGNORE_INDEX

    def _shifts(self, inputs: Any, labels: Tensor, *, mapping: bool) -> bool:
        if self.shift:
            if labels.ndim != 2 or labels.is_floating_point():
                raise ProblemError(
                    "shift=True takes integer labels (samples, positions), got "
                    f"{tuple(labels.shape)} of {labels.dtype}: leave shift out."
                )
            return True
        if self.shift is False or not mapping:
            return False
        return _looks_like_next_token(self.model, inputs, labels)


def next_tokens(labels: Tensor, ignore_index: int) -> Tensor:
    """Position t predicts token t+1: (B, L) labels moved by one, the last ignored.

    Moving the labels instead of cutting the logits keeps the shapes of both.
    """
    ignored = torch.full_like(labels[:, :1], ignore_index)
    return torch.cat([labels[:, 1:], ignored], dim=1)


def settled(
    model: nn.Module, loss: Loss | None, shift: bool | None, raw: Any, forward: Forward
) -> Objective:
    """The objective of data whose first batch is ``raw``.

    loss: None for the model's own;  forward: calls the model without a graph.
    """
    label = _label_name(model, raw, asked=loss is None)
    wanted = Objective(loss or OwnLoss(), model, shift, label=LABELS if label is None else label)
    if loss is None and shift is not None:
        raise ProblemError("shift= has no meaning for the model's own loss: leave it out.")
    inputs, labels = wanted.parted(raw, 0)
    if not isinstance(raw, Mapping):
        if loss is not None and not _has_decoder(model):
            _say_if_repeated(wanted, inputs, labels)
            return _called_for_all(wanted, raw, forward)
        if wanted.label != _WHOLE:  # the same batch, as the model names it
            raw = {**_named(model, inputs), wanted.label: labels}
    if isinstance(labels, dict) and isinstance(loss, CrossEntropy):
        wanted = replace(wanted, loss=SpanCrossEntropy())
    if label is None and not _takes_labels(model):
        if loss is None:
            raise _no_loss(model)
        return wanted
    trial = _Trial(raw if wanted.label == _WHOLE else _few_samples(model, raw, label), forward)
    own = own_loss(trial.output(replace(wanted, labels_in_call=True)))
    if own is None:
        if loss is None and label == _WHOLE:
            raise _no_loss(model)
        return _own_objective(wanted, raw, forward) if loss is None else wanted
    number = float(own)
    prompted = replace(wanted, prompt=_prompt(trial.output(wanted), labels))
    for candidate in _candidates(prompted, loss, labels):
        for objective in (candidate, replace(candidate, labels_in_call=True)):
            value = trial.value(objective)
            if value is not None and _agree(value, number):
                return _chosen(objective, wanted, trial, number)
    if loss is None:
        return replace(wanted, labels_in_call=True)
    return _differing(wanted, trial, number)


def _no_loss(model: nn.Module) -> ProblemError:
    return ProblemError(
        f"{type(model).__name__} takes no labels and so has no loss of its own: say which loss, "
        "such as 'cross_entropy'."
    )


def _called_for_all(wanted: Objective, raw: Any, forward: Forward) -> Objective:
    """With the labels in its call, for a model whose outputs fit them only then.

    Some give the last position's logits alone unless they are given targets; others need them.
    """
    if (
        wanted.label == LABELS
        or wanted.label not in inspect.signature(wanted.model.forward).parameters
    ):
        return wanted
    trial = _Trial(raw, forward)
    in_call = replace(wanted, labels_in_call=True)
    return in_call if trial.value(wanted) is None and trial.value(in_call) is not None else wanted


def _prompt(raw: Any, labels: Any) -> int:
    """Positions before the labels', of models that put a learned prompt before the tokens."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return 0
    logits = getattr(raw, "logits", raw)
    return positions_more(logits.shape, labels) if isinstance(logits, Tensor) else 0


_FAILURES = (ProblemError, RuntimeError, TypeError, ValueError, KeyError, IndexError)


class _Trial:
    """The model's outputs for one raw batch, with and without its labels, each computed once."""

    def __init__(self, raw: Any, forward: Forward) -> None:
        self._raw, self._forward = raw, forward
        self._outputs: dict[bool, Any] = {}

    def output(self, objective: Objective) -> Any:
        """What the model returns; None where it cannot be called so."""
        key = objective.labels_in_call
        if key not in self._outputs:
            try:
                self._outputs[key] = self._forward(objective.split(self._raw, 0)[0])
            except _FAILURES:
                self._outputs[key] = None
        return self._outputs[key]

    def value(self, objective: Objective) -> float | None:
        """The objective's loss; None where it cannot be computed."""
        loss = objective.loss
        output = self.output(objective)
        if output is None:
            return None
        try:
            _, targets = objective.split(self._raw, 0)
            outputs = loss.arranged(loss.outputs_of(output), targets)
            loss.check(outputs, targets)
            value = float(loss.value(outputs, targets))
        except _FAILURES:
            return None
        return value if abs(value) < float("inf") else None


def _own_objective(wanted: Objective, raw: Any, forward: Forward) -> Objective:
    """The model's own loss as it is, where the model does return one."""
    objective = replace(wanted, labels_in_call=True)
    inputs, _ = objective.split(raw, 0)
    try:
        value = own_loss(forward(inputs))
    except ProblemError as error:
        _explain_labels(wanted, raw, forward)
        raise ProblemError(f"the model cannot be called for its own loss: {error}") from error
    named = isinstance(raw, Mapping)
    if named and value is None and all(raw.get(k) is None for k in (objective.label, *SPAN)):
        raise _without_labels(objective.model, raw)
    if value is None:
        raise ProblemError(
            f"{type(objective.model).__name__} returns no loss for this batch: say which loss, "
            "such as 'cross_entropy'."
        )
    return objective


def _without_labels(model: nn.Module, raw: Mapping[str, Any]) -> ProblemError:
    return ProblemError(
        f"the batch has no {LABELS!r}, from which {type(model).__name__} would compute its loss: "
        f"it has {', '.join(sorted(map(str, raw)))}."
    )


def _explain_labels(wanted: Objective, raw: Mapping[str, Any], forward: Forward) -> None:
    """Say what labels the model's logits allow, where those of the batch are of another kind."""
    if wanted.label != LABELS:
        return
    labels = raw.get(LABELS)
    if not isinstance(labels, Tensor):
        raise _without_labels(wanted.model, raw)
    inputs = {key: value for key, value in raw.items() if key != LABELS}
    tokens = inputs.get("input_ids")
    if isinstance(tokens, Tensor) and len(labels) != len(tokens):
        raise ProblemError(
            f"the batch has labels of shape {tuple(labels.shape)} for {len(tokens)} samples: "
            f"expected ({len(tokens)}, …)."
        )
    try:
        output = forward(with_decoder_inputs(wanted.model, inputs, labels.clamp_min(0)))
        logits = CrossEntropy().outputs_of(output)
    except _FAILURES:
        return
    if not labels.is_floating_point():
        loss = CrossEntropy()
        loss.check(loss.arranged(logits, labels), labels)


def _candidates(wanted: Objective, loss: Loss | None, labels: Any) -> Iterator[Objective]:
    """Formulas the model may use for these labels, the likeliest first."""
    if isinstance(labels, dict):
        yield replace(wanted, loss=SpanCrossEntropy())
        return
    if not isinstance(labels, Tensor):
        return
    if labels.is_floating_point():
        for entrywise in (MeanSquaredError(), MeanSquaredError(single_label=True)):
            yield replace(wanted, loss=entrywise)
        if loss is None or not isinstance(loss, MeanSquaredError):
            yield replace(wanted, loss=BinaryCrossEntropy())
            yield replace(wanted, loss=CrossEntropy())
        return
    for shift in (False, True) if labels.ndim == 2 else (False,):
        yield replace(wanted, loss=CrossEntropy(), shift=shift)
        if bool((labels == -1).any()):
            yield replace(wanted, loss=CrossEntropy(ignore_index=-1), shift=shift)


def _chosen(objective: Objective, wanted: Objective, trial: _Trial, number: float) -> Objective:
    """What agrees with the model, with the user's own loss and options in it."""
    if isinstance(wanted.loss, OwnLoss):
        return objective
    loss = wanted.loss
    if isinstance(loss, MeanSquaredError) and isinstance(objective.loss, MeanSquaredError):
        return objective
    if wanted.shift is not None and wanted.shift != bool(objective.shift):
        decided = replace(objective, loss=loss, shift=wanted.shift)
        value = trial.value(decided)
        if value is not None:
            _warn(
                f"shift={wanted.shift} gives a loss of {value:.6g} where the model's own is "
                f"{number:.6g} (shift={objective.shift}): leave shift out to follow the model."
            )
        return decided
    decided = replace(objective, loss=loss)
    if type(loss) is not type(objective.loss) and type(loss) in _PLAIN:
        value = trial.value(decided)
        if value is not None and not _agree(value, number):
            _say_difference(loss, value, number)
    return decided


_PLAIN = (CrossEntropy, MeanSquaredError, BinaryCrossEntropy)


def _differing(wanted: Objective, trial: _Trial, number: float) -> Objective:
    """No formula known here is the model's: the user's loss, and a word about the difference."""
    if type(wanted.loss) in _PLAIN:
        value = trial.value(wanted)
        if value is None:
            # A decoder may need the labels in its call to run at all.
            in_call = replace(wanted, labels_in_call=True)
            value = trial.value(in_call)
            wanted = wanted if value is None else in_call
        if value is not None:
            _say_difference(wanted.loss, value, number)
    return wanted


def _say_difference(loss: Loss, value: float, number: float) -> None:
    _warn(
        f"{loss.name} of the model's outputs is {value:.6g} and the model's own loss {number:.6g}: "
        f"this Problem differentiates the former; pass loss='model' for the latter."
    )


def _say_if_repeated(objective: Objective, inputs: Any, targets: Any) -> None:
    """Targets that repeat the tokens ask a causal model for the token it reads."""
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else inputs
    tokens = tokens[0] if isinstance(tokens, tuple) and tokens else tokens
    if objective.shift is not None or not isinstance(targets, Tensor):
        return
    if not _is_causal(objective.model) or not isinstance(tokens, Tensor):
        return
    if targets.ndim == 2 and tokens.shape == targets.shape and _repeats(tokens, targets):
        _warn(
            "the targets repeat the tokens the model reads, and targets of a pair (inputs, "
            "targets) are not shifted: pass shift=True for the loss of the next token, or "
            "shift=False to say that this is meant."
        )


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=5)


def _agree(value: float, own: float) -> bool:
    return abs(value - own) <= AGREEMENT * max(1.0, abs(own))


def takes_labels(model: nn.Module, raw: Any) -> bool:
    """Whether a model outside of Hugging Face can be called with the labels of a raw batch."""
    if hasattr(model, "config") and _takes_labels(model):
        return False
    parameters = inspect.signature(model.forward).parameters
    if isinstance(raw, Mapping):
        return any(name in raw and name in parameters for name in LABEL_NAMES)
    return _label_name(model, raw, asked=False) is not None


def _label_name(model: nn.Module, raw: Any, *, asked: bool) -> str | None:
    """What the model, or a batch that is a mapping, calls the labels; None: neither tells.

    asked: the model is asked for its loss, so that labels come behind the inputs of a pair.
    """
    parameters = inspect.signature(model.forward).parameters
    if isinstance(raw, Mapping):
        if any(raw.get(key) is not None for key in (LABELS, *SPAN)):
            return LABELS if LABELS in parameters else None
        return next((name for name in LABEL_NAMES if name in raw), None)
    inputs = Objective(OwnLoss(), model).parted(raw, 0)[0]
    given = _named(model, inputs)
    left = [
        name
        for name, parameter in parameters.items()
        if name not in given and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    known = next((name for name in LABEL_NAMES if name in left), None)
    if known is not None or not asked or _takes_labels(model):
        return known
    if left:
        return left[0]
    return _WHOLE if len(parameters) == 1 else None


def _takes_labels(model: nn.Module) -> bool:
    """Whether the model can be called with labels and has a loss of its own."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.name in (LABELS, *SPAN, "return_loss") for p in parameters):
        return True
    return hasattr(model, "config") and any(p.kind is p.VAR_KEYWORD for p in parameters)


def _is_causal(model: nn.Module) -> bool:
    kind = type(model).__name__
    return "CausalLM" in kind or "LMHeadModel" in kind


def _looks_like_next_token(model: nn.Module, inputs: Mapping[str, Any], labels: Tensor) -> bool:
    """For models without a loss of their own: labels that repeat the tokens are the next ones."""
    if labels.ndim != 2 or _decoder_inputs(model) is not None:
        return False
    if _is_causal(model):
        return True
    tokens = inputs.get("input_ids")
    if not isinstance(tokens, Tensor) or tokens.ndim != 2 or tokens.shape[0] != labels.shape[0]:
        return False
    prompt = labels.shape[1] - tokens.shape[1]
    if prompt < 0 or bool((labels[:, :prompt] != IGNORE_INDEX).any()):
        return False
    # Labels that repeat the inputs can only mean the next token; masked-LM labels cover few.
    return _repeats(tokens, labels[:, prompt:])


def _repeats(tokens: Tensor, labels: Tensor) -> bool:
    valid = labels != IGNORE_INDEX
    return bool(valid.any()) and bool((tokens == labels)[valid].all())


def with_decoder_inputs(model: nn.Module, inputs: Any, labels: Any) -> Any:
    """What the decoder of a sequence-to-sequence model reads, from its labels, unless given.

    With ``labels`` such models make it themselves; here they never see them. Some would read
    the encoder's tokens instead, without a word.
    """
    make = _decoder_inputs(model)
    if make is None or not isinstance(inputs, Mapping) or not isinstance(labels, Tensor):
        return inputs
    if labels.ndim != 2 or any(name.startswith("decoder_input") for name in inputs):
        return inputs
    return {**inputs, "decoder_input_ids": make(labels)}


def _has_decoder(model: nn.Module) -> bool:
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def _decoder_inputs(model: nn.Module) -> Callable[[Tensor], Tensor] | None:
    if not _has_decoder(model):
        return None
    return getattr(model, "prepare_decoder_input_ids_from_labels", None)


def _named(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """Positional inputs by the names of the forward's arguments."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    positional = inputs if isinstance(inputs, tuple) else (inputs,)
    names = [getattr(model, "main_input_name", None)] if len(positional) == 1 else []
    if not names or names[0] is None:
        names = list(inspect.signature(model.forward).parameters)
    return dict(zip([str(name) for name in names], positional, strict=False))


def _spans(labels: Mapping[str, Tensor], inputs: Any) -> Tensor:
    """Start and end positions (B, 2), those outside the sequence ignored, as the models do."""
    length = next(t.shape[1] for t in inputs.values() if isinstance(t, Tensor) and t.ndim > 1)
    both = torch.stack([labels[key].reshape(-1) for key in SPAN], 1).clamp_min(0)
    return torch.where(both >= length, IGNORE_INDEX, both)


def _length(inputs: Mapping[str, Any]) -> int:
    return next(t.shape[0] for t in inputs.values() if isinstance(t, Tensor) and t.ndim)


def _few_samples(model: nn.Module, raw: Mapping[str, Any], label: str | None) -> Mapping[str, Any]:
    """The batch, or its first sample with a label where its logits would be large."""
    labels = raw.get(label or LABELS)
    if not isinstance(labels, Tensor) or labels.ndim < 2:
        return raw
    itemsize = next(model.parameters()).dtype.itemsize
    if largest_logits(model, labels, itemsize) <= _LARGE_LOGITS:
        return raw
    valid = (labels != IGNORE_INDEX).flatten(1).any(1).nonzero()
    place = int(valid[0]) if len(valid) else 0
    size = labels.shape[0]

    def cut(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.ndim and leaf.shape[0] == size
        return leaf[place : place + 1] if batched else leaf

    return dict(tree_map(cut, dict(raw)))
