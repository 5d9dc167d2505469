"""Read a model's anatomy: names to roles, fused parameters to pieces, modules to layers."""

from __future__ import annotations

import functools
import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from curvatlas.anatomy import trials, wiring
from curvatlas.anatomy.names import Reading, declared, own_role, read
from curvatlas.anatomy.slices import Anatomy, Slice, unknown_name

_INDEXED = re.compile(r"(?:\w*_)?(?:block|layer|stage)_?\d+")  # attributes like block1, layer_2
_MIXING = {"attention", "mixer"}  # sublayers where tokens meet
_PARTS = {*_MIXING, "ffn"}


def find_blocks(
    readings: dict[str, Reading | None], assumptions: list[str] | None = None
) -> dict[str, str]:
    """Parameter name → path of its block, for those that have one.

    The block is the innermost numbered module that holds an attention (or another mixer of tokens)
    and a feed-forward part (T5 numbers sublayers inside blocks, Swin numbers stages around them),
    or the outermost numbered module where none holds both. Attention and feed-forward parts outside
    all numbered modules (a bare encoder layer) make one block: the smallest module around them.
    A list whose members hold an attention or a feed-forward part each (x-transformers) numbers
    sublayers: attentions and the feed-forward parts behind them are one block. Lists of attentions
    and of feed-forward parts side by side (XLM) are joined number by number.
    """
    kinds = {name: reading.sublayer if reading else "other" for name, reading in readings.items()}
    holds: dict[str, set[str]] = {}
    numbered = {name: _numbered(name) for name in kinds}
    for name, kind in kinds.items():
        if kind in _PARTS and name.endswith((".weight", ".bias")):
            # The first linear map of a list (to_out.0, mlp.0) is a part of a block, not a block.
            numbered[name] = [p for p in numbered[name] if p != name.rpartition(".")[0]]
        for path in numbered[name]:
            holds.setdefault(path, set()).add(kind)
    complete = {path for path, parts in holds.items() if "ffn" in parts and parts & _MIXING}
    stages = {path for path in complete if any(p.startswith(f"{path}.") for p in complete)}
    joined = _joined_sublayers(holds) if not complete else {}
    # Norms of a list of their own (patch embeddings of vit-pytorch) stand in no block.
    if any(parts & _PARTS for parts in holds.values()):
        bare = {path for path, parts in holds.items() if parts <= {"norm", "embedding", "head"}}
        stages |= {p for p in bare if p not in joined and not _stands_among(p, holds)}
    if joined and assumptions is not None:
        lists = sorted({path.rpartition(".")[0] for path in joined})
        assumptions.append(f"{', '.join(lists)} number sublayers: several are read as one block")
    blocks: dict[str, str] = {}
    for name, kind in kinds.items():
        paths = [path for path in numbered[name] if path not in stages]
        with_both = [path for path in paths if path in complete]
        if with_both:
            blocks[name] = with_both[0]
        elif paths and (kind not in ("embedding", "head") or holds[paths[0]] & _MIXING):
            blocks[name] = joined.get(paths[0], paths[0])
    loose = [n for n, kind in kinds.items() if kind in _PARTS and n not in blocks]
    if loose:
        path = _shared_path(loose)
        inside = f"{path}." if path else ""
        for name, kind in kinds.items():
            if name.startswith(inside) and name not in blocks and kind not in ("embedding", "head"):
                blocks[name] = path
    return blocks


def _stands_among(path: str, holds: dict[str, set[str]]) -> bool:
    """Whether a numbered module stands in, around or beside one that holds a part of a block."""
    siblings = f"{path.rpartition('.')[0]}."
    return any(
        parts & _PARTS
        and (
            other.startswith(f"{path}.")
            or path.startswith(f"{other}.")
            or (siblings != "." and other.startswith(siblings))
        )
        for other, parts in holds.items()
    )


