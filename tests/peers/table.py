"""What a row of the peers' table is, and how tests say which rows they stand for.

A ``Group`` is one behaviour that a peer's suite tests, with the variants it is tested in. A variant
is a case. Tests are parametrised over the variants of their group, so that the table and the tests
cannot part; ``test_table.py`` sees that every group has its test and every test its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

RIGHT = "right"


@dataclass(frozen=True)
class Group:
    """One behaviour of a peer's suite."""

    peer: str
    name: str
    theirs: str  # where the peer tests it
    ours: str  # the call that answers it here
    right: Sequence[str] = ()  # variants that come out right
    refused: Mapping[str, str] = field(default_factory=dict)  # variant → why, on purpose
    note: str = ""  # where the two differ in a convention

    @property
    def cases(self) -> dict[str, str]:
        """Variant → verdict."""
        reasons = {name: f"refused on purpose: {why}" for name, why in self.refused.items()}
        return {**dict.fromkeys(self.right, RIGHT), **reasons}


# (peer, group, verdict's kind) → name of the test; filled as the test modules are imported
TESTED: dict[tuple[str, str, str], str] = {}


class Table:
    """The groups of one peer, as decorators of tests."""

    def __init__(self, peer: str, groups: Sequence[Group]) -> None:
        self.groups = {group.name: group for group in groups if group.peer == peer}
        self.peer = peer

    def right(self, group: str) -> Callable[[Callable[..., None]], Any]:
        """Parametrise ``case`` over the variants of the group that come out right."""
        return self._over(group, list(self.groups[group].right), RIGHT)

    def refused(self, group: str) -> Callable[[Callable[..., None]], Any]:
        """The same over the variants that are refused on purpose."""
        return self._over(group, list(self.groups[group].refused), "refused")

    def _over(self, group: str, variants: list[str], kind: str) -> Any:
        assert variants, f"{self.peer}: {group} has no {kind} case"

        def decorate(test: Callable[..., None]) -> Any:
            key = (self.peer, group, kind)
            # pytest imports a module under its own name: the same test may come by twice
            assert TESTED.setdefault(key, test.__name__) == test.__name__, f"two tests for {key}"
            return pytest.mark.parametrize("case", variants, ids=variants)(test)

        return decorate
