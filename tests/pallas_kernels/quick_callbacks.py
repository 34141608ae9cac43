"""Quick callbacks for Pallas' interpreters, which make one of each load, store and barrier of a kernel.

jax puts a callback's arguments on a device first, which takes most of the time of an interpreted kernel. The
interpreters do with numpy arrays, and with Python's numbers for indices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback as jax_callback


@contextmanager
def quick_callbacks() -> Iterator[None]:
    """`io_callback` hands over host values while this is open."""
    with mock.patch.object(jax_callback, "io_callback_impl", _call):
        yield


def _call(*arguments: Any, callback: Callable[..., Any], **_: Any) -> Any:
    return jax.tree.map(np.asarray, callback(*map(_host_value, arguments)))


def _host_value(x: Any) -> Any:
    """A copy: the interpreter may keep it, jax's buffer ends with the callback."""
    x = np.array(x)
    return x.item() if x.ndim == 0 and x.dtype.kind in "biu" else x
