"""Functions of one entry by f' and f'', of several by fᵢ and fᵢⱼ."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from curvatlas.tape.record import aten
from curvatlas.tape.rules.base import Call, Unruled, constant, entrywise, pointwise
from curvatlas.tape.rules.views import weighted

Slopes = tuple[Any, Any]  # f', a function giving f'' or None
_2_SQRT_PI = 2 / math.sqrt(math.pi)

# --- powers, roots, exponentials ------------------------------------------------------------------


def _power(x: Tensor, n: float) -> Slopes:
    """xⁿ; a factor that is zero makes no infinity at x = 0."""
    if n == 0:
        return 0.0, None
    if n == 1:
        return 1.0, None
    if n == 2:
        return 2 * x, lambda: 2.0
    return n * x.pow(n - 1), lambda: n * (n - 1) * x.pow(n - 2)


pointwise(aten.pow.Tensor_Scalar, slopes=lambda c: _power(c.x[0], c.args[1]))
pointwise(aten.sqrt.default, slopes=lambda c: (0.5 / c.y, lambda: -0.25 / (c.y * c.x[0])))
pointwise(aten.rsqrt.default, slopes=lambda c: (-0.5 * c.y**3, lambda: 0.75 * c.y**5))
pointwise(aten.reciprocal.default, slopes=lambda c: (-c.y.square(), lambda: 2 * c.y**3))
pointwise(aten.exp.default, slopes=lambda c: (c.y, lambda: c.y))
pointwise(aten.expm1.default, slopes=lambda c: (c.y + 1, lambda: c.y + 1))
pointwise(
    aten.exp2.default,
    slopes=lambda c: (math.log(2) * c.y, lambda: math.log(2) ** 2 * c.y),
)


def _log(x: Tensor, scale: float = 1.0) -> Slopes:
    return scale / x, lambda: -scale / x.square()


pointwise(aten.log.default, slopes=lambda c: _log(c.x[0]))
pointwise(aten.log1p.default, slopes=lambda c: _log(1 + c.x[0]))
pointwise(aten.log2.default, slopes=lambda c: _log(c.x[0], 1 / math.log(2)))
pointwise(aten.log10.default, slopes=lambda c: _log(c.x[0], 1 / math.log(10)))

# --- circles, hyperbolas, errors ------------------------------------------------------------------

pointwise(aten.sin.default, slopes=lambda c: (c.x[0].cos(), lambda: -c.y))
pointwise(aten.cos.default, slopes=lambda c: (-c.x[0].sin(), lambda: -c.y))
pointwise(aten.tan.default, slopes=lambda c: (s := 1 + c.y.square(), lambda: 2 * c.y * s))
pointwise(aten.sinh.default, slopes=lambda c: (c.x[0].cosh(), lambda: c.y))
pointwise(aten.cosh.default, slopes=lambda c: (c.x[0].sinh(), lambda: c.y))
pointwise(aten.tanh.default, slopes=lambda c: (s := 1 - c.y.square(), lambda: -2 * c.y * s))


def _inverse_root(argument: Tensor, x: Tensor, sign: float, bend: float) -> Slopes:
    """f' = ± q^(-1/2) with q = c ± x², and f'' = bend x f'³."""
    slope = sign * argument.rsqrt()
    return slope, lambda: bend * x * slope**3


pointwise(aten.asin.default, slopes=lambda c: _inverse_root(1 - c.x[0] ** 2, c.x[0], 1, 1))
pointwise(aten.acos.default, slopes=lambda c: _inverse_root(1 - c.x[0] ** 2, c.x[0], -1, 1))
pointwise(aten.asinh.default, slopes=lambda c: _inverse_root(c.x[0] ** 2 + 1, c.x[0], 1, -1))
pointwise(aten.acosh.default, slopes=lambda c: _inverse_root(c.x[0] ** 2 - 1, c.x[0], 1, -1))
pointwise(
    aten.atan.default,
    slopes=lambda c: (s := 1 / (1 + c.x[0].square()), lambda: -2 * c.x[0] * s * s),
)
pointwise(
    aten.atanh.default,
    slopes=lambda c: (s := 1 / (1 - c.x[0].square()), lambda: 2 * c.x[0] * s * s),
)
pointwise(
    aten.erf.default,
    slopes=lambda c: (d := _2_SQRT_PI * torch.exp(-c.x[0].square()), lambda: -2 * c.x[0] * d),
)
pointwise(
    aten.erfc.default,
    slopes=lambda c: (d := -_2_SQRT_PI * torch.exp(-c.x[0].square()), lambda: -2 * c.x[0] * d),
)
pointwise(
    aten.erfinv.default,
    slopes=lambda c: (d := c.y.square().exp() / _2_SQRT_PI, lambda: 2 * c.y * d * d),
)
pointwise(
    aten.lgamma.default,
    slopes=lambda c: (torch.digamma(c.x[0]), lambda: torch.polygamma(1, c.x[0])),
)
pointwise(
    aten.digamma.default,
    slopes=lambda c: (torch.polygamma(1, c.x[0]), lambda: torch.polygamma(2, c.x[0])),
)

# --- activations ----------------------------------------------------------------------------------


def _silu(call: Call) -> Slopes:
    x = call.x[0]
    s = torch.sigmoid(x)
    d = s * (1 - s)
    return s + x * d, lambda: d * (2 + x * (1 - 2 * s))


def _gelu(call: Call) -> Slopes:
    x = call.x[0]
    if call.args[1] == "none":
        density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        normal = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return torch.addcmul(normal, x, density), lambda: density * (2 - x * x)
    c, k = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(c * (x + k * x**3))
    first, second = c * (1 + 3 * k * x * x), 6 * c * k * x
    sech = 1 - t * t
    slope = 0.5 * (1 + t) + 0.5 * x * sech * first
    return slope, lambda: sech * first + 0.5 * x * sech * (second - 2 * t * first * first)


def _sigmoid(call: Call) -> Slopes:
    slope = call.y * (1 - call.y)
    return slope, lambda: slope * (1 - 2 * call.y)


def _log_sigmoid(call: Call) -> Slopes:
    s = torch.sigmoid(-call.x[0])
    return s, lambda: s * (s - 1)


def _softplus(call: Call) -> Slopes:
    x, beta, threshold = call.x[0], call.args[1], call.args[2]
    s = torch.sigmoid(beta * x)
    straight = beta * x > threshold
    return torch.where(straight, 1.0, s), lambda: torch.where(straight, 0.0, beta * s * (1 - s))


def _mish(call: Call) -> Slopes:
    """x tanh(softplus(x)), with t = tanh(softplus) and t' = s (1 - t²)."""
    x = call.x[0]
    s = torch.sigmoid(x)
    t = torch.tanh(torch.nn.functional.softplus(x))
    first = s * (1 - t * t)
    return t + x * first, lambda: 2 * first + x * first * (1 - s - 2 * t * s)


