"""How many threads PyTorch uses for work made of many tiny products."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """One thread inside, as many as before outside; nested and interrupted use included.

    Tiny products gain at most a quarter from a second thread on a quiet machine and lose several
    times over on a busy one, where each product waits for the slower thread: with other work on
    two cores ``curvatlas verify`` took 285 s instead of 45 s, ``curvatlas demo`` more than 170 s
    instead of 43 s.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
