r"""What the linear maps of a module do to one another: roles that no name has to tell.

Every map's output is replaced by values of our own, z_A, all at once. What a map B takes in, x_B,
then depends on no map but those right before it, and how it depends on them is what they are:

  attention     x_B at one token sees z_A of other tokens: A is a key or a value (a query is seen
                at its own token only), B the output; ``trials`` tells query, key and value apart;
  feed-forward  x_B sees z_A of its own token only, nothing else sees z_A, B leads back to the width
                that A came from, and x_B is not linear in z_A: A is up, B is down; of two such maps
                the one that x_B is affine in is up, the other is the gate.

A map that does none of this has no role here, and its name is all there is to go by.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from curvatlas.anatomy.trials import (
    Call,
    CannotTry,
    Heads,
    Replaced,
    Varied,
    attention_verdict,
    only,
    spread,
)

_ROWS = 5  # output rows tried for one that sees several tokens
_UNSEEN = 1e-10  # of the largest gradient
FUSED = {
    frozenset({"query", "key", "value"}): "query_key_value",
    frozenset({"key", "value"}): "key_value",
}


def roles_of(call: Call, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Role of every linear map that shows one in this call; weights: (out, in) or (in, out)."""
    wires = _Wires(call, weights)
    roles: dict[str, str] = {}
    for taker, sources in wires.sources.items():
        if any(wires.mixes(source, taker) for source in sources):
            roles |= wires.attention(sources, taker)
    for taker, sources in wires.sources.items():
        if isinstance(taker, str) and not roles.keys() & {taker, *sources}:
            roles |= wires.feed_forward(sources, taker)
    return roles


