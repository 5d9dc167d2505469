"""Read a model's anatomy: names to roles, fused parameters to pieces, modules to layers."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from curvatlas.anatomy import fused
from curvatlas.anatomy.depth import find_blocks
from curvatlas.anatomy.names import Reading, read
from curvatlas.anatomy.selection import Anatomy
from curvatlas.anatomy.slices import Slice

_FUSED = ("query_key_value", "key_value", "gate_up")


def anatomy_of(model: nn.Module, parameter_names: Sequence[str] | None = None) -> Anatomy:
    """The anatomy of the flat vector made of ``parameter_names`` (None: all trainable)."""
    tree = _Tree(model)
    if parameter_names is None:
        parameter_names = [n for n, p in tree.parameters.items() if p.requires_grad]
    unknown = [name for name in parameter_names if name not in tree.parameters]
    if unknown:
        raise KeyError(f"the model has no parameter {', '.join(unknown[:5])}.")
    slices: list[Slice] = []
    notes: list[str] = []
    start = 0
    for name in parameter_names:
        whole = tree.whole(name, start)
        slices += tree.pieces(whole, notes)
        start += whole.size
    return Anatomy(_unique(slices), assumptions=dict.fromkeys(notes))


@dataclass(frozen=True)
class _Known:
    """A parameter's reading with its place in the model."""

    reading: Reading | None
    block: str | None  # path of the block it belongs to


