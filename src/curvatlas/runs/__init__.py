"""The run folder: written as work completes, resumed after a kill, loaded without trust."""

from curvatlas.runs import subject as fingerprints
from curvatlas.runs.checking import RunCheck, RunFault, check, repair
from curvatlas.runs.folder import Run, RunWriteError
from curvatlas.runs.loading import Change, LoadedRun, RunComparison, compare, load

__all__ = [
    "Change",
    "LoadedRun",
    "Run",
    "RunCheck",
    "RunComparison",
    "RunFault",
    "RunWriteError",
    "check",
    "compare",
    "fingerprints",
    "load",
    "repair",
]