class _Wires:
    """One run of a module in which every linear map puts out random values of ours.

    A taker is the name of a map, for what it takes in, or the place of a tensor that comes out.
    """

    def __init__(self, call: Call, weights: Mapping[str, Tensor]) -> None:
        self.call, self.names = call, list(weights)
        self.weights = [weights[name] for name in self.names]
        outputs: dict[int, list[Tensor]] = {}

        def note(place: int, _: Tensor, compute: Callable[[], Tensor]) -> Tensor:
            result = compute()
            outputs.setdefault(place, []).append(result)
            return result

        with torch.no_grad(), Replaced(self.weights, note):
            call.unit(*call.arguments, **call.keywords)
        draw = torch.Generator().manual_seed(0)
        self.z: dict[str, Tensor] = {}  # of the maps that are called once
        for place, results in outputs.items():
            if len(results) == 1 and results[0].ndim >= 2:
                values = 0.5 * torch.randn(results[0].shape, generator=draw, device="cpu")
                self.z[self.names[place]] = values.to(results[0])
        if len(self.z) < 2:
            raise CannotTry("fewer than two linear maps are called")
        self.leaves: dict[str, Tensor] = {}
        self.takes = self.run(self.z)
        self._seen = {
            (name, taker): count
            for taker, x in self.takes.items()
            for name, count in self._tokens_seen(x).items()
        }
        self.sources: dict[str | int, list[str]] = {
            taker: [name for name in self.z if self._seen[name, taker]] for taker in self.takes
        }

    def run(self, z: Mapping[str, Tensor]) -> dict[str | int, Tensor]:
        """What every map takes in, and what comes out, when the maps put out ``z``."""
        self.leaves = {name: value.clone().requires_grad_(True) for name, value in z.items()}
        takes: dict[str | int, Tensor] = {}

        def replace(place: int, taken: Tensor, compute: Callable[[], Tensor]) -> Tensor:
            name = self.names[place]
            if name not in self.leaves:
                return compute()
            if taken.requires_grad:
                takes[name] = taken
            return self.leaves[name].view_as(self.leaves[name])

        with torch.enable_grad(), Replaced(self.weights, replace):
            takes |= dict(enumerate(self.call()))
        return takes

    def _tokens_seen(self, x: Tensor) -> dict[str, int]:
        """Of how many tokens one row of x sees every map's output; the row that sees most."""
        most = dict.fromkeys(self.leaves, 0)
        probe = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
        for row in spread(x.numel() // x.shape[-1], _ROWS):
            gradients = torch.autograd.grad(
                x,
                list(self.leaves.values()),
                only(probe, row),
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            for name, gradient in zip(self.leaves, gradients, strict=True):
                size = gradient.reshape(-1, gradient.shape[-1]).abs().amax(1)
                seen = int((size > _UNSEEN * size.max()).sum())
                most[name] = max(most[name], seen)
        return most

    def mixes(self, source: str, taker: str | int) -> bool:
        """Whether a token of the taker sees the source at several tokens."""
        return self._seen[source, taker] > 1

    def attention(self, sources: Sequence[str], taker: str | int) -> dict[str, str]:
        """Query, key and value among the sources, output for the map that takes them in."""
        if len({self.z[name].shape[:-1] for name in sources}) > 1:
            return {}  # as many keys as another sequence has tokens
        verdict = attention_verdict(
            _Joint(self, sources, taker), queries=True, heads=Heads(None, None)
        )
        if verdict is None:
            return {}
        roles = {taker: "output"} if isinstance(taker, str) else {}
        found = iter(verdict.roles)
        for name in sources:
            kinds = frozenset(next(found) for _ in range(self.z[name].shape[-1]))
            role = next(iter(kinds)) if len(kinds) == 1 else FUSED.get(kinds)
            if role is not None:
                roles[name] = role
        return roles

    def feed_forward(self, sources: Sequence[str], taker: str) -> dict[str, str]:
        """Up (and gate) among the sources, down for the map that takes them in."""
        if len(sources) not in (1, 2) or taker in sources:
            return {}
        elsewhere = {name for t, names in self.sources.items() if t != taker for name in names}
        if elsewhere & set(sources):
            return {}  # no hidden layer
        hidden, back = self.takes[taker].shape[-1], self.z[taker].shape[-1]
        for name in sources:
            weight = self.weights[self.names.index(name)]
            if weight.numel() != back * self.z[name].shape[-1]:
                return {}
        widths = [self.z[name].shape[-1] for name in sources]
        joint = _Joint(self, sources, taker)
        next(joint.each_result())
        everything = torch.ones(sum(widths), dtype=torch.bool)
        if joint.affine(everything):
            return {}  # two linear maps in a row: a bottleneck, no feed-forward part
        if widths == [hidden]:
            return {sources[0]: "up", taker: "down"}
        if widths == [2 * hidden]:
            return {sources[0]: "gate_up", taker: "down"}
        if widths == [hidden, hidden]:
            first = torch.arange(2 * hidden) < hidden
            for part, (up, gate) in ((first, sources), (~first, sources[::-1])):
                if joint.affine(part) and not joint.affine(~part):
                    return {up: "up", gate: "gate", taker: "down"}
        return {}


class _Joint(Varied):
    """The outputs of some maps side by side, as what the taker sees of them varies."""

    def __init__(self, wires: _Wires, sources: Sequence[str], taker: str | int) -> None:
        super().__init__(wires.call)
        self.wires, self.sources, self.taker = wires, sources, taker
        self.widths = [wires.z[name].shape[-1] for name in sources]
        self.z = torch.cat([wires.z[name] for name in sources], -1)

    def draw(self) -> Tensor:
        return (0.5 * torch.randn(self.z.shape, generator=self._draw, device="cpu")).to(self.z)

    def run(self, z: Tensor) -> list[Tensor]:
        self._leaf = z.clone().requires_grad_(True)
        with torch.enable_grad():
            pieces = dict(zip(self.sources, torch.split(self._leaf, self.widths, -1), strict=True))
            return [self.wires.run({**self.wires.z, **pieces})[self.taker]]
