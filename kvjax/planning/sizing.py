"""How many blocks each pool gets out of one memory budget.

Flow:    PoolNeed per pool, budget in bytes -> [size_pools] -> blocks per pool

A pool p of `bytes_p` per block needs, for the last c requests of a load of which at most r run,

    n_p(c) = max(1 (null) + reserved_p + in_flight_p + ceil(min(c, r) * request_p + max(c - r, 0) * kept_p), least_p)

blocks: `request_p` for one that runs, `kept_p` for one that left its cache behind, and `least_p` holds one request of
the longest length. The planner takes the largest real c with sum(bytes_p * n_p(c)) <= budget, so that no pool runs dry
before the others, and gives what is left to the pools that grow with a request's length. With one pool this is simply
budget // bytes_p blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from kvjax.errors import MemoryBudgetError
from kvjax.text import count_of, format_bytes


@dataclass(frozen=True)
class PoolNeed:
    """What one pool costs and must hold. Blocks are counted over all groups of the pool."""

    bytes_per_block: int  # on one device, padding included
    request_blocks: int  # blocks that one running request of the load holds
    in_flight_blocks: int  # further blocks for tokens in flight, once per deployment
    reserved_blocks: int = 0  # never handed to requests; the null block is not among them
    least_blocks: int = 0  # for one request of the longest length, everything counted
    kept_blocks: Fraction | int = 0  # blocks that a request of the load leaves for later ones
    max_running: int | None = None  # requests that run at once; None: all
    grows_with_length: bool = True  # whether longer requests hold more blocks

    @property
    def fixed_blocks(self) -> int:
        """Blocks that no resident request holds, the null block included."""
        return 1 + self.reserved_blocks + self.in_flight_blocks

    def num_blocks(self, requests: Fraction) -> int:
        """Blocks for the last `requests` requests of the load, the null block included."""
        running = requests if self.max_running is None else min(requests, Fraction(self.max_running))
        held = running * self.request_blocks + (requests - running) * self.kept_blocks
        return max(self.fixed_blocks + math.ceil(held), self.least_blocks)

    def kept_in(self, num_blocks: int) -> Fraction:
        """Requests of the load whose caches so many blocks keep while none runs, the null block included."""
        return max(num_blocks - self.fixed_blocks, 0) / Fraction(self.kept_blocks)


def size_pools(needs: Sequence[PoolNeed], budget_bytes: int) -> list[int]:
    """Blocks of each pool, the null block included; together at most `budget_bytes`.

    Raises:
        MemoryBudgetError: not even one request fits; says how many bytes are missing.
    """
    least = least_bytes(needs)
    if least > budget_bytes:
        raise MemoryBudgetError(
            f"the cache of one request of the planned length needs {least:,} bytes ({format_bytes(least)}), "
            f"got {budget_bytes:,} ({format_bytes(budget_bytes)}): {least - budget_bytes:,} bytes short; "
            "give more memory, plan for shorter requests, or take fewer tokens in flight"
        )
    requests = _largest_requests(needs, budget_bytes)
    sizes = [need.num_blocks(requests) for need in needs]
    _hand_out_rest(needs, sizes, budget_bytes)
    return sizes


def check_sizes(needs: Sequence[PoolNeed], sizes: Sequence[int]) -> None:
    """Whether pools of these sizes, the null block included, hold one request.

    Raises:
        MemoryBudgetError: a pool does not; says how many blocks are missing.
    """
    for pool_id, (need, size) in enumerate(zip(needs, sizes, strict=True)):
        least = need.least_blocks
        if least > size:
            raise MemoryBudgetError(
                f"the cache of one request of the planned length needs {least:,} blocks of pool {pool_id} (one is the "
                f"null block), got {size:,}: {count_of(least - size, 'block')} short; give more blocks, plan for "
                "shorter requests, or take fewer tokens in flight"
            )


def least_bytes(needs: Sequence[PoolNeed]) -> int:
    """Bytes with which one request of the longest length fits."""
    return bytes_for(needs, Fraction(0))


def bytes_for(needs: Sequence[PoolNeed], requests: Fraction) -> int:
    """Bytes of all pools for the last `requests` requests of the load."""
    return sum(need.bytes_per_block * need.num_blocks(requests) for need in needs)


def requests_that_fit(needs: Sequence[PoolNeed], sizes: Sequence[int]) -> float:
    """Resident requests of the usual length that pools of these sizes hold; 0 where in-flight tokens fill one."""
    return min(max(size - need.fixed_blocks, 0) / need.request_blocks for need, size in zip(needs, sizes, strict=True))


def _largest_requests(needs: Sequence[PoolNeed], budget_bytes: int) -> Fraction:
    """Every n_p steps at multiples of 1 / request_p or 1 / kept_p only, so bisect on those of 1 / lcm."""
    steps = [Fraction(blocks).numerator for need in needs for blocks in (need.request_blocks, need.kept_blocks)]
    unit = math.lcm(*filter(None, steps))
    low, high = 0, unit  # low fits: the caller checked the longest request
    while bytes_for(needs, Fraction(high, unit)) <= budget_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if bytes_for(needs, Fraction(middle, unit)) <= budget_bytes:
            low = middle
        else:
            high = middle
    return Fraction(low, unit)


def _hand_out_rest(needs: Sequence[PoolNeed], sizes: list[int], budget_bytes: int) -> None:
    """Adds blocks to `sizes`, the costliest pool first, where longer requests can use them (else anywhere)."""
    rest = budget_bytes - sum(need.bytes_per_block * size for need, size in zip(needs, sizes, strict=True))
    growing = [p for p, need in enumerate(needs) if need.grows_with_length] or list(range(len(needs)))
    for p in sorted(growing, key=lambda p: -needs[p].bytes_per_block):
        extra, rest = divmod(rest, needs[p].bytes_per_block)
        sizes[p] += extra
