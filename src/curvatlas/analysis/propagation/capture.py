"""Find the sublayers of any model and read their activations off one forward pass.

The anatomy says which modules are norms, attention outputs and feed-forward outputs; hooks catch
their tensors; the autograd graph says which of them each one is computed from. Nothing is known
about the architecture beyond that: pre- and post-norm, parallel blocks and pooled heads all work.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from curvatlas.anatomy import Anatomy, anatomy_of
from curvatlas.errors import ProblemError
from curvatlas.problem import Batch, Problem
from curvatlas.problem.evaluation import call

_Label = tuple[str, str, int | None, str | None]  # name, kind, layer, path of the module


@dataclass(eq=False)
class Node:
    """One activation: a tensor of the forward pass that a sublayer puts out."""

    name: str
    kind: str
    layer: int | None
    tensor: Tensor
    module: str | None = None  # path of the module whose output it is
    aliases: list[str] = field(default_factory=list)
    parents: list[Node] = field(default_factory=list)  # activations it is computed from directly

    def __repr__(self) -> str:
        return f"Node({self.name} ← {', '.join(p.name for p in self.parents)})"


@dataclass(frozen=True, kw_only=True)
class Capture:
    """The activations in order of computation, and what the loss reads."""

    nodes: tuple[Node, ...]
    outputs: Any
    last: tuple[Node, ...]  # activations the outputs are computed from directly


@dataclass(frozen=True)
class _Watched:
    """A module whose output, and for norms whose input, is an activation of interest."""

    path: str
    name: str
    kind: str
    layer: int | None
    take_input: bool = False


def capture(problem: Problem, batch: Batch, *, first: int | None = None) -> Capture:
    """Run the model once (inside ``problem.evaluating()``) and return its activations.

    first: the block whose input they begin with; None: the first there is.
    """
    model = problem.model
    anatomy = anatomy_of(model, [name for name, _ in model.named_parameters()])
    watched = _watched(model, anatomy)
    seen: dict[tuple[Any, int], Node] = {}
    order: list[Node] = []

    def add(tensor: Any, name: str, kind: str, layer: int | None, path: str | None) -> None:
        if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
            return
        key = (tensor.grad_fn, tensor.output_nr)
        node = seen.get(key)
        if node is None:
            node = seen[key] = Node(name, kind, layer, tensor, path)
            order.append(node)
        elif node.kind in ("residual", "embedding") and kind not in ("residual", "embedding"):
            node.aliases.append(node.name)
            node.name, node.kind, node.layer, node.module = name, kind, layer, path
        elif name != node.name and name not in node.aliases:
            node.aliases.append(name)

    outputs = _run(problem, batch, anatomy, watched, add, first)
    nodes = _link(order, seen)
    leaves = [t for t in tree_flatten(outputs)[0] if isinstance(t, Tensor) and t.requires_grad]
    last: dict[Node, None] = {}
    for leaf in leaves:
        key = (leaf.grad_fn, leaf.output_nr)
        for parent in [seen[key]] if key in seen else _direct_parents(leaf, seen, None):
            last[parent] = None
    if not nodes or not last:
        raise ProblemError(
            f"no sublayer of {type(model).__name__} was recognised on the way to its output: "
            "propagation needs attention, norm or feed-forward modules (see problem.anatomy)."
        )
    used = _ancestors(list(last))
    kept = tuple(node for node in nodes if node in used)
    _name_residuals(kept)
    return Capture(nodes=kept, outputs=outputs, last=tuple(n for n in kept if n in last))


def _run(
    problem: Problem,
    batch: Batch,
    anatomy: Anatomy,
    watched: list[_Watched],
    add: Any,
    first: int | None,
) -> Any:
    model = problem.model
    modules = dict(model.named_modules())
    blocks = block_paths(anatomy)
    first = min(blocks, default=None) if first is None else first
    before: _Label | None
    after: _Label
    with contextlib.ExitStack() as stack:
        for layer, path in blocks.items():
            before = ("embedding", "embedding", None, None) if layer == first else None
            after = (f"blocks.{layer}", "residual", layer, None)
            stack.enter_context(_hooked(called_module(model, path), add, before, after))
        for item in watched:
            before = (f"input of {item.name}", "residual", item.layer, None)
            after = (item.name, item.kind, item.layer, item.path)
            stack.enter_context(
                _hooked(modules[item.path], add, before if item.take_input else None, after)
            )
        # Only what stands before the first block needs a gradient of its own.
        inside = tuple(f"{path}." if path else "" for path in blocks.values())
        values = {
            name: parameter.detach().requires_grad_(not (inside and name.startswith(inside)))
            for name, parameter in problem.named_weights().items()
        }
        inputs = tree_map(_differentiable, batch.inputs)
        raw = call(model, values, inputs)
    return problem.read(raw, batch)


_REFUSED = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def takes(model: nn.Module, x: Tensor) -> bool:
    """Whether the model runs on x."""
    try:
        with torch.no_grad():
            model(x)
    except _REFUSED:
        return False
    return True


class EnteringAt(nn.Module):
    """A model from one block on: what it is given takes the place of what enters that block.

    The model itself runs on a stand-in, of which nothing reaches the block: the token 1 everywhere,
    or zeros for a model whose first map is linear.
    """

    def __init__(self, model: nn.Module, layer: int, hidden: Tensor) -> None:
        super().__init__()
        self.model = model
        paths = block_paths(anatomy_of(model))
        if layer not in paths:
            raise KeyError(f"there is no block {layer} for hidden states; there are {list(paths)}.")
        self.path = paths[layer]
        linear = next((m for m in model.modules() if isinstance(m, nn.Linear)), None)
        widths = [None] if linear is None else [None, linear.in_features]
        for self.width in widths:
            if takes(self, hidden):
                return
        raise ValueError(
            f"{type(model).__name__} takes x {tuple(hidden.shape)} neither as its input nor as the "
            f"hidden states that enter its block {layer}."
        )

    def forward(self, hidden: Tensor) -> Any:
        """(samples, tokens, width) → what the model puts out."""
        if self.width is None:
            stand_in = torch.ones(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
        else:
            stand_in = hidden.new_zeros(*hidden.shape[:-1], self.width)
        block = called_module(self.model, self.path)

        def replaced(_: nn.Module, arguments: Any, keywords: Any) -> Any:
            return (hidden, *arguments[1:]), keywords

        handle = block.register_forward_pre_hook(replaced, with_kwargs=True, prepend=True)
        try:
            return self.model(stand_in)
        finally:
            handle.remove()


class _Softmaxes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what every softmax puts out while ``watching``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watching, self.seen = False, list[Tensor]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if self.watching and function.overloadpacket in SOFTMAX and result.ndim > 2:
            self.seen.append(result)
        return result


SOFTMAX = (torch.ops.aten._softmax, torch.ops.aten._safe_softmax)


def attention_weights(problem: Problem, batch: Batch, layer: int) -> Tensor | None:
    """A (samples, heads, queries, keys) of a block's (self-)attention; None where it has no
    softmax. One forward pass, inside ``problem.evaluating()``."""
    path = block_paths(problem.anatomy).get(layer)
    if path is None:
        return None
    block = called_module(problem.model, path)
    softmaxes = _Softmaxes()

    def watch(*_: Any) -> None:
        softmaxes.watching = True

    def stop(*_: Any) -> None:
        softmaxes.watching = False

    handles = [block.register_forward_pre_hook(watch), block.register_forward_hook(stop)]
    try:
        with torch.no_grad(), softmaxes:
            call(problem.model, problem.named_weights(), batch.inputs)
    finally:
        for handle in handles:
            handle.remove()
    return softmaxes.seen[0].detach() if softmaxes.seen else None


def _differentiable(leaf: Any) -> Any:
    """Real-valued inputs are followed too; the view gives them a place in the graph."""
    if isinstance(leaf, Tensor) and leaf.is_floating_point():
        fresh = leaf.detach().clone().requires_grad_(True)
        return fresh.view_as(fresh)
    return leaf


def block_paths(anatomy: Anatomy) -> dict[int, str]:
    """Layer → path of the module that holds all its parameters."""
    paths: dict[int, list[str]] = {}
    for piece in anatomy.slices:
        if piece.layer is not None:
            parts = piece.parameter.split(".")[:-1]
            shared = paths.get(piece.layer)
            paths[piece.layer] = parts if shared is None else _shared(shared, parts)
    return {layer: ".".join(parts) for layer, parts in sorted(paths.items())}


def called_module(model: nn.Module, path: str) -> nn.Module:
    """The module at ``path``, or the nearest one around it that has a forward pass of its own."""
    while path and isinstance(model.get_submodule(path), (nn.ModuleList, nn.ModuleDict)):
        path = path.rpartition(".")[0]
    return model.get_submodule(path)


def _shared(one: list[str], two: list[str]) -> list[str]:
    length = 0
    while length < min(len(one), len(two)) and one[length] == two[length]:
        length += 1
    return one[:length]


def _watched(model: nn.Module, anatomy: Anatomy) -> list[_Watched]:
    """The modules to watch: every norm, and the last linear map of attention and feed-forward."""
    modules = dict(model.named_modules())
    watched: dict[tuple[str, str], _Watched] = {}
    attention: dict[tuple[int | None, str], list[str]] = {}
    for piece in anatomy.slices:
        path = piece.parameter.rpartition(".")[0]
        prefix = f"blocks.{piece.layer}." if piece.layer is not None else ""
        inside_attention = ".query_norm." in piece.name or ".key_norm." in piece.name
        if piece.sublayer == "norm" and not inside_attention:
            # "final_norm.gamma.1", where encoder and decoder have one each, is "final_norm.1"
            name = ".".join(part for part in piece.name.split(".") if part != piece.role)
            watched[path, name] = _Watched(path, name, "norm", piece.layer, take_input=True)
        elif piece.sublayer == "attention":
            kind = "cross_attention" if piece.role.startswith("cross_") else "attention"
            attention.setdefault((piece.layer, kind), []).append(piece.parameter)
            if piece.role.removeprefix("cross_") == "output":
                watched[path, kind] = _Watched(path, prefix + kind, "attention", piece.layer)
        elif piece.sublayer == "ffn" and piece.role == "down":
            watched[path, "ffn"] = _Watched(path, prefix + "ffn", "ffn", piece.layer)
    for (layer, kind), parameters in attention.items():
        prefix = f"blocks.{layer}." if layer is not None else ""
        parts: list[str] = functools.reduce(_shared, [n.split(".")[:-1] for n in parameters])
        path = ".".join(parts)
        # nn.MultiheadAttention never calls its output projection: watch the module itself too.
        if isinstance(modules.get(path), nn.MultiheadAttention) or not any(
            w.name == prefix + kind for w in watched.values()
        ):
            watched = {k: w for k, w in watched.items() if w.name != prefix + kind}
            watched[path, kind] = _Watched(path, prefix + kind, "attention", layer)
    return list(watched.values())


@contextlib.contextmanager
def _hooked(module: nn.Module, add: Any, before: _Label | None, after: _Label) -> Iterator[None]:
    """Inside, ``add`` gets the first tensor that the module takes and gives, with its label."""

    def entering(_: nn.Module, arguments: Any, keywords: Any) -> None:
        if before is not None:
            add(_first_tensor((arguments, keywords)), *before)

    def leaving(_: nn.Module, arguments: Any, result: Any) -> None:
        add(_first_tensor(result), *after)

    handles = [
        module.register_forward_pre_hook(entering, with_kwargs=True),
        module.register_forward_hook(leaving),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _first_tensor(tree: Any) -> Tensor | None:
    """The first real-valued tensor in what a module takes or gives."""
    for leaf in tree_flatten(tree)[0]:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    return None


# --- who is computed from whom --------------------------------------------------------------------


def _direct_parents(
    tensor: Tensor, seen: dict[tuple[Any, int], Node], start_node: Node | None
) -> list[Node]:
    """Captured tensors reachable backwards without passing through another captured one."""
    parents: dict[Node, None] = {}
    visited: set[Any] = set()
    start: Any = tensor.grad_fn
    stack = [edge for edge in start.next_functions if edge[0] is not None]
    while stack:
        function, number = stack.pop()
        node = seen.get((function, number))
        if node is not None and node is not start_node:
            parents[node] = None
            continue
        if function in visited:
            continue
        visited.add(function)
        stack.extend(edge for edge in function.next_functions if edge[0] is not None)
    return list(parents)


def _link(order: list[Node], seen: dict[tuple[Any, int], Node]) -> list[Node]:
    """Fill in the parents and sort by computation (hooks fire in nearly that order already)."""
    for node in order:
        node.parents = _direct_parents(node.tensor, seen, node)
    sorted_nodes: list[Node] = []
    done: set[int] = set()

    def visit(node: Node) -> None:
        if id(node) in done:
            return
        done.add(id(node))
        for parent in node.parents:
            visit(parent)
        sorted_nodes.append(node)

    for node in order:
        visit(node)
    return sorted_nodes


def _ancestors(nodes: list[Node]) -> set[Node]:
    ancestors: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in ancestors:
            ancestors.add(node)
            stack.extend(node.parents)
    return ancestors


def _name_residuals(nodes: tuple[Node, ...]) -> None:
    """Sums on the stream are named after the branch that is added there."""
    taken = {node.name for node in nodes}
    for node in nodes:
        branches = [p for p in node.parents if p.kind in ("attention", "ffn")]
        if node.kind == "residual" and not branches and node.layer is None and not node.parents:
            # a decoder has an embedding of its own
            name = "embedding.sum" if "embedding.sum" not in taken else "embedding.sum.1"
            node.name, node.kind = name, "embedding"
            taken.add(name)
        if node.kind != "residual" or not branches:
            continue
        node.aliases.append(node.name)
        name = " + ".join(dict.fromkeys(p.name for p in branches)) + "_residual"
        if len(branches) > 1:
            name = f"blocks.{node.layer}.residual"
        node.name = name if name not in taken else node.name
        node.aliases = [a for a in node.aliases if not a.startswith("input of ")]
