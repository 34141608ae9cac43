"""One program of several calls, each on the next of the rotated arguments, run one after the other.

Flow:    call, list[Arguments] -> [Chain] -> outputs of every call; page arrays that are written are donated, then kept

Between two calls stands an optimization barrier over the outputs of the first and the small inputs of the second: XLA
can neither merge, drop nor reorder them, and nothing is added to their work. All outputs are returned.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax import lax

from pallas_kernels.cases.case import Arguments

Call = Callable[[tuple[jax.Array, ...], Any], tuple[Any, tuple[jax.Array, ...]]]

_MOST_ROTATED = 16


def num_rotated(num_bytes: int, cache_bytes: int) -> int:
    """Sets of arguments whose bytes are twice what a cache holds: at least 2, at most 16."""
    return min(_MOST_ROTATED, max(2, -(-2 * cache_bytes // max(1, num_bytes))))


class Chain:
    """`call(pages, rest)` over `rotated` arguments. Takes the page arrays over where the call writes them."""

    def __init__(self, call: Call, rotated: Sequence[Arguments], *, writes: bool) -> None:
        self._pages = [arguments.pages for arguments in rotated]
        self._rest = [arguments.rest for arguments in rotated]
        self.writes = writes
        self.num_calls = len(rotated)
        self.program = jax.jit(_program(call), donate_argnums=(0,) if writes else ())

    def run(self) -> Any:
        """Dispatches the program; list of the outputs of each call, and of the pages it wrote."""
        with _donation_may_be_refused():
            outs, written = self.program(self._pages, self._rest)
        if self.writes:
            self._pages = written
        return outs, written

    @property
    def arguments(self) -> tuple[Any, Any]:
        """Of `program`."""
        return self._pages, self._rest


def _program(call: Call) -> Callable[[Any, Any], tuple[Any, Any]]:
    def program(all_pages: Any, all_rest: Any) -> tuple[Any, Any]:
        outs: list[Any] = []
        written: list[Any] = []
        for pages, rest in zip(all_pages, all_rest, strict=True):
            if outs:
                rest, outs[-1], written[-1] = lax.optimization_barrier((rest, outs[-1], written[-1]))
            out, new_pages = call(pages, rest)
            outs.append(out)
            written.append(new_pages)
        return outs, written

    return program


@contextlib.contextmanager
def _donation_may_be_refused() -> Iterator[None]:
    """A program whose pages are read only, or a backend without donation, says so each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield
