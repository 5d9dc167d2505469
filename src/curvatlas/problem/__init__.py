"""Problem: what is differentiated (model, loss, data, weights per valid target, guards)."""

from curvatlas.problem.batches import Batch
from curvatlas.problem.core import Problem
from curvatlas.problem.layout import Layout
from curvatlas.problem.losses import CallableLoss, CrossEntropy, Loss, MeanSquaredError

__all__ = [
    "Batch",
    "CallableLoss",
    "CrossEntropy",
    "Layout",
    "Loss",
    "MeanSquaredError",
    "Problem",
]
