"""What one host benchmark is: the same work done by several sides, each timed in the same process.

Flow:    bench_host_cases.<module>.CASES -> list[BenchCase] -> scripts/bench_host.py -> table, JSON

A side is an object with the names of `Side`: kvjax, the plain baseline (one object per block, loops over requests with
lists and dicts), or vLLM's own code. A case sets its state up through a side, and times calls on it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from bench_host_cases.shapes import Shape
from kvjax.core import KVCacheSpec

Samples = Callable[[], list[float]]


class Side(Protocol):
    """Names that every side has; managers, requests and pools share the names of kvjax's calls that cases use."""

    def manager(self, specs: Sequence[KVCacheSpec], num_blocks: int, max_model_len: int) -> Any:
        """A manager of blocks of 16 tokens."""

    def request(self, name: str, num_tokens: int) -> Any:
        """A request of random tokens whose block hashes are known; all of a name have the same tokens."""

    def decoding(self, shape: Shape, num_requests: int) -> Any:
        """Requests past their prompts: `next_step()` gives each a token, `step()` gives each its slot."""

    def decode_calls(self, manager: Any, running: list[Any]) -> list[Callable[[], object]]:
        """Calls that give each of these requests a token and its slot."""

    def pool(self, num_blocks: int) -> Any:
        """A pool with `get_new_blocks(count)` and `free_blocks(blocks)`."""

    def register(self, pool: Any, blocks: Any, hashes: list[bytes]) -> None:
        """The blocks hold what has these hashes."""

    def hashing(self, algorithm: str, num_tokens: int) -> Callable[[], object]:
        """A call that hashes so many tokens in blocks of 16."""


@dataclass(frozen=True)
class BenchCase:
    """A named measurement of each side; each call builds its own state and returns one sample per repetition.

    The samples are microseconds of CPU time of the timed part alone.
    """

    name: str
    run: Samples
    baseline: Samples
    vllm: Samples | None = None  # where vLLM is installed and has a counterpart


def case(name: str, samples: Callable[..., list[float]], *arguments: object, has_vllm: bool = True) -> BenchCase:
    """`samples(side, *arguments)` of every side that there is."""
    from bench_host_cases.sides import KVJAX, PLAIN, VLLM

    vllm = partial(samples, VLLM, *arguments) if has_vllm and VLLM is not None else None
    return BenchCase(name, partial(samples, KVJAX, *arguments), partial(samples, PLAIN, *arguments), vllm)


def time_us(call: Callable[[], object]) -> float:
    """Microseconds of this thread's CPU time that one call takes: what else the machine runs does not count."""
    start = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - start) / 1e3


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def sample_us(call: Callable[[], object], repetitions: int, prepare: Callable[[], object] | None = None) -> list[float]:
    """Microseconds of `repetitions` calls, collector off; `prepare` runs untimed before each, and once to warm up."""
    samples = []
    with collector_off():
        for _ in range(repetitions + 1):
            if prepare is not None:
                prepare()
            samples.append(time_us(call))
    return samples[1:]