class _Tree:
    """A model's parameters with readings, blocks and norm numbers, computed once."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        by_identity = {id(p): name for name, p in self.parameters.items()}
        self.aliases: dict[str, list[str]] = {name: [] for name in self.parameters}
        for name, p in model.named_parameters(remove_duplicate=False):
            if name != by_identity[id(p)]:
                self.aliases[by_identity[id(p)]].append(name)
        readings = {name: self._read(name) for name in self.parameters}
        # Names such as fc1 mean a feed-forward part only in a model that has an attention.
        if not any(r is not None and r.sublayer == "attention" for r in readings.values()):
            readings = {n: r if r is None or r.certain else None for n, r in readings.items()}
        blocks = find_blocks(readings)
        self.known = {n: _Known(readings[n], blocks.get(n)) for n in self.parameters}
        order = dict.fromkeys(block for block in blocks.values() if block is not None)
        self.layer = {path: index for index, path in enumerate(order)}
        self.norm_number = self._number_norms()

    def _read(self, name: str) -> Reading | None:
        """A tied parameter is read under the name that makes it an embedding, if one does."""
        found = [
            read(alias, self.modules, self.parameters[name].ndim)
            for alias in (name, *self.aliases[name])
        ]
        tables = [r for r in found if r is not None and r.sublayer == "embedding"]
        return tables[0] if tables else next((r for r in found if r is not None), None)

    def _number_norms(self) -> dict[str, str]:
        """Norm module → "norm1", "norm2", … in its block's order, or "query_norm", "key_norm"."""
        titles: dict[str, str] = {}
        counts: Counter[str] = Counter()
        for known in self.known.values():
            path = known.reading.norm if known.reading else None
            if path is None or known.block is None or path in titles:
                continue
            own = re.fullmatch(r"(q|k|query|key)_?(?:layer)?_?(?:norm|ln)", path.rpartition(".")[2])
            if own:
                titles[path] = {"q": "query", "k": "key"}[own[1][0]] + "_norm"
            else:
                counts[known.block] += 1
                titles[path] = f"norm{counts[known.block]}"
        return titles

    # --- slices -----------------------------------------------------------------------------------

    def whole(self, name: str, start: int) -> Slice:
        """The parameter as one slice."""
        parameter, known = self.parameters[name], self.known[name]
        layer = self.layer.get(known.block) if known.block is not None else None
        path = name.rpartition(".")[0]
        reading = known.reading
        attribute = name.rpartition(".")[2]
        return Slice(
            name=self._title(name, known, layer),
            parameter=name,
            layer=layer,
            sublayer=reading.sublayer if reading else "other",
            role=reading.role if reading else attribute,
            shape=tuple(parameter.shape) or (1,),
            start=start,
            length=parameter.numel(),
            transposed=type(self.modules.get(path)).__name__ == "Conv1D" and parameter.ndim == 2,
            head_size=self._head_size(name, reading),
            tied=tuple(self.aliases[name]),
        )

    def _title(self, name: str, known: _Known, layer: int | None) -> str:
        reading = known.reading
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

    def pieces(self, whole: Slice, notes: list[str]) -> list[Slice]:
        """The slice itself, or its parts when it is a fused projection we can take apart."""
        cross = "cross_" if whole.role.startswith("cross_") else ""
        suffix = "_bias" if whole.role.endswith("_bias") else ""
        role = whole.role.removeprefix(cross).removesuffix(suffix)
        if role not in _FUSED:
            return [whole]
        axis = len(whole.shape) - 1 if whole.transposed else max(len(whole.shape) - 2, 0)
        parts = self._parts(whole, role, whole.shape[axis], notes)
        if parts is None:
            return [whole]
        pieces = []
        inner = math.prod(whole.shape[axis + 1 :])  # entries of one output feature in a run
        outer = math.prod(whole.shape[:axis])
        for part in parts:
            if outer > 1 and part.count > 1:
                return [whole]
            entries = part.length * inner
            pieces.append(
                replace(
                    whole,
                    name=whole.name.replace(whole.role, f"{cross}{part.role}{suffix}"),
                    role=f"{cross}{part.role}{suffix}",
                    shape=(
                        *whole.shape[:axis], part.length * part.count, *whole.shape[axis + 1 :]
                    ),
                    start=whole.start + part.start * inner,
                    offset=whole.offset + part.start * inner,
                    length=entries,
                    count=part.count if outer == 1 else outer,
                    stride=part.stride * inner if outer == 1 else whole.shape[axis] * inner,
                )
            )  # fmt: skip
        return pieces

    def _parts(
        self, whole: Slice, role: str, out: int, notes: list[str]
    ) -> list[fused.Part] | None:
        path, _, attribute = whole.parameter.rpartition(".")
        bare = attribute not in ("weight", "bias")
        owner = self.modules[path]
        if role == "key_value":
            return fused.halves("key", "value", out)
        if role == "gate_up":
            kind = type(self.modules[path if bare else path.rpartition(".")[0]]).__name__
            sure = re.search(r"^Phi3|^Phi4|^Mixtral|^Glm|SwiGLU|^ModernBert", kind)
            return fused.halves("gate", "up", out) if sure else None
        if bare and not isinstance(owner, nn.MultiheadAttention):
            return None  # a bare matrix does not say which axis is the output
        attention = owner if bare else self.modules[path.rpartition(".")[0]]
        leaf_name = attribute if bare else path.rpartition(".")[2]
        heads = fused.heads_of(self._chain(whole.parameter))
        if heads.count and not heads.size and isinstance(owner, nn.Linear):
            heads = fused.Heads(heads.count, owner.in_features // heads.count)
        parts, note = fused.query_key_value(attention, owner, leaf_name, out, heads)
        if note is not None:
            notes.append(note)
        return parts

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
        heads = fused.heads_of(self._chain(name))
        if heads.size is not None or not heads.count:
            return heads.size
        # Without a stated size: the query's (or the output's inner) width over the head count.
        width = None
        if isinstance(owner, nn.MultiheadAttention):
            width = owner.embed_dim
        elif isinstance(owner, nn.Linear):
            role = reading.role.removeprefix("cross_")
            width = owner.in_features if role == "output" else self._query_width(path)
        return width // heads.count if width and width % heads.count == 0 else None

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


def _unique(slices: list[Slice]) -> list[Slice]:
    """Number the slices that would share a name: "blocks.0.key.0", "blocks.0.key.1", …"""
    total = Counter(piece.name for piece in slices)
    seen: Counter[str] = Counter()
    result = []
    for piece in slices:
        name = piece.name
        if total[name] > 1:
            piece = replace(piece, name=f"{name}.{seen[name]}")
            seen[name] += 1
        result.append(piece)
    return result
