r"""Directions of descent for stacks of parameters that are treated alike.

Spectral (weight matrices): the momentum M = U S Vᵀ becomes U Vᵀ = (MMᵀ)^{-1/4} M (MᵀM)^{-1/4}, the
Kronecker-factored Gauss-Newton preconditioner of Shampoo without its memory, computed by
Newton-Schulz iterations instead of roots, as in Muon. Diagonal (everything else): Adam, the square
root of the diagonal of the empirical Fisher matrix. Matrices move in proportion to the size they
are usually given at the start, everything else by about one in each entry, so that one learning
rate fits both, and models of any width.

Parameters of one shape are one tensor: a model of twenty matrices costs a handful of operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

State = dict[str, Tensor]

# Quintic whose iterates push singular values from (0, 1] into about [0.7, 1.2] in five steps; the
# coefficients are those published with Muon.
QUINTIC = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
# Entries that are iterated on together on a processor, for its cache: 1.15 times as fast as all.
_CACHED = 2**18
# Singular values of a square matrix' direction. With them the best rate of matrices and of the rest
# is one and the same on two ViTs and a GPT of the zoo, of widths 16 and 32; 1.7 was a little worse.
_SPECTRAL = 2.2
_MAX_RATIO = 4.0  # of a matrix' sides that counts: feed-forward layers; adapters are far thinner


def spectral_size(rows: int, columns: int) -> float:
    """Singular values of an m × n direction: 2.2 √(max(m, n) / min(m, n)), the ratio at most 4.

    The entries' root mean square is then 2.2/√width in every matrix of a Transformer, in a fixed
    proportion to usual weights: what a rate means does not change with the model's size.
    """
    ratio = max(rows, columns) / min(rows, columns)
    return _SPECTRAL * math.sqrt(min(ratio, _MAX_RATIO))


def orthogonalised(matrices: Tensor) -> Tensor:
    r"""U Vᵀ of each matrix (k, m, n), to about 30 % in each singular value.

    x ← x q(xᵀx), q(G) = a + b G + c G², from x = M/‖M‖. Every q is a polynomial of the first Gram
    matrix and commutes with the others, so that an m × n matrix with m ≥ 2n is met only twice:

    G₀ = x₀ᵀx₀,   G_{k+1} = q(G_k) G_k q(G_k),   U Vᵀ ≈ x₀ q(G₀) q(G₁) …
    """
    if matrices.shape[1] < matrices.shape[2]:
        return orthogonalised(matrices.mT).mT
    size = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x = matrices / size.clamp_min(torch.finfo(matrices.dtype).tiny)
    iterate = _by_gram_matrices if x.shape[1] >= 2 * x.shape[2] else _by_matrices
    if x.device.type != "cpu":
        return iterate(x)
    return torch.cat([iterate(part) for part in x.split(max(1, _CACHED // x[0].numel()))])


def _by_matrices(x: Tensor) -> Tensor:
    """3 products an iteration, two of them with x."""
    a, b, c = QUINTIC
    for _ in range(ITERATIONS):
        gram = x.mT @ x  # (k, n, n)
        x = torch.baddbmm(x, x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), beta=a)
    return x


def _by_gram_matrices(x: Tensor) -> Tensor:
    """4 products of Gram matrices an iteration; errors of G ≈ 0 stay small, where q(G) = a."""
    a, b, c = QUINTIC
    gram, factor = x.mT @ x, None
    for k in range(ITERATIONS):
        q = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        q.diagonal(dim1=1, dim2=2).add_(a)
        factor = q if factor is None else factor @ q
        if k < ITERATIONS - 1:
            gram = q @ gram @ q
    return x if factor is None else x @ factor


def newton_schulz_gain(
    relative: Tensor, iterations: int = ITERATIONS, coefficients: tuple[float, ...] = QUINTIC
) -> Tensor:
    """f(s)/s of the iterated quintic f at singular values s over the Frobenius norm, 0 … 1.

    The gain stays finite at s = 0: a direction that momentum does not hold is not blown up.
    """
    a, b, c = coefficients
    gain = torch.ones_like(relative)
    for _ in range(iterations):
        square = (relative * gain) ** 2
        gain = gain * (a + b * square + c * square**2)
    return gain


_SHARE = 25  # steps so far for each step that momentum remembers more


def kept_share(momentum: float, steps: int) -> float:
    r"""What momentum keeps of itself at a step: min(momentum, 1 − 1/(1 + t/25)).

    It averages over 1 + t/25 steps, a fixed share of the run so far, until it averages over
    1/(1 − momentum). Early gradients are soon out of date and late ones are noisy: with 0.9 from
    the start on all four models that it was developed on ended higher.
    """
    return min(momentum, 1.0 - 1.0 / (1.0 + steps / _SHARE))


class Stack:
    """Parameters with one rule, one shape, one dtype and one number of steps behind them.

    Every entry of ``state[p]`` is a view of this stack's tensors, so that ``state_dict`` sees each
    parameter's own state while the arithmetic runs on all of them at once.
    """

    names: tuple[str, ...] = ()
    direction: Tensor  # of the last step

    def __init__(self, parameters: Sequence[nn.Parameter], states: Sequence[State]) -> None:
        self.parameters = list(parameters)
        first = parameters[0]
        self.dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        self.steps = 0
        self._counter = torch.zeros((), dtype=torch.float32)  # shared by every state of the stack
        for state in states:
            if "step" in state:
                self.steps = int(state["step"])
                self._counter.fill_(self.steps)
            state["step"] = self._counter
        for name in self.names:
            setattr(self, name, self._gathered(name, states))
        self._moves = [state["direction"] for state in states]

    def _gathered(self, name: str, states: Sequence[State]) -> Tensor:
        """One tensor with every parameter's ``name``, and views of it put back into the states."""
        joined = self.join([s.get(name, torch.zeros_like(p)) for p, s in self._pairs(states)])
        for piece, (_, state) in zip(self.split(joined), self._pairs(states), strict=True):
            state[name] = piece
        return joined

    def _pairs(self, states: Sequence[State]) -> list[tuple[nn.Parameter, State]]:
        return list(zip(self.parameters, states, strict=True))

    # --- one tensor and back ----------------------------------------------------------------------

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of the parameters' shapes → the stack's tensor."""
        raise TypeError(f"{type(self).__name__} joins nothing.")

    def split(self, joined: Tensor) -> list[Tensor]:
        """The stack's tensor → views in the parameters' shapes."""
        raise TypeError(f"{type(self).__name__} splits nothing.")

    def gradient(self) -> Tensor:
        """The parameters' gradients as one tensor, in the dtype of the arithmetic."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if any(g.is_sparse for g in gradients):
            raise ValueError("sparse gradients are not supported: use Embedding(sparse=False).")
        return self.join(gradients)

    def advance(self, gradient: Tensor) -> None:
        """Take the gradient into the momentum, and from it the new direction."""
        self.steps += 1
        self._counter.fill_(self.steps)
        self.direction.copy_(self._direction(gradient))

    def _direction(self, gradient: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no direction.")

    def move(self, *, rate: float, decay: float) -> None:
        """w ← (1 − rate·decay) w − rate·direction; decay only where a parameter is a matrix."""
        parameters: list[Tensor] = list(self.parameters)
        matrices = [p for p in parameters if p.ndim > 1]
        if decay and matrices:
            torch._foreach_mul_(matrices, 1.0 - rate * decay)
        moves = self._moves
        if parameters[0].dtype != self.dtype:
            moves = [move.to(parameters[0].dtype) for move in moves]
        torch._foreach_add_(parameters, moves, alpha=-rate)


class SpectralStack(Stack):
    """Matrices (k, m, n); wide ones lie on their side, among the tall ones of the same sizes."""

    names = ("momentum", "direction")
    momentum: Tensor

    def __init__(
        self, parameters: Sequence[nn.Parameter], states: Sequence[State], *, momentum: float
    ) -> None:
        self._momentum = momentum
        super().__init__(parameters, states)

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([_upright(t) for t in tensors]).to(self.dtype)

    def split(self, joined: Tensor) -> list[Tensor]:
        pieces = zip(self.parameters, joined.unbind(0), strict=True)
        return [x.mT if lies(p) else x.view(p.shape) for p, x in pieces]

    def _direction(self, gradient: Tensor) -> Tensor:
        fresh = 1.0 - kept_share(self._momentum, self.steps)
        self.momentum.lerp_(gradient, fresh)
        ahead = torch.lerp(self.momentum, gradient, fresh)  # Nesterov's look ahead
        return orthogonalised(ahead).mul_(spectral_size(*ahead.shape[1:]))


def lies(tensor: Tensor) -> bool:
    """Whether a matrix is wide; tensors with more axes stay as they are."""
    return tensor.ndim == 2 and tensor.shape[0] < tensor.shape[1]


def _upright(tensor: Tensor) -> Tensor:
    return tensor.mT if lies(tensor) else tensor.reshape(tensor.shape[0], -1)


_DENSE = 32  # inputs of a map from which on its entries move less


def diagonal_size(inputs: int) -> float:
    """Entries of Adam's direction for a dense map of so many inputs: 1, then 32 / inputs.

    Steps of one sign add up over the inputs, so that a wide head would move its logits by more than
    a narrow one at the same rate. (The head of a GPT of width 128 ends 5 % higher without.)
    """
    return min(1.0, _DENSE / inputs)


class DiagonalStack(Stack):
    """Any shapes, as one vector: Adam with both corrections, entries of the given sizes."""

    names = ("momentum", "square", "direction")
    momentum: Tensor
    square: Tensor

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        states: Sequence[State],
        *,
        betas: tuple[float, float],
        eps: float,
        sizes: Sequence[float],
    ) -> None:
        self._betas, self._eps = betas, eps
        super().__init__(parameters, states)
        pairs = zip(parameters, sizes, strict=True)
        self._sizes = self.join([torch.full_like(p, size) for p, size in pairs])

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat([t.reshape(-1) for t in tensors]).to(self.dtype)

    def split(self, joined: Tensor) -> list[Tensor]:
        pieces = torch.split(joined, [p.numel() for p in self.parameters])
        return [x.view(p.shape) for x, p in zip(pieces, self.parameters, strict=True)]

    def _direction(self, gradient: Tensor) -> Tensor:
        first, second = self._betas
        self.momentum.lerp_(gradient, 1.0 - first)
        self.square.mul_(second).addcmul_(gradient, gradient, value=1.0 - second)
        size = (self.square / (1.0 - second**self.steps)).sqrt_().add_(self._eps)
        return (self.momentum / (1.0 - first**self.steps)).div_(size).mul_(self._sizes)
