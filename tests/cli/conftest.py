"""What holds for every test of a command."""

from __future__ import annotations

import pytest

from curvatlas.analysis.landscape.taylor import critical_rate


@pytest.fixture(autouse=True)
def short_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps of training at the critical rate, not thirty: a third of a ``landscape``.

    Whether training confirms the rate is the subject of ``analysis/landscape/test_taylor.py``.
    """
    monkeypatch.setitem(critical_rate.__kwdefaults__, "steps", 4)
