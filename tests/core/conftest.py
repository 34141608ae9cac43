"""Every pool and manager that a test makes is checked when the test ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.pool.block_pool import BlockPool

NUM_CHECKED = 100  # the latest; a property test makes thousands


@pytest.fixture(autouse=True)
def check_invariants_of_everything_made(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs `check_invariants` of what the test's code constructed; a constructor that raised made nothing."""
    made: deque[Any] = deque(maxlen=NUM_CHECKED)
    for cls in (BlockPool, KVCacheManager):
        monkeypatch.setattr(cls, "__init__", _recording(cls.__init__, made))
    yield
    for instance in made:
        instance.check_invariants()


def _recording(init: Any, made: deque[Any]) -> Any:
    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    return recorded