def _elu(call: Call) -> Slopes:
    x, alpha, scale, inner = call.x[0], *call.args[1:4]
    low = alpha * inner * scale * torch.exp(inner * x.clamp(max=0))
    return (
        torch.where(x > 0, float(scale), low),
        lambda: torch.where(x >= 0, 0.0, inner * low),
    )


def _celu(call: Call) -> Slopes:
    x, alpha = call.x[0], call.args[1]
    low = torch.exp(x.clamp(max=0) / alpha)
    return torch.where(x > 0, 1.0, low), lambda: torch.where(x >= 0, 0.0, low / alpha)


def _logit(call: Call) -> Slopes:
    x, eps = call.x[0], call.args[1]
    if eps is not None:
        raise Unruled
    d = x * (1 - x)
    return 1 / d, lambda: (2 * x - 1) / d.square()


def _hard_swish(call: Call) -> Slopes:
    """x clamp(x + 3, 0, 6)/6."""
    x = call.x[0]
    bent = (x > -3) & (x < 3)
    slope = torch.where(bent, x / 3 + 0.5, (x >= 3).to(x.dtype))
    return slope, lambda: bent.to(x.dtype) / 3


pointwise(aten.silu.default, slopes=_silu)
pointwise(aten.gelu.default, slopes=_gelu)
pointwise(aten.sigmoid.default, slopes=_sigmoid)
pointwise(aten.log_sigmoid_forward.default, slopes=_log_sigmoid)
pointwise(aten.softplus.default, slopes=_softplus)
pointwise(aten.mish.default, slopes=_mish)
pointwise(aten.elu.default, slopes=_elu)
pointwise(aten.celu.default, slopes=_celu)
pointwise(aten.logit.default, slopes=_logit)
pointwise(aten.hardswish.default, slopes=_hard_swish)

# --- straight pieces ------------------------------------------------------------------------------


