"""curvatlas: the atlas of Transformer curvature.

Public names are listed in ``__init__.pyi`` and loaded on first use, so that ``curvatlas --help``
and ``import curvatlas`` do not pay for PyTorch before it is needed.
"""

from __future__ import annotations

import warnings
from typing import Any

import lazy_loader

__version__ = "0.2.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "blocks":
        warnings.warn(
            "curvatlas.blocks is now curvatlas.closed_form", DeprecationWarning, stacklevel=2
        )
        name = "closed_form"
    return _load(name)