def _joined_sublayers(holds: dict[str, set[str]]) -> dict[str, str]:
    """Numbered sublayer → the first of its block, in lists of attentions and feed-forward parts."""
    lists: dict[str, list[tuple[int, str]]] = {}
    for path, parts in holds.items():
        parent, _, number = path.rpartition(".")
        outermost = not any(path.startswith(f"{other}.") for other in holds)
        if number.isdigit() and outermost and parts & _PARTS:
            lists.setdefault(parent, []).append((int(number), path))
    joined: dict[str, str] = {}
    for parent, members in lists.items():
        if all(holds[path] & _MIXING for _, path in members):
            around = f"{parent.rpartition('.')[0]}."
            beside = [
                path
                for path in holds
                if path.startswith(around if around != "." else "")
                and path.count(".") == parent.count(".") + 1
            ]
            numbers = {number for number, _ in members}
            twins = [p for p in beside if p.rpartition(".")[0] != parent]
            if {int(p.rpartition(".")[2]) for p in twins if "ffn" in holds[p]} == numbers:
                joined |= {p: f"{parent}.{p.rpartition('.')[2]}" for p in twins}
                continue
        order = [path for _, path in sorted(members)]
        kinds = ["ffn" if "ffn" in holds[path] else "attention" for path in order]
        both = {"attention", "ffn"} == set(kinds) and kinds[0] == "attention"
        if not both or any("mixer" in holds[path] for path in order):
            continue
        first = order[0]
        for place, path in enumerate(order):
            if kinds[place] == "attention" and place and kinds[place - 1] == "ffn":
                first = path
            joined[path] = first
    return joined


def _numbered(name: str) -> list[str]:
    """Paths of the numbered modules around a parameter, outermost first."""
    parts = name.split(".")[:-1]
    return [
        ".".join(parts[: i + 1])
        for i, part in enumerate(parts)
        if part.isdigit() or _INDEXED.fullmatch(part.lower())
    ]


def _shared_path(names: list[str]) -> str:
    """Path of the smallest module that holds all the parameters."""
    paths = [name.split(".")[:-1] for name in names]
    shared = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        shared.append(parts[0])
    return ".".join(shared)


_FUSED = ("query_key_value", "key_value", "gate_up")
_ATTENTION_ROLES = {"query", "key", "value", "output", "query_key_value", "key_value"}
_FEED_FORWARD_ROLES = {"up", "gate", "down", "gate_up"}
_MOST_MAPS = 12  # in a module whose wiring is tried
_CALLS = 3  # of a module, before its wiring is given up
_MOST_OTHER = 0.1  # of the parameters without a role, before a warning
_UNITS = 3  # modules around a projection that may be what computes with it
_TRIALS = 2  # that run and show nothing, before a projection is left as it is
_INDEX = re.compile(r"layer_?(idx|id|index|number)|^(idx|index)$")


def anatomy_of(
    model: nn.Module,
    parameter_names: Sequence[str] | None = None,
    *,
    run: trials.Runner | None = None,
    roles: Mapping[str, str] | None = None,
) -> Anatomy:
    """The anatomy of the flat vector made of ``parameter_names`` (None: all trainable).

    A role comes from a parameter's name and is held to what its linear map does in a trial
    (``anatomy.wiring``); what was concluded or left to the name is in ``Anatomy.assumptions``. A
    fused projection is cut where a trial shows what its features are (``anatomy.trials``), and
    stays in one piece elsewhere; ``Anatomy.notes`` says which and why.
    run: runs a copy of the model on data, for attentions that do not run on made-up inputs.
    roles: glob of parameter names → role, ``{"*.net.1.weight": "up"}``; a bias follows its weight.
    """
    tree = _Tree(model, run, roles or {})
    if parameter_names is None:
        parameter_names = [n for n, p in tree.parameters.items() if p.requires_grad]
    unknown = [name for name in parameter_names if name not in tree.parameters]
    if unknown:
        raise KeyError(f"the model has no parameter {', '.join(unknown[:5])}.")
    slices: list[Slice] = []
    start = 0
    for name in parameter_names:
        parameter = tree.parameter_slice(name, start)
        slices += tree.pieces(parameter)
        start += parameter.size
    anatomy = Anatomy(
        _unique(slices),
        notes=dict.fromkeys(tree.notes),
        assumptions=dict.fromkeys(tree.assumptions),
    )
    _warn_of_others(anatomy)
    return anatomy