def _where(condition: Tensor, call: Call, slope: float = 1.0, otherwise: float = 0.0) -> Slopes:
    return torch.where(condition, call.y.new_tensor(slope), otherwise), None


def _clamped(call: Call) -> Slopes:
    x, low, high = call.x[0], call.args[1], call.args[2]
    inside = torch.ones_like(x, dtype=torch.bool)
    if low is not None:
        inside &= x >= low
    if high is not None:
        inside &= x <= high
    return _where(inside, call)


pointwise(aten.relu.default, slopes=lambda c: _where(c.x[0] > 0, c))
pointwise(aten.abs.default, slopes=lambda c: (c.x[0].sgn(), None))
pointwise(aten.leaky_relu.default, slopes=lambda c: _where(c.x[0] > 0, c, 1.0, c.args[1]))
pointwise(aten.clamp.default, slopes=_clamped)
pointwise(aten.clamp_min.default, slopes=lambda c: _where(c.x[0] >= c.args[1], c))
pointwise(aten.clamp_max.default, slopes=lambda c: _where(c.x[0] <= c.args[1], c))
pointwise(aten.threshold.default, slopes=lambda c: _where(c.x[0] > c.args[1], c))
pointwise(
    aten.hardtanh.default,
    slopes=lambda c: _where((c.x[0] > c.args[1]) & (c.x[0] < c.args[2]), c),
)
pointwise(aten.hardsigmoid.default, slopes=lambda c: _where(c.x[0].abs() < 3, c, 1 / 6))
pointwise(aten.hardshrink.default, slopes=lambda c: _where(~(c.x[0].abs() <= c.args[1]), c))
pointwise(aten.softshrink.default, slopes=lambda c: _where(c.x[0].abs() > c.args[1], c))
pointwise(aten.nan_to_num.default, slopes=lambda c: _where(c.x[0].isfinite(), c))
pointwise(aten.frac.default, slopes=lambda c: (1.0, None))
pointwise(aten.deg2rad.default, slopes=lambda c: (math.pi / 180, None))
pointwise(aten.rad2deg.default, slopes=lambda c: (180 / math.pi, None))


def _between(call: Call) -> dict[int, Tensor]:
    """clamp by tensors, which move where they bind."""
    x, low, high = call.args[0], *(call.args[1:3])
    under = torch.zeros_like(call.y, dtype=torch.bool) if low is None else x < low
    over = torch.zeros_like(under) if high is None else x > high
    if low is not None and high is not None:
        over = over | (low > high)
        under = under & ~over
    weights = {0: ~(under | over), 1: under, 2: over}
    return {i: w.to(call.y.dtype) for i, w in weights.items()}


weighted(aten.clamp.Tensor, weights=_between)

# --- two entries and more -------------------------------------------------------------------------


def _quotient(call: Call) -> Any:
    y = call.y
    inverse = 1 / torch.as_tensor(call.args[1], dtype=y.dtype)
    return {0: inverse, 1: -y * inverse if call.which(1) is not None else 0.0}, {
        (0, 1): lambda: -inverse * inverse,
        (1, 1): lambda: 2 * y * inverse * inverse,
    }


def _rounded_quotient(call: Call) -> Any:
    return ({0: 0.0, 1: 0.0}, {}) if call.args[2] is not None else _quotient(call)


def _power_of(call: Call) -> Any:
    """aᵇ; at a = 0 the derivatives by b are zero."""
    a, n = (torch.as_tensor(v, dtype=call.y.dtype) for v in call.args[:2])
    y = call.y
    vanishes = (a == 0) & (n >= 0)
    log = torch.where(vanishes, 0.0, a.log())

    def by_base(order: int) -> Tensor:
        """n (n − 1) … aⁿ⁻ᵒʳᵈᵉʳ, zero where the factor is."""
        factor = n if order == 1 else n * (n - 1)
        return torch.where(factor == 0, 0.0, factor * a.pow(n - order))

    return {0: by_base(1), 1: y * log}, {
        (0, 0): lambda: by_base(2),
        (0, 1): lambda: torch.where(vanishes & (n == 0), 0.0, a.pow(n - 1) * (1 + n * log)),
        (1, 1): lambda: y * log.square(),
    }


def _angle(call: Call) -> Any:
    """atan2(a, b): b/r², −a/r²; zero at the origin."""
    a, b = call.args[0], call.args[1]
    square = a * a + b * b
    inverse = torch.where(square == 0, 0.0, 1 / square)
    u, v = a * inverse, b * inverse
    return {0: v, 1: -u}, {
        (0, 0): lambda: -2 * u * v,
        (0, 1): lambda: u * u - v * v,
        (1, 1): lambda: 2 * u * v,
    }


