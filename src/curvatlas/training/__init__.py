"""Curvature while training: the monitor, its events, trackers and callbacks."""

from curvatlas.training.monitor import Monitor
from curvatlas.training.snapshot import (
    CurvatureHistory,
    Event,
    LinesTracker,
    Snapshot,
    TensorBoardTracker,
    Thresholds,
    Tracker,
    WandbTracker,
)

__all__ = [
    "CurvatureHistory",
    "Event",
    "LinesTracker",
    "Monitor",
    "Snapshot",
    "TensorBoardTracker",
    "Thresholds",
    "Tracker",
    "WandbTracker",
]
