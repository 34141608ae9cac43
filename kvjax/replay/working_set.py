"""The load of a trace: what its last requests used of a cache, of as many requests as a memory holds.

Flow:    trace, CacheShape, memory -> [load_of] -> Load -> plan_kv_cache
Source:  working sets and their mean size by the times between uses: P. Denning, S. Schwartz, "Properties of the
         working-set model", CACM 15(3), 1972

A thing that was used at request i and again at request j is among those of the last n requests for min(j - i, n) of
them. So the mean number of distinct things that n requests used is the sum of these over all uses, divided by the
number of requests. Things are runs of prompt tokens, and checkpoints: where prompts and answers end, and where a prompt
parts from earlier ones. If the memory holds all of a trace, the rest of it is for more checkpoints on the way, and a
little for tokens: pools that are full to the last block evict what a running request then misses.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from fractions import Fraction

import numpy as np

from kvjax.planning import CacheShape, Load
from kvjax.planning.sizing import bytes_for
from kvjax.replay.bounds.infinite_cache import InfiniteCache
from kvjax.replay.requests.trace import TRACE_BLOCK_SIZE, TraceRequest

MOST_SPARE = 1.05  # of the tokens of a trace, in a pool that holds them all


class WorkingSet:
    """How many distinct things requests use."""

    def __init__(self) -> None:
        self._last: dict[Hashable, int] = {}  # thing -> request that used it last
        self._gaps: list[int] = []  # requests from one use of a thing to the next

    def use(self, thing: Hashable, request: int) -> None:
        """Request number `request` uses a thing; numbers never fall."""
        before = self._last.get(thing, request)
        if before < request:
            self._gaps.append(request - before)
        self._last[thing] = request

    def sizes(self, num_requests: int) -> np.ndarray:  # float64[num_requests + 1]
        """Distinct things that the last 0, 1, 2, ... requests used, on average; at most all that there are."""
        gaps = np.bincount(self._gaps, minlength=num_requests + 1)[: num_requests + 1]
        longer = len(self._last) + gaps.sum() - gaps.cumsum()  # uses after which a thing is idle for more than n
        return np.minimum(np.concatenate(([0], longer[:-1].cumsum())) / num_requests, len(self._last))


def load_of(
    trace: Sequence[TraceRequest],
    shape: CacheShape,
    memory_bytes: int,
    *,
    alignment: int,
    max_model_len: int,
    max_in_flight_tokens: int,
    max_running: int,
    has_answers: bool,
) -> Load:
    """What pools are to be balanced for if `trace` is served from `memory_bytes`: some microseconds a trace block.

    Args:
        trace: at least one request.
        shape: the cache that is to be planned.
        memory_bytes: of one device.
        alignment: tokens of which every hit is a multiple.
        max_model_len: as of `plan_kv_cache`.
        max_in_flight_tokens: likewise.
        max_running: requests that run at once.
        has_answers: whether answers are cached too.
    """
    tokens, checkpoints = _sizes(trace, alignment, has_answers)
    num_requests = len(trace)
    most = max(tokens[-1] / alignment, checkpoints[-1], 1.0)

    def after(requests: int) -> tuple[Load, Fraction]:
        """The load and its checkpoints when the last so many requests are kept; beyond all, more checkpoints."""
        n = min(requests, num_requests)
        kept = min(max(checkpoints[n] * requests / n, 1.0), most)
        wanted = tokens[n] * min(requests / n, MOST_SPARE)
        return Load(max(round(wanted / kept), 1), max_running), Fraction(kept)

    def fits(requests: int) -> bool:
        load, kept = after(requests)
        return bytes_for(shape.needs_of(load, max_model_len, max_in_flight_tokens), kept) <= memory_bytes

    low, high = 1, num_requests * (1 + int(most / max(checkpoints[-1], 1.0)))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return after(low)[0]


def _sizes(
    trace: Sequence[TraceRequest], alignment: int, has_answers: bool
) -> tuple[np.ndarray, np.ndarray]:  # float64[requests + 1] twice
    """Tokens and checkpoints that the last 0, 1, 2, ... requests used."""
    runs, checkpoints, infinite = WorkingSet(), WorkingSet(), InfiniteCache(alignment)
    hash_size = trace[0].hash_block_size
    stride = max(TRACE_BLOCK_SIZE // hash_size, 1)
    own_tokens = 0  # that no other request can share
    for number, request in enumerate(trace):
        full = request.input_length // (stride * hash_size)
        for hash_id in request.hash_ids[stride - 1 : full * stride : stride]:
            runs.use(hash_id, number)
        answer = request.output_length if has_answers else 0
        own_tokens += request.input_length - full * stride * hash_size + answer
        ends = {infinite.lookup_and_add(request), (request.input_length - 1) // alignment * alignment}
        for end in ends - {0}:
            checkpoints.use((request.hash_ids[(end - 1) // hash_size], end), number)
        end = (request.input_length + answer) // alignment * alignment
        if answer and end not in ends:
            checkpoints.use(("answer", number), number)
    count = len(trace)
    own = np.arange(count + 1) * (own_tokens / count)
    return stride * hash_size * runs.sizes(count) + own, checkpoints.sizes(count)


__all__ = ["WorkingSet", "load_of"]