def _hypotenuse(call: Call) -> Any:
    a, b = call.args[0] / call.y, call.args[1] / call.y
    return {0: a, 1: b}, {
        (0, 0): lambda: b * b / call.y,
        (0, 1): lambda: -a * b / call.y,
        (1, 1): lambda: a * a / call.y,
    }


def _log_sum(scale: float) -> Any:
    """log(eᵃ + eᵇ), to another base by the scale: p = σ((a − b)·scale)."""

    def slopes(call: Call) -> Any:
        a, b = call.args[0], call.args[1]
        gap = torch.where(a == b, 0.0, a - b)  # equal infinities have no difference
        p = torch.sigmoid(gap * scale)
        d = scale * p * (1 - p)
        return {0: p, 1: 1 - p}, {(0, 0): lambda: d, (0, 1): lambda: -d, (1, 1): lambda: d}

    return slopes


def _times_log(call: Call) -> Any:
    """a log b, zero where a is."""
    a, b = (torch.as_tensor(v, dtype=call.y.dtype) for v in call.args[:2])
    return {0: torch.where((a == 0) & (b <= 0), 0.0, b.log()), 1: a / b}, {
        (0, 1): lambda: 1 / b,
        (1, 1): lambda: -a / b.square(),
    }


def _plus_product(call: Call) -> Any:
    """c + α a b."""
    _, a, b, alpha = call.args
    return {0: 1, 1: alpha * b, 2: alpha * a}, {(1, 2): lambda: alpha}


def _plus_quotient(call: Call) -> Any:
    """c + α a/b."""
    _, a, b, alpha = call.args
    inverse = 1 / b
    u = alpha * inverse
    return {0: 1, 1: u, 2: -u * a * inverse}, {
        (1, 2): lambda: -u * inverse,
        (2, 2): lambda: 2 * u * a * inverse.square(),
    }


def _mixed(call: Call) -> Any:
    """a + w (b − a)."""
    a, b, w = call.args
    return {0: 1 - w, 1: w, 2: b - a}, {(0, 2): lambda: -1, (1, 2): lambda: 1}


def _prelu(call: Call) -> Any:
    x, w = call.args
    low = x <= 0
    return {0: torch.where(low, w, 1.0), 1: torch.where(low, x, 0.0)}, {
        (0, 1): lambda: low.to(x.dtype)
    }


entrywise(
    aten.mul.Tensor,
    aten.mul.Scalar,
    slopes=lambda c: ({0: c.args[1], 1: c.args[0]}, {(0, 1): lambda: 1}),
)
entrywise(aten.div.Tensor, aten.div.Scalar, slopes=_quotient)
entrywise(aten.div.Tensor_mode, slopes=_rounded_quotient)
entrywise(aten.pow.Tensor_Tensor, aten.pow.Scalar, slopes=_power_of)
entrywise(aten.atan2.default, slopes=_angle)
entrywise(aten.hypot.default, slopes=_hypotenuse)
entrywise(aten.logaddexp.default, slopes=_log_sum(1.0))
entrywise(aten.logaddexp2.default, slopes=_log_sum(math.log(2)))
entrywise(aten.xlogy.Tensor, aten.xlogy.Scalar_Self, aten.xlogy.Scalar_Other, slopes=_times_log)
entrywise(aten.addcmul.default, slopes=_plus_product)
entrywise(aten.addcdiv.default, slopes=_plus_quotient)
entrywise(aten.lerp.Tensor, slopes=_mixed)
entrywise(aten._prelu_kernel.default, slopes=_prelu)


def _remainder(call: Call) -> dict[int, Any]:
    """a − b ⌊a/b⌋."""
    a, b = call.args[0], call.args[1]
    mode = "floor" if "remainder" in call.node.name else "trunc"
    return {0: 1, 1: -torch.div(a, b, rounding_mode=mode)}


weighted(
    aten.remainder.Tensor,
    aten.fmod.Tensor,
    aten.remainder.Scalar,
    aten.fmod.Scalar,
    weights=_remainder,
)
weighted(
    aten.copysign.Tensor,
    aten.copysign.Scalar,
    weights=lambda c: {0: torch.where(c.args[0] == 0, 0.0, c.y / c.args[0]), 1: 0.0},
)
constant(aten.floor_divide.default)