def _warn_of_others(anatomy: Anatomy) -> None:
    """Say so when much of a Transformer has no role that is known."""
    others = [piece for piece in anatomy if piece.sublayer == "other"]
    share = sum(piece.size for piece in others) / max(anatomy.size, 1)
    if share > _MOST_OTHER:
        largest = max(others, key=lambda piece: piece.size)
        warnings.warn(
            f"{share:.0%} of the parameters have no role that is known (the largest is "
            f"{largest.parameter}) and stand under their own names; say what they are with "
            f'roles={{"{largest.parameter}": "up"}}, --role on the command line.',
            stacklevel=4,
        )


@dataclass(frozen=True)
class _Place:
    """A parameter's reading with its place in the model."""

    reading: Reading | None
    block: str | None  # path of the block it belongs to


class _Tree:
    """A model's parameters with readings, blocks and norm numbers, computed once."""

    def __init__(
        self, model: nn.Module, run: trials.Runner | None, roles: Mapping[str, str]
    ) -> None:
        self.model, self.run = model, run
        self.notes: list[str] = []
        self.assumptions: list[str] = []
        self._verdicts: dict[object, trials.Verdict | str] = {}  # or why there is none
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.parameters = dict(model.named_parameters())
        by_identity = {id(p): name for name, p in self.parameters.items()}
        self.aliases: dict[str, list[str]] = {name: [] for name in self.parameters}
        for name, p in model.named_parameters(remove_duplicate=False):
            if name != by_identity[id(p)]:
                self.aliases[by_identity[id(p)]].append(name)
        readings = {name: self._read(name) for name in self.parameters}
        stated = self._stated(roles)
        self._hold_to_what_they_do(readings, stated)
        readings |= stated
        # Names such as fc1 mean a feed-forward part only in a model that mixes tokens.
        mixing = ("attention", "mixer")
        mixes = any("fourier" in name for name in self.modules)  # FNet's mixing has no weights
        if not mixes and not any(r and r.sublayer in mixing for r in readings.values()):
            readings = {n: r if r is None or r.certain else None for n, r in readings.items()}
        blocks = find_blocks(readings, self.assumptions)
        self.places = {n: _Place(readings[n], blocks.get(n)) for n in self.parameters}
        order = dict.fromkeys(block for block in blocks.values() if block is not None)
        self.layer = {path: index for index, path in enumerate(order)}
        self.norm_number = self._number_norms()

    def _read(self, name: str) -> Reading | None:
        """A tied parameter is read under the name that makes it an embedding, if one does."""
        readings = [
            read(alias, self.modules, self.parameters[name].ndim)
            for alias in (name, *self.aliases[name])
        ]
        tables = [r for r in readings if r is not None and r.sublayer == "embedding"]
        reading = tables[0] if tables else next((r for r in readings if r is not None), None)
        if reading and reading.sublayer == "attention" and self._is_listed_as_cross(name):
            cross = f"cross_{reading.role.removeprefix('cross_')}"
            reading = replace(reading, role=cross, title=cross)
        return reading

    def _is_listed_as_cross(self, name: str) -> bool:
        """Whether a list of sublayers (x-transformers' ``layer_types``) calls this one "c"."""
        for path in _numbered(name):
            owner, _, number = path.rpartition(".")
            kinds = getattr(self.modules.get(owner.rpartition(".")[0]), "layer_types", None)
            if isinstance(kinds, (list, tuple)) and number.isdigit() and int(number) < len(kinds):
                return bool(kinds[int(number)] == "c")
        return False

    def _stated(self, roles: Mapping[str, str]) -> dict[str, Reading | None]:
        """The readings that the user states; the bias of a module follows its weight."""
        stated: dict[str, Reading | None] = {}
        for pattern, role in roles.items():
            names = [name for name in self.parameters if fnmatchcase(name, pattern)]
            if not names:
                raise KeyError(unknown_name(f"parameter {pattern!r}", pattern, self.parameters))
            for name in names:
                stated[name] = declared(role, name)
                bias = f"{name.removesuffix('.weight')}.bias"
                if name.endswith(".weight") and bias in self.parameters:
                    stated.setdefault(bias, declared(role, bias))
        return stated

    # --- what linear maps do ----------------------------------------------------------------------

    def _hold_to_what_they_do(
        self, readings: dict[str, Reading | None], stated: dict[str, Reading | None]
    ) -> None:
        """Correct and complete the readings by trials of the modules that hold linear maps."""
        shown, tried = self._shown_roles({**readings, **stated})
        for weight, role in shown.items():
            path = weight.removesuffix(".weight")
            was = stated.get(weight, readings[weight])
            told = was.role.removeprefix("cross_") if was else None
            if told == role:
                continue
            kind = type(self.modules[path.rpartition(".")[0]]).__name__
            what = f"{kind}.{path.rpartition('.')[2]}" if kind != "Sequential" else _starred(path)
            if weight in stated:
                self.assumptions.append(
                    f"{what} is said to be {told}; in a trial it acts as {role}"
                )
                continue
            reason = f"its name says {told}" if _speaks(was) else "its name says nothing"
            self.assumptions.append(f"{what} is read as {role} by what it does; {reason}")
            prefix = "cross_" if was and was.role.startswith("cross_") else ""
            for name in (weight, f"{path}.bias"):
                if name in readings:
                    readings[name] = declared(prefix + role, name, certain=False)
        for name, reading in readings.items():
            guess = reading is not None and not reading.certain and _speaks(reading)
            if guess and name not in shown and name not in stated and name.endswith(".weight"):
                path = name.removesuffix(".weight")
                kind = type(self.modules[path.rpartition(".")[0]]).__name__
                why = "a trial shows nothing of it" if name in tried else "it could not be tried"
                assert reading is not None
                self.assumptions.append(
                    f"{kind}.{path.rpartition('.')[2]} is read as {reading.role} by its name: {why}"
                )

    def _shown_roles(self, readings: dict[str, Reading | None]) -> tuple[dict[str, str], set[str]]:
        """Weight → the role its linear map shows, and the weights that were in a trial."""
        maps = [name for name in self.parameters if self._may_show(name, readings[name])]
        units: dict[str, list[str]] = {}
        for name in maps:
            for path in list(trials.outwards(name.removesuffix(".weight").rpartition(".")[0]))[
                :_UNITS
            ]:
                units.setdefault(path, []).append(name)
        kinds: dict[object, tuple[str, dict[str, str]]] = {}  # an example of each kind of unit
        keys: dict[str, object] = {}
        for path, names in units.items():
            unit = self.modules[path]
            listed = isinstance(unit, (nn.ModuleList, nn.ModuleDict, nn.MultiheadAttention))
            if 2 <= len(names) <= _MOST_MAPS and not listed:
                inner = {name[len(path) :].lstrip("."): name for name in names}
                shapes = tuple((n, self.parameters[name].shape) for n, name in inner.items())
                keys[path] = (*_settings(unit), shapes)
                kinds.setdefault(keys[path], (path, inner))
        rehearsal = trials.Rehearsal(self.modules, {path for path, _ in kinds.values()}, self.run)
        verdicts: dict[object, dict[str, str] | None] = {}
        shown: dict[str, str] = {}
        tried: set[str] = set()
        with trials.undisturbed(self.model):
            for path, key in sorted(keys.items(), key=lambda item: len(units[item[0]])):
                if all(name in shown for name in units[path]):
                    continue
                if key not in verdicts:
                    verdicts[key] = self._wiring(rehearsal, *kinds[key])
                roles = verdicts[key]
                if roles is not None:
                    prefix = f"{path}." if path else ""
                    tried.update(units[path])
                    for inner_name, role in roles.items():
                        name = prefix + inner_name
                        if _fits(role, readings[name], name):
                            shown.setdefault(name, role)
        return shown, tried

    def _may_show(self, name: str, reading: Reading | None) -> bool:
        """Whether a parameter is the weight of a linear map that may be a part of a block."""
        owner = self.modules[name.rpartition(".")[0]]
        linear = isinstance(owner, nn.Linear) or type(owner).__name__ == "Conv1D"
        plain = name.endswith(".weight") and self.parameters[name].ndim == 2
        placed = reading is None or reading.sublayer in ("attention", "ffn", "other")
        routes = reading is not None and reading.role == "router"
        return linear and plain and placed and not routes and "lora_" not in name

    def _wiring(
        self, rehearsal: trials.Rehearsal, path: str, inner: dict[str, str]
    ) -> dict[str, str] | None:
        """Inner name → role, from a call of the module; None where none could be tried."""
        first = next(iter(inner.values()))
        owner = self.modules[first.removesuffix(".weight")]
        width = self.parameters[first].shape[0 if type(owner).__name__ == "Conv1D" else 1]
        roles: dict[str, str] | None = None
        for call in itertools.islice(rehearsal.calls(path, width), _CALLS):
            try:
                weights = {name: call.unit.get_parameter(name) for name in inner}
                roles = wiring.roles_of(call, weights)
            except Exception:  # whatever it is, the module does not run in a trial
                continue
            if roles:
                break
        return roles

    def _number_norms(self) -> dict[str, str]:
        """Norm module → "norm1", "norm2", … in its block's order, or "query_norm", "key_norm"."""
        titles: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for place in self.places.values():
            path = place.reading.norm if place.reading else None
            if path is None or place.block is None or path in titles:
                continue
            of_query_or_key = re.fullmatch(
                r"(q|k|query|key)_?(?:layer)?_?(?:norm|ln)", path.rpartition(".")[2]
            )
            if of_query_or_key:
                titles[path] = {"q": "query", "k": "key"}[of_query_or_key[1][0]] + "_norm"
            else:
                counts[place.block] += 1
                titles[path] = f"norm{counts[place.block]}"
        return titles

    # --- slices -----------------------------------------------------------------------------------

    def parameter_slice(self, name: str, start: int) -> Slice:
        """The parameter as one slice."""
        parameter, reading = self.parameters[name], self.places[name].reading
        block = self.places[name].block
        layer = self.layer.get(block) if block is not None else None
        return Slice(
            name=self._title(name, reading, layer),
            parameter=name,
            layer=layer,
            sublayer=reading.sublayer if reading else "other",
            role=reading.role if reading else own_role(name, self.modules),
            shape=tuple(parameter.shape) or (1,),
            start=start,
            length=parameter.numel(),
            transposed=self._transposed(name),
            head_size=self._head_size(name, reading),
            tied=tuple(self.aliases[name]),
        )

    def _transposed(self, name: str) -> bool:
        owner = self.modules.get(name.rpartition(".")[0])
        return type(owner).__name__ == "Conv1D" and self.parameters[name].ndim == 2

    def _title(self, name: str, reading: Reading | None, layer: int | None) -> str:
        if reading is None:
            return name
        if reading.norm is not None and reading.norm in self.norm_number:
            return f"blocks.{layer}.{self.norm_number[reading.norm]}.{reading.title}"
        if reading.norm is not None:
            place = "embedding.norm" if "embed" in reading.norm.lower() else "final_norm"
            if re.search(r"(^|\.)(cls|lm_head|head|classifier|pooler)\.", reading.norm):
                place = "head.norm"
            return f"{place}.{reading.title}"
        if layer is not None:
            return f"blocks.{layer}.{reading.title}"
        if reading.sublayer in ("embedding", "head"):
            return f"{reading.sublayer}.{reading.title}"
        return name

    def pieces(self, fused: Slice) -> list[Slice]:
        """The slice itself, or its parts when it is a fused projection that was seen to be one."""
        cross = "cross_" if fused.role.startswith("cross_") else ""
        suffix = "_bias" if fused.role.endswith("_bias") else ""
        role = fused.role.removeprefix(cross).removesuffix(suffix)
        if role not in _FUSED:
            return [fused]
        verdict = self._verdict(fused.parameter, role)
        if verdict is None:
            return [fused]
        axis = len(fused.shape) - 1 if fused.transposed else verdict.axis or 0
        out = fused.shape[axis]
        parts = trials.parts_of(verdict.roles)
        inner = math.prod(fused.shape[axis + 1 :])  # entries of one output feature in a run
        outer = math.prod(fused.shape[:axis])
        # Runs within runs are one regular row of runs only if they go on at the same pace.
        if parts is None or (
            outer > 1 and any(p.count > 1 and p.count * p.stride != out for p in parts)
        ):
            self.notes.append(
                f"{fused.parameter} stays in one piece: its parts are no regular runs"
            )
            return [fused]
        pieces = []
        for part in parts:
            stride = part.stride if part.count > 1 else out
            pieces.append(
                replace(
                    fused,
                    name=fused.name.replace(fused.role, f"{cross}{part.role}{suffix}"),
                    role=f"{cross}{part.role}{suffix}",
                    shape=(*fused.shape[:axis], part.length * part.count, *fused.shape[axis + 1 :]),
                    start=fused.start + part.start * inner,
                    offset=fused.offset + part.start * inner,
                    length=part.length * inner,
                    count=part.count * outer,
                    stride=stride * inner if part.count * outer > 1 else 0,
                    head_size=verdict.head_sizes.get(part.role),
                )
            )
        return pieces

    def _verdict(self, name: str, role: str) -> trials.Verdict | None:
        """What a fused parameter's features are, tried out once for all layers that are alike."""
        owner = self.modules[name.rpartition(".")[0]]
        if getattr(type(owner), "forward", None) is nn.MultiheadAttention.forward:
            assert isinstance(owner, nn.MultiheadAttention)  # the layout is torch's own, [q; k; v]
            thirds = ("query", "key", "value")
            roles = [role for role in thirds for _ in range(owner.embed_dim)]
            return trials.Verdict(roles, 0, dict.fromkeys(thirds, owner.head_dim))
        weight = self._weight_beside(name)
        if weight is None:
            return None  # the weight is made of others, by a parametrization
        unit = self._unit_of(weight)
        likeness = _likeness(self.modules[unit], weight, unit, role)
        if likeness not in self._verdicts:
            self._verdicts[likeness] = self._tried(*self._examples[likeness], role)
        verdict = self._verdicts[likeness]
        if isinstance(verdict, str):
            kind, inner = type(self.modules[unit]).__name__, weight[len(unit) :].lstrip(".")
            self.notes.append(f"{kind}.{inner} stays in one piece: {verdict}")
            return None
        return verdict

    def _weight_beside(self, name: str) -> str | None:
        """The weight whose features a fused weight or bias has: itself, or the module's."""
        path, _, attribute = name.rpartition(".")
        if attribute not in ("weight", "bias"):
            return name
        return f"{path}.weight" if "weight" in self.modules[path]._parameters else None

    def _unit_of(self, weight: str) -> str:
        """Path of the module that computes with a weight: the one that holds its linear map."""
        path, _, attribute = weight.rpartition(".")
        return path.rpartition(".")[0] if attribute == "weight" else path

    @functools.cached_property
    def _examples(self) -> dict[object, tuple[str, str]]:
        """The first weight of every kind of fused ones, and its unit: layers alike are one kind."""
        examples: dict[object, tuple[str, str]] = {}
        for name, place in self.places.items():
            role = place.reading.role if place.reading else ""
            role = role.removesuffix("_bias").removeprefix("cross_")
            weight = self._weight_beside(name)
            if weight is not None and role in _FUSED:
                unit = self._unit_of(weight)
                likeness = _likeness(self.modules[unit], weight, unit, role)
                examples.setdefault(likeness, (weight, unit))
        return examples

    @functools.cached_property
    def _rehearsal(self) -> trials.Rehearsal:
        """Calls of the examples' units and of the modules around them."""
        units = {unit for _, unit in self._examples.values()}
        around = {path for unit in units for path in list(trials.outwards(unit))[:_UNITS]}
        return trials.Rehearsal(self.modules, around, self.run)

    def _tried(self, weight: str, unit: str, role: str) -> trials.Verdict | str:
        """A verdict from the module itself or, where it only projects, from those around it."""
        parameter = self.model.get_parameter(weight)
        owner = self.modules[weight.rpartition(".")[0]]
        width = parameter.shape[-1]
        if type(owner).__name__ == "Conv1D":
            width = parameter.shape[0]
        elif isinstance(owner, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            width = parameter.shape[1]
        heads = trials.heads_of(self._chain(weight))
        completed = 0
        with trials.undisturbed(self.model):
            for path in list(trials.outwards(unit))[:_UNITS]:
                for call in self._rehearsal.calls(path, width):
                    copied = call.unit.get_parameter(weight[len(path) :].lstrip("."))
                    try:
                        if role == "gate_up":
                            verdict = trials.gate_roles(call, copied)
                        else:
                            verdict = trials.attention_roles(
                                call, copied, queries=role == "query_key_value", heads=heads
                            )
                    except Exception:  # whatever it is, the module does not run in a trial
                        continue
                    if verdict is not None:
                        return verdict
                    completed += 1
                    if completed >= _TRIALS:
                        break
        if completed:
            what = "gate and up" if role == "gate_up" else "query, key and value"
            return f"a trial does not show {what} in it"
        advice = "" if self.run else "; problem.anatomy tries it on the problem's data"
        return f"it could not be tried out (too large, or no made-up input fits it){advice}"

    def _chain(self, name: str) -> list[nn.Module]:
        """Modules around a parameter, innermost first."""
        parts = name.split(".")[:-1]
        paths = [".".join(parts[:i]) for i in range(len(parts), -1, -1)]
        return [self.modules[path] for path in paths if path in self.modules]

    def _head_size(self, name: str, reading: Reading | None) -> int | None:
        if reading is None or reading.sublayer != "attention":
            return None
        path, _, attribute = name.rpartition(".")
        owner = self.modules[path]
        if not isinstance(owner, nn.MultiheadAttention) and attribute not in ("weight", "bias"):
            return None
        heads = trials.heads_of(self._chain(name))
        width = None  # of the query, or of what the output takes
        if isinstance(owner, nn.MultiheadAttention):
            width = owner.embed_dim
        elif isinstance(owner, nn.Linear):
            role = reading.role.removeprefix("cross_")
            width = owner.in_features if role == "output" else self._query_width(path)
        if width is None:
            return heads.size
        if heads.count:  # a size beside it may be that of a part (rotary, or a key's bottleneck)
            return width // heads.count if width % heads.count == 0 else None
        return heads.size if heads.size and width % heads.size == 0 else None

    def _query_width(self, path: str) -> int | None:
        """Output features of the query projection beside a projection."""
        parent = self.modules[path.rpartition(".")[0]]
        for child, module in parent.named_children():
            reading = read(f"{child}.weight", {"": parent, child: module}, 2)
            if reading and reading.role.removeprefix("cross_") in ("query", "query_key_value"):
                width = getattr(module, "out_features", None)
                if isinstance(width, int):
                    return width if reading.role.endswith("query") else width // 3
        return None


def _fits(role: str, reading: Reading | None, name: str) -> bool:
    """Whether what a map does may correct what its name says: parts of a kind, and what has none.

    Two maps with a nonlinearity between them are a feed-forward part only inside a block.
    """
    attentive = role in _ATTENTION_ROLES
    if reading is not None and reading.sublayer in ("attention", "ffn"):
        known = _ATTENTION_ROLES if reading.sublayer == "attention" else _FEED_FORWARD_ROLES
        own = reading.role.removeprefix("cross_") not in _ATTENTION_ROLES | _FEED_FORWARD_ROLES
        return role in known and (_replaceable(reading) or own)
    path = name.removesuffix(".weight")
    return attentive or any(p != path for p in _numbered(name))


def _replaceable(reading: Reading) -> bool:
    """Not a projection through a bottleneck, nor one that brings a gate."""
    return not reading.role.endswith(("_down", "_gate"))


def _speaks(reading: Reading | None) -> bool:
    """Whether a name said one of the roles that a trial can show."""
    roles = _ATTENTION_ROLES | _FEED_FORWARD_ROLES
    return reading is not None and reading.role.removeprefix("cross_") in roles


def _starred(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", path)


def _likeness(unit: nn.Module, weight: str, path: str, role: str) -> object:
    """Equal for modules that lay their fused weights out alike: their class and settings are."""
    inner = weight[len(path) :].lstrip(".")
    return (*_settings(unit), inner, role, tuple(unit.get_parameter(inner).shape))


def _settings(unit: nn.Module) -> tuple[object, ...]:
    """A module's class and plain settings, without its number."""
    settings = [
        (name, value if isinstance(value, (bool, int, float, str)) else id(value))
        for name, value in vars(unit).items()
        if (isinstance(value, (bool, int, float, str)) or callable(value))
        and name != "training"
        and not _INDEX.search(name)
    ]
    return type(unit), tuple(settings)


def _unique(slices: list[Slice]) -> list[Slice]:
    """Number the slices that would share a name: "blocks.0.key.0", "blocks.0.key.1", …"""
    total = Counter(piece.name for piece in slices)
    numbers = {name: itertools.count() for name in total}
    result = []
    for piece in slices:
        name = piece.name
        while total[name] > 1 or (name != piece.name and name in total):
            name = f"{piece.name}.{next(numbers[piece.name])}"
        result.append(replace(piece, name=name))
    return result
