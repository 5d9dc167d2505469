"""Problem: what is differentiated (model, loss, data, weights per valid target, guards)."""

from curvatlas.problem.batches import Batch
from curvatlas.problem.cross_entropy import CrossEntropy
from curvatlas.problem.losses import Loss
from curvatlas.problem.named_losses import BinaryCrossEntropy, CallableLoss, MeanSquaredError
from curvatlas.problem.parameters import Layout
from curvatlas.problem.problem import EngineChoice, Problem

__all__ = [
    "Batch",
    "BinaryCrossEntropy",
    "CallableLoss",
    "CrossEntropy",
    "EngineChoice",
    "Layout",
    "Loss",
    "MeanSquaredError",
    "Problem",
]
