"""Trained weights as a result, so that a resumed run need not train again."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from curvatlas.results import Result


@dataclass(frozen=True, kw_only=True)
class TrainedWeights(Result):
    """A model's parameters and buffers after training, and how training went."""

    tensors: dict[str, Tensor]
    history: Result

    def load_into(self, model: nn.Module) -> None:
        """Give ``model`` these weights; names and shapes must fit."""
        model.load_state_dict(self.tensors)

    def __str__(self) -> str:
        return str(self.history)


def weights_of(model: nn.Module, history: Result) -> TrainedWeights:
    """A copy of the model's present weights."""
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
    return TrainedWeights(tensors=tensors, history=history)
