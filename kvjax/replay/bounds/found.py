"""The bounds of one trace on one cache, as numbers, text and JSON.

Flow:    trace, KVCachePlan, bytes -> [Bounds.of] -> bounds_text, bounds_json
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from kvjax.planning import KVCachePlan
from kvjax.replay.bounds.clairvoyant import clairvoyant
from kvjax.replay.bounds.costs import CacheCosts
from kvjax.replay.bounds.free_exchange import free_exchange
from kvjax.replay.bounds.pieces import PromptTree
from kvjax.replay.requests.trace import TraceRequest
from kvjax.text import align_table, format_bytes


@dataclass(frozen=True)
class Bounds:
    """Hit tokens, one prompt after another. The last two, of kinds that forget: if checkpoints cost nothing."""

    memory_bytes: int
    prompt_tokens: int
    free_exchange: int
    clairvoyant: int
    free_exchange_unforgetting: int
    clairvoyant_unforgetting: int

    @classmethod
    def of(cls, tree: PromptTree, costs: CacheCosts, memory_bytes: int) -> Bounds:
        """The bounds of a tree of prompts."""
        found = free_exchange(tree, costs, memory_bytes), clairvoyant(tree, costs, memory_bytes)
        free = found
        if costs.forgetful:
            costs = costs.without_checkpoints()
            free = free_exchange(tree, costs, memory_bytes), clairvoyant(tree, costs, memory_bytes)
        return cls(memory_bytes, tree.prompt_tokens, *found, *free)


def find_bounds(
    trace: Sequence[TraceRequest], plan: KVCachePlan, hash_block_size: int, beyond_bytes: int = 0
) -> Bounds:
    """The bounds of a trace on the bytes of a plan's pools and `beyond_bytes` of tiers, as one memory."""
    costs = CacheCosts.of(plan, hash_block_size)
    return Bounds.of(PromptTree.of(trace), costs, plan.used_bytes + beyond_bytes)


def bounds_text(bounds: Bounds) -> str:
    """A table for a person."""
    rows = [
        [name, f"{hit:,}", *(f"{tokens / bounds.prompt_tokens:.2%}" for tokens in (hit, free))]
        for name, hit, free in (
            ("least recently used goes first", bounds.free_exchange, bounds.free_exchange_unforgetting),
            ("used again last goes first", bounds.clairvoyant, bounds.clairvoyant_unforgetting),
        )
    ]
    table = align_table(["bytes exchanged freely", "tokens hit", "rate", "were checkpoints free"], rows, left={0})
    return f"{table}\n(what {format_bytes(bounds.memory_bytes)} without pools and blocks would hit, a prompt at a time)"


def bounds_json(bounds: Bounds) -> dict[str, int]:
    """The same for programs: tokens and bytes."""
    return asdict(bounds)


__all__ = ["Bounds", "bounds_json", "bounds_text", "find_bounds"]
