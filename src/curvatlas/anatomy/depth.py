"""Which block each parameter belongs to."""

from __future__ import annotations

import re

from curvatlas.anatomy.names import Reading

_INDEXED = re.compile(r"(?:\w*_)?(?:block|layer|stage)_?\d+")  # attributes like block1, layer_2
_MIXING = {"attention", "mixer"}  # sublayers where tokens meet
_PARTS = {*_MIXING, "ffn"}


def find_blocks(readings: dict[str, Reading | None]) -> dict[str, str]:
    """Parameter name → path of its block, for those that have one.

    The block is the innermost numbered module that holds an attention (or another mixer of tokens)
    and a feed-forward part (T5 numbers sublayers inside blocks, Swin numbers stages around them),
    or the outermost numbered module where none holds both. Attention and feed-forward parts outside
    all numbered modules (a bare encoder layer) make one block: the smallest module around them.
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
    blocks: dict[str, str] = {}
    for name, kind in kinds.items():
        paths = [path for path in numbered[name] if path not in stages]
        whole = [path for path in paths if path in complete]
        if whole:
            blocks[name] = whole[0]
        elif paths and (kind not in ("embedding", "head") or holds[paths[0]] & _MIXING):
            blocks[name] = paths[0]
    loose = [n for n, kind in kinds.items() if kind in _PARTS and n not in blocks]
    if loose:
        path = _shared_path(loose)
        inside = f"{path}." if path else ""
        for name, kind in kinds.items():
            if name.startswith(inside) and name not in blocks and kind not in ("embedding", "head"):
                blocks[name] = path
    return blocks


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
