r"""Weights as their layer multiplies with them: W = W₀ + Σ s B A where LoRA adapts it.

A block of ``reading`` sees the weights of a layer as if nothing were adapted; here is the way to
them from the layer's own parameters, and back:

    Ẇ = Ẇ₀ + Σ s (Ḃ A + B Ȧ)
    ∂ℓ/∂W₀ = δ,   ∂ℓ/∂A = s Bᵀ δ,   ∂ℓ/∂B = s δ Aᵀ,   δ = ∂ℓ/∂W
    R{∂ℓ/∂A} = s (Bᵀ Rδ + Ḃᵀ δ),   R{∂ℓ/∂B} = s (Rδ Aᵀ + δ Ȧᵀ)

``None`` is zero, and a parameter left out of a mapping of tangents has tangent zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from curvatlas.engines.tangent.linear import add
from curvatlas.errors import UnmappedModuleError


@dataclass(frozen=True)
class LowRank:
    """s B A of two parameters, or s b of one."""

    scale: float
    left: str  # B (out, r), or b
    right: str | None = None  # A (r, in)


@dataclass(frozen=True)
class EffectiveWeight:
    """A weight or bias W = W₀ + Σ s B A; stored (in, out) it is W₀ + Σ s (B A)ᵀ."""

    base: str | None  # parameter W₀
    terms: tuple[LowRank, ...] = ()
    transposed: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters W depends on."""
        names = (self.base, *(name for term in self.terms for name in (term.left, term.right)))
        return tuple(name for name in names if name is not None)

    def renamed(self, name: Callable[[str], str]) -> EffectiveWeight:
        """The same of parameters with other names."""
        terms = tuple(
            LowRank(t.scale, name(t.left), None if t.right is None else name(t.right))
            for t in self.terms
        )
        base = None if self.base is None else name(self.base)
        return EffectiveWeight(base, terms, self.transposed)

    def value(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """W; the parameter itself where nothing adapts it."""
        total = None if self.base is None else parameters[self.base]
        for term in self.terms:
            part = parameters[term.left]
            part = part if term.right is None else self._turned(part @ parameters[term.right])
            total = term.scale * part if total is None else total.add(part, alpha=term.scale)
        assert total is not None
        return total

    def tangent(
        self, parameters: Mapping[str, Tensor], dots: Mapping[str, Tensor]
    ) -> Tensor | None:
        """Ẇ (K, *shape) from the parameters' tangents (K, *shape)."""
        total = None if self.base is None else dots.get(self.base)
        if total is not None and self.terms:
            total = total.clone()
        for term in self.terms:
            for moved in self._moved(term, parameters, dots):
                total = add(total, term.scale * moved)
        return total

    def rates(
        self,
        parameters: Mapping[str, Tensor],
        rate: Tensor | None,
        *,
        delta: Tensor | None = None,
        dots: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """R{∂ℓ/∂parameter} (K, *shape) from Rδ (K, *shape of W), δ and the tangents.

        Without ``delta`` and ``dots`` these are vector-Jacobian products.
        """
        found: dict[str, Tensor] = {}
        moved = dots or {}

        def put(name: str, value: Tensor | None) -> None:
            if value is not None:
                found[name] = found[name] + value if name in found else value

        if self.base is not None:
            put(self.base, rate)
        turned = None if rate is None else self._turned(rate)
        fixed = None if delta is None else self._turned(delta)
        for term in self.terms:
            if term.right is None:
                put(term.left, None if rate is None else term.scale * rate)
                continue
            left, right = parameters[term.left], parameters[term.right]
            if turned is not None:
                put(term.left, term.scale * (turned @ right.mT))
                put(term.right, term.scale * (left.mT @ turned))
            if fixed is not None and term.right in moved:
                put(term.left, term.scale * (fixed @ moved[term.right].mT))
            if fixed is not None and term.left in moved:
                put(term.right, term.scale * (moved[term.left].mT @ fixed))
        return found

    def _moved(
        self, term: LowRank, parameters: Mapping[str, Tensor], dots: Mapping[str, Tensor]
    ) -> Iterator[Tensor]:
        left_dot = dots.get(term.left)
        if term.right is None:
            if left_dot is not None:
                yield left_dot
            return
        if left_dot is not None:
            yield self._turned(left_dot @ parameters[term.right])
        if term.right in dots:
            yield self._turned(parameters[term.left] @ dots[term.right])

    def _turned(self, product: Tensor) -> Tensor:
        return product.mT if self.transposed else product


def effective_parameters(layer: nn.Module) -> dict[str, EffectiveWeight]:
    """Every weight of a layer by the name it has without adapters.

    ``q_proj.weight`` is ``q_proj.base_layer.weight`` + s ``lora_B`` ``lora_A`` where LoRA of
    ``peft`` wraps it, and the parameter itself elsewhere. Adapters that are merged, switched off or
    not active have no term: their parameters do not move the output. Other adapters are refused.
    """
    adapted: dict[str, EffectiveWeight] = {}
    wrapped: list[str] = []
    for name, part in layer.named_modules():
        if not type(part).__module__.startswith("peft."):
            continue
        _refuse_other_adapters(layer, name, part)
        prefix = f"{name}." if name else ""
        terms = [*_active(part)]
        transposed = is_transposed(part.base_layer)
        weights = tuple(
            LowRank(scale, f"{prefix}lora_B.{a}.weight", f"{prefix}lora_A.{a}.weight")
            for a, scale, _ in terms
        )
        shifts = tuple(
            LowRank(scale, f"{prefix}lora_B.{a}.bias") for a, scale, biased in terms if biased
        )
        base = f"{prefix}base_layer"
        adapted[f"{prefix}weight"] = EffectiveWeight(f"{base}.weight", weights, transposed)
        bias = f"{base}.bias" if part.base_layer.bias is not None else None
        if bias is not None or shifts:
            adapted[f"{prefix}bias"] = EffectiveWeight(bias, shifts)
        wrapped.append(prefix)
    for name, _ in layer.named_parameters():
        if not name.startswith(tuple(wrapped)):
            adapted[name] = EffectiveWeight(name)
    return adapted


def plain_linear(part: Any) -> Any:
    """A linear layer without the adapter around it."""
    return getattr(part, "base_layer", part)


def is_transposed(linear: nn.Module) -> bool:
    """Whether weights are stored (in, out): Hugging Face's ``Conv1D``."""
    kind = type(linear)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def _active(part: Any) -> Iterator[tuple[str, float, bool]]:
    """Name, scale and whether it has a bias, of the adapters that act."""
    if part.merged or part.disable_adapters:
        return
    for name in part.active_adapters:
        if name in part.lora_A:
            yield name, float(part.scaling[name]), part.lora_B[name].bias is not None


def _refuse_other_adapters(layer: nn.Module, name: str, part: Any) -> None:
    kind = type(part)
    where = f"{name} ({kind.__name__}) in {type(layer).__name__}"
    if (kind.__module__, kind.__name__) != ("peft.tuners.lora.layer", "Linear"):
        raise UnmappedModuleError(
            f"{where} is an adapter of {kind.__module__}: only LoRA of linear layers is read."
        )
    variants = [
        v for a, v in getattr(part, "lora_variant", {}).items() if a in part.active_adapters
    ]
    if variants:
        raise UnmappedModuleError(
            f"{where} is {type(variants[0]).__name__}, not LoRA alone: its effect is not in the "
            "hand-written forms."
        )
    base = part.base_layer
    if not (isinstance(base, nn.Linear) or is_transposed(base)):
        raise UnmappedModuleError(f"{where} adapts a {type(base).__name__}, not a linear layer.")
    if part.merged and part.disable_adapters:
        raise UnmappedModuleError(
            f"{where} is merged and switched off, so its next call changes its weights: call "
            "unmerge_adapter() first."
        )
