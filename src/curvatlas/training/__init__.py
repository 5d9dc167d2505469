"""Curvature while training: the monitor, its events, trackers and callbacks."""

from curvatlas.training.alarms import Event, Thresholds
from curvatlas.training.monitor import Monitor
from curvatlas.training.snapshot import (
    CurvatureHistory,
    EarlyBlocks,
    LinesTracker,
    MlflowTracker,
    RankCorrelation,
    Snapshot,
    TensorBoardTracker,
    Tracker,
    WandbTracker,
)

__all__ = [
    "CurvatureHistory",
    "EarlyBlocks",
    "Event",
    "LinesTracker",
    "MlflowTracker",
    "Monitor",
    "RankCorrelation",
    "Snapshot",
    "TensorBoardTracker",
    "Thresholds",
    "Tracker",
    "WandbTracker",
]
