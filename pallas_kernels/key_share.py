"""Which tokens of a sequence lie in the pages at hand, where ranks of context parallelism share them.

Flow:    context_rank, context_size of an attention op -> [KeyShare] -> positions of keys
Source:  vLLM's decode context parallelism: token t lies on rank `t % size`

All ranks use one block table. A page of a rank holds `page_size` tokens, so a column of the table stands for
`page_size * size` successive ones:

    column 0, page_size 2, size 2       rank 0: tokens 0 2       rank 1: tokens 1 3
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from pallas_kernels import checks

NO_SHARES = "the kernel has no context_size > 1"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KeyShare:
    """One rank's part of every sequence."""

    rank: Any  # int or int32[], in [0, size)
    size: int = field(metadata={"static": True})

    def position(self, slot: Any) -> Any:
        """Where in its sequence the rank's token number `slot` stands; ints or int32 arrays."""
        return slot * self.size + self.rank

    def count(self, end: Any) -> Any:
        """How many of the first `end` tokens of a sequence the rank has; ints or int32 arrays.

        Its tokens in `[lower, upper]` are thus its numbers `count(lower)` to `count(upper + 1) - 1`.
        """
        before = end - self.rank + self.size - 1
        return before >> (self.size.bit_length() - 1) if self.is_even else before // self.size

    @property
    def is_even(self) -> bool:
        """Whether `size` is a power of two, so that `count` is a shift."""
        return not self.size & (self.size - 1)

    @classmethod
    def of_options(cls, op: str, rank: Any, size: int, sinks: Any = None) -> KeyShare | None:
        """What an op's options say; None where the pages hold whole sequences.

        Raises:
            ValueError: there is no such rank, where it is known, or there are sinks, which every rank would count.
        """
        checks.check_at_least(op, "context_size", size, 1)
        known = checks.concrete(rank)
        if known is not None and not 0 <= int(known[0]) < size:
            raise ValueError(f"{op}: expected context_rank in [0, {size}), got {rank}")
        if size > 1 and sinks is not None:
            raise ValueError(
                f"{op}: expected no sinks with context_size {size}: give them to merge_states, once for all"
            )
        return None if size == 1 else cls(rank, size)
