r"""Directions of descent for stacks of parameters that are treated alike.

Spectral (weight matrices): the momentum M = U S Vᵀ becomes U Vᵀ = (MMᵀ)^{-1/4} M (MᵀM)^{-1/4}, the
Kronecker-factored Gauss-Newton preconditioner of Shampoo without its memory, computed by
Newton-Schulz iterations instead of roots, as in Muon. Diagonal (everything else): Adam, the square
root of the diagonal of the empirical Fisher matrix. Both have entries of size about one, so that
one learning rate fits both.

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
# Entries of a spectral direction have root mean square ½: best of 0.2, 0.5 and 1 on the zoo's GPT.
SPECTRAL_SIZE = 0.5


def orthogonalised(matrices: Tensor) -> Tensor:
    """U Vᵀ of each matrix (k, m, n), to about 30 % in each singular value."""
    a, b, c = QUINTIC
    tall = matrices.shape[1] > matrices.shape[2]
    size = torch.linalg.vector_norm(matrices, dim=(1, 2), keepdim=True)
    x: Tensor = matrices / size.clamp_min(torch.finfo(matrices.dtype).tiny)
    x = x.mT if tall else x  # the short side in front: the smaller Gram matrix
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # (k, n, n)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


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
        self.size = math.inf  # entries of the weights over entries of the direction, at the start
        self._counter = torch.zeros((), dtype=torch.float32)  # shared by every state of the stack
        for state in states:
            if "step" in state:
                self.steps = int(state["step"])
                self._counter.fill_(self.steps)
            state["step"] = self._counter
        for name in self.names:
            setattr(self, name, self._gathered(name, states))

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

    def advance(self, gradient: Tensor) -> Tensor:
        """Take the gradient into the momentum and return the new direction."""
        self.steps += 1
        self._counter.fill_(self.steps)
        return self._direction(gradient)

    def _direction(self, gradient: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} has no direction.")

    def move(self, direction: Tensor, *, rate: float, decay: float) -> None:
        """w ← (1 − rate·decay) w − rate·direction; decay only where a parameter is a matrix."""
        pieces = self.split(direction)
        weights = [p.detach() for p in self.parameters]
        if decay:
            matrices = [w for w in weights if w.ndim > 1]
            if matrices:
                torch._foreach_mul_(matrices, 1.0 - rate * decay)
        if weights[0].dtype != direction.dtype:
            pieces = [p.to(w.dtype) for p, w in zip(pieces, weights, strict=True)]
        torch._foreach_add_(weights, pieces, alpha=-rate)


class SpectralStack(Stack):
    """Matrices (k, m, n); wide ones lie on their side, among the tall ones of the same sizes."""

    names = ("momentum", "direction")
    momentum: Tensor

    def __init__(
        self, parameters: Sequence[nn.Parameter], states: Sequence[State], *, momentum: float
    ) -> None:
        self._keep = momentum
        super().__init__(parameters, states)
        sizes = [float(p.detach().float().square().mean().sqrt()) for p in parameters]
        self.size = min((s for s in sizes if s > 0), default=math.inf) / SPECTRAL_SIZE

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack([_upright(t) for t in tensors]).to(self.dtype)

    def split(self, joined: Tensor) -> list[Tensor]:
        pieces = zip(self.parameters, joined.unbind(0), strict=True)
        return [x.mT if lies(p) else x.view(p.shape) for p, x in pieces]

    def _direction(self, gradient: Tensor) -> Tensor:
        self.momentum.lerp_(gradient, 1.0 - self._keep)
        ahead = torch.lerp(self.momentum, gradient, 1.0 - self._keep)  # Nesterov's look ahead
        # Orthonormal rows or columns have entries of root mean square 1/√max(m, n).
        size = SPECTRAL_SIZE * math.sqrt(max(ahead.shape[1:]))
        return orthogonalised(ahead).mul_(size)


def lies(tensor: Tensor) -> bool:
    """Whether a matrix is wide; tensors with more axes stay as they are."""
    return tensor.ndim == 2 and tensor.shape[0] < tensor.shape[1]


def _upright(tensor: Tensor) -> Tensor:
    return tensor.mT if lies(tensor) else tensor.reshape(tensor.shape[0], -1)


class DiagonalStack(Stack):
    """Any shapes, as one vector: Adam with both corrections."""

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
    ) -> None:
        self._betas, self._eps = betas, eps
        super().__init__(parameters, states)

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
        return (self.momentum / (1.0 - first**self.steps)).div_(size)
