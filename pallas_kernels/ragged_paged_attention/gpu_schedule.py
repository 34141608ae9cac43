"""What all layers of one kind share in a step on the GPU: the work list of decoding, the query tiles of all others.

Flow:    lengths of the step + PlanSizes -> [GpuSchedule.of], once a step -> the launches of every layer

A step of which the host knows that every sequence decodes has no tiles: its layers compile to no prefill. Its tokens
are its sequences, one each, in order.

Tiles cover every token that does not decode, whether it sees a key or not, so that padding gives 0 and -inf without a
launch of its own: tokens of no sequence are one more sequence, without keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gpu.plan import DecodePlan, GpuConfig, plan_decode
from pallas_kernels.gpu.tiles import TileShape, plan_tiles
from pallas_kernels.mask import MaskRule
from pallas_kernels.schedule import Batch


class PlanSizes(NamedTuple):
    """All that a schedule depends on beside the step's lengths."""

    mask: MaskRule
    page_size: int
    num_tokens: int  # of the array of queries
    num_seqs: int
    units: int  # of a sequence that decodes: KV heads, or parts of the query heads
    decode_block: int  # slots of a KV block
    num_blocks: int  # thread blocks that share the work of decoding
    tile: TileShape
    tile_block: int  # slots of a KV block
    is_decode: bool  # every sequence of the step decodes


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GpuSchedule:
    """The plan of one step; `sizes` are static."""

    decode: DecodePlan
    tokens: jax.Array | None  # int32[S] query token of each sequence that decodes, -1: it does not; None: its number
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
    ) -> GpuSchedule:
        """The schedule of a step."""
        batch = Batch.of_step(seq_lens, query_start_loc, distribution)
        decode_config = replace(config, block=sizes.decode_block)
        decode = plan_decode(seq_lens, distribution[0], batch.q_lens, decode_config, sizes.num_blocks)
        if sizes.is_decode:
            return cls(decode, None, None, sizes)
        decodes = jnp.arange(sizes.num_seqs, dtype=jnp.int32) < distribution[0]
        tokens = jnp.where(decodes & (batch.q_lens > 0), batch.starts, -1)
        end = query_start_loc[distribution[2]]
        others = Batch(
            jnp.append(seq_lens, 0),
            jnp.append(batch.starts, end),
            jnp.append(jnp.where(decodes, 0, batch.q_lens), jnp.maximum(sizes.num_tokens - end, 0)),
        )
        tile_config = replace(config, block=sizes.tile_block)
        num_tokens = max(sizes.num_tokens, sizes.tile.tokens)
        return cls(decode, tokens, plan_tiles(others, tile_config, sizes.tile, num_tokens), sizes)
