"""What all layers of one kind share in a step on the GPU: the work list of decoding, the query tiles of all others.

Flow:    lengths of the step + PlanSizes -> [GpuSchedule.of], once a step -> the launches of every layer

A sequence *decodes* if it has few queries, at most `PlanSizes.queries`: one, or in a step with drafts as many as each
sequence of its shape can have. A step of which the host knows that every sequence decodes has no tiles: its layers
compile to no prefill. Where that is one query each, its tokens are its sequences, in order; else see `gpu.slots`.

Tiles cover every token that does not decode, whether it sees a key or not, so that padding gives 0 and -inf without a
launch of its own: tokens of no sequence are one more sequence, without keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.mosaic import ROWS
from pallas_kernels.gpu.plan import DecodePlan, GpuConfig, plan_decode
from pallas_kernels.gpu.slots import slots_of_tokens, tokens_of_slots
from pallas_kernels.gpu.tiles import TileShape, plan_tiles
from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch, few_queries


class PlanSizes(NamedTuple):
    """All that a schedule depends on beside the step's lengths."""

    mask: MaskRule
    page_size: int
    num_tokens: int  # of the array of queries
    num_seqs: int
    units: int  # of a sequence that decodes: KV heads, or parts of the query heads
    queries: int  # most tokens of a sequence that decodes
    decode_block: int  # slots of a KV block
    num_blocks: int  # thread blocks that share the work of decoding
    tile: TileShape
    tile_block: int  # slots of a KV block
    is_decode: bool  # every sequence of the step decodes

    @property
    def is_plain_decode(self) -> bool:
        """Whether tokens are sequences, in order."""
        return self.is_decode and self.queries == 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuSchedule:
    """The plan of one step; `sizes` are static."""

    decode: DecodePlan
    tokens: jax.Array | None  # int32[S * queries] query token of each slot, -1: none; None: its number
    slots: jax.Array | None  # int32[T] slot of each token, -1: none; None: its number, or there are tiles
    tiles: jax.Array | None  # int32[tiles, fields] of `plan_tiles`; None: every sequence decodes
    sizes: PlanSizes = field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        seq_lens: jax.Array,  # int32[S]
        query_start_loc: jax.Array,  # int32[S + 1]
        distribution: jax.Array,  # int32[3]
        config: GpuConfig,
        sizes: PlanSizes,
        sink_tokens: jax.Array | None = None,  # int32[S] where the mask has them by sequence
    ) -> GpuSchedule:
        """The schedule of a step."""
        batch = Batch.of_step(seq_lens, query_start_loc, distribution, sink_tokens)
        num_decode = distribution[2] if sizes.queries > 1 else distribution[0]
        decodes = (jnp.arange(sizes.num_seqs, dtype=jnp.int32) < num_decode) & (batch.q_lens <= sizes.queries)
        decoding = batch._replace(q_lens=jnp.where(decodes, batch.q_lens, 0))
        decode_config = replace(config, block=sizes.decode_block, queries=sizes.queries)
        decode = plan_decode(decoding, decode_config, sizes.num_blocks)
        if sizes.is_plain_decode:
            return cls(decode, None, None, None, sizes)
        tokens = tokens_of_slots(decoding, sizes.queries)
        if sizes.is_decode:
            slots = slots_of_tokens(decoding, sizes.queries, sizes.num_tokens)
            return cls(decode, tokens, slots, None, sizes)
        end = query_start_loc[distribution[2]]
        others = Batch(
            jnp.append(seq_lens, 0),
            jnp.append(batch.starts, end),
            jnp.append(batch.q_lens - decoding.q_lens, jnp.maximum(sizes.num_tokens - end, 0)),
            None if sink_tokens is None else jnp.append(sink_tokens, 0),
        )
        tile_config = replace(config, block=sizes.tile_block)
        num_tokens = max(sizes.num_tokens, sizes.tile.tokens)
        tiles = plan_tiles(others, tile_config, sizes.tile, num_tokens)
        return cls(decode, tokens, None, tiles, sizes)


def most_queries(num_tokens: int, num_seqs: int, group: int) -> int:
    """`PlanSizes.queries` of a step of these shapes: as `few_queries`, if the rows of all of them fit in a tile."""
    return few_queries(num_tokens, num_seqs, max(ROWS // group, 1))
