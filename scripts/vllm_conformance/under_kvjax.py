"""A pytest plugin: vLLM's tests with kvjax's manager in the place of vLLM's, and which of them made one.

Flow:    pytest -p under_kvjax -> install() -> vLLM's tests -> [touched.txt]: node ids of tests that made a manager

A test that replaces vLLM's modules by itself is not reached.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvjax.adapters.vllm import install, uninstall

_made: list[Any] = []
_touched: list[str] = []


def pytest_configure() -> None:
    """Before any test module is imported, so that `from ... import KVCacheManager` finds kvjax's."""
    cls = install()
    make = cls.__init__

    def counted(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _made.append(self)

    cls.__init__ = counted  # type: ignore[method-assign]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Notes whether the test made a manager."""
    _made.clear()
    yield
    if _made:
        _touched.append(item.nodeid)


def pytest_unconfigure() -> None:
    """Writes the node ids to the file that KVJAX_TOUCHED names."""
    uninstall()
    if path := os.environ.get("KVJAX_TOUCHED"):
        Path(path).write_text("\n".join(_touched) + "\n")
