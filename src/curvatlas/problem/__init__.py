"""Problem: what is differentiated (model, loss, data, weights per valid target, guards)."""

from curvatlas.problem.batches import Batch
from curvatlas.problem.core import Problem
from curvatlas.problem.cross_entropy import CrossEntropy
from curvatlas.problem.layout import Layout
from curvatlas.problem.losses import Loss
from curvatlas.problem.mean_squared_error import BinaryCrossEntropy, MeanSquaredError
from curvatlas.problem.named_losses import CallableLoss

__all__ = [
    "Batch",
    "BinaryCrossEntropy",
    "CallableLoss",
    "CrossEntropy",
    "Layout",
    "Loss",
    "MeanSquaredError",
    "Problem",
]
