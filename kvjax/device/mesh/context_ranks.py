"""Context parallelism on the device: ranks that share the tokens of every page.

Flow:    slots of a step, an attention op -> [ContextRanks] -> what a rank writes and attends to, merged over ranks
Source:  interleaving as kvjax.core.step.context_parallel; merge as pallas_kernels.merge_states

A page of `n * ranks` tokens lies on each rank as one of `n`: token t of a block on rank `t % ranks` at `t // ranks`. So
the host counts blocks of `n * ranks` tokens and knows nothing of ranks, whatever the kind of attention.

Used inside `jax.shard_map` over the mesh axis of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.merge_states import merge_ranks


@dataclass(frozen=True)
class ContextRanks:
    """The ranks along one mesh axis."""

    axis: str
    size: int

    def own_slots(self, slot_mapping: jax.Array) -> jax.Array:  # int32[T] -> int32[T]
        """Where the rank writes each token in its part of the pages; -1 for the tokens of other ranks."""
        own = (slot_mapping >= 0) & (slot_mapping % self.size == lax.axis_index(self.axis))
        return jnp.where(own, slot_mapping // self.size, -1)

    def attend(
        self,
        op: Callable[..., AttentionOutput],  # called with slot_mapping, sinks and the options of context parallelism
        slot_mapping: jax.Array | None,  # int32[T] of the step; None: nothing is written
        sinks: jax.Array | None,  # float32[Hq]
    ) -> AttentionOutput:
        """Attention over the tokens of all ranks, the same on each, and the rank's own pages."""
        part = op(
            slot_mapping=None if slot_mapping is None else self.own_slots(slot_mapping),
            sinks=None,
            context_rank=lax.axis_index(self.axis),
            context_size=self.size,
            return_lse=True,
        )
        assert part.lse is not None  # it was asked for
        return AttentionOutput(merge_ranks(part.out, part.lse, self.axis, sinks=sinks), None, part.pages)


def attend(
    ranks: ContextRanks | None,
    op: Callable[..., AttentionOutput],
    slot_mapping: jax.Array | None,
    sinks: jax.Array | None,
) -> AttentionOutput:
    """`op` over the tokens of all ranks; None: of the one that holds all."""
    if ranks is None:
        return op(slot_mapping=slot_mapping, sinks=sinks)
    return ranks.attend(op, slot_mapping, sinks)


__all__ = ["ContextRanks", "attend"]
