"""Progress bars on long work, where tqdm is installed and someone looks.

Flow:    long work -> [progress] -> stderr
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(title: str, total: int | None, unit: str, *, enabled: bool = True) -> Iterator[Callable[[int], object]]:
    """A bar of `total` units for the block; call what it yields with the units done since the last call.

    A total of None is unknown. Without tqdm (extra "cli"), or where stderr is no terminal, there is no bar.
    """
    if not enabled or importlib.util.find_spec("tqdm") is None:
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=title, unit=unit, leave=False, disable=None) as bar:
        yield bar.update
