"""What a plan says of each block table and each pool.

Flow:    CacheShape, blocks per pool -> [group_summaries | pool_plans] -> KVCachePlan, `planning.report`
Source:  1 MiB of scalar memory, and what a kernel's launch needs of it: measured with libtpu's compiler for v6e
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvjax.core.spec import KVCacheSpec
from kvjax.planning.shape import CacheShape, LayerPages
from kvjax.planning.sizing import PoolNeed

# Of a TPU core; a kernel's launch needs a few KiB of it beside the block table.
SCALAR_MEMORY_BYTES = 2**20
KERNEL_SCALAR_BYTES = 8 * 2**10
ROW_SCALAR_BYTES = 8  # a row's entries of seq_lens and query_start_loc


@dataclass(frozen=True)
class GroupPlanSummary:
    """One block table: its layers and what a request holds of it."""

    group_id: int
    pool_id: int
    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    pages: tuple[LayerPages, ...]  # by spec, where the layers' pages differ
    request_blocks: int  # blocks that a request of `max_model_len` tokens holds, tokens in flight not counted
    table_bytes: int  # one request's row of the table, int32

    @property
    def real_page_bytes(self) -> int:
        """One layer's page on one device, without padding; the largest where they differ."""
        return max(part.real_page_bytes for part in self.pages)

    @property
    def page_bytes(self) -> int:
        """As `real_page_bytes`, with padding."""
        return max(part.page_bytes for part in self.pages)

    @property
    def rows_in_scalar_memory(self) -> int:
        """Requests of `max_model_len` tokens whose rows a TPU core's scalar memory holds in one kernel launch."""
        return (SCALAR_MEMORY_BYTES - KERNEL_SCALAR_BYTES) // (self.table_bytes + ROW_SCALAR_BYTES)


@dataclass(frozen=True)
class PoolPlan:
    """One space of block ids over `num_columns` columns. Bytes are one device's."""

    pool_id: int
    num_blocks: int  # the null block included
    group_ids: tuple[int, ...]
    num_columns: int
    real_bytes_per_block: int
    bytes_per_block: int
    request_blocks: int  # blocks that one request of `max_model_len` tokens holds over the pool's groups
    in_flight_blocks: int  # blocks set aside for tokens in flight, once
    reserved_blocks: int  # blocks that groups take for good

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks on one device."""
        return self.num_blocks * self.bytes_per_block

    @property
    def free_blocks(self) -> int:
        """Blocks for resident requests."""
        return max(self.num_blocks - 1 - self.in_flight_blocks - self.reserved_blocks, 0)


@dataclass(frozen=True)
class KeptCache:
    """What an idle cache keeps for later requests."""

    tokens: int
    checkpoints: int

    @classmethod
    def of(cls, needs: Sequence[PoolNeed], sizes: Sequence[int], tokens_per_checkpoint: int) -> KeptCache:
        """Tokens in the pools that grow with a request, checkpoints in the others; without others one a request.

        Pools of which nothing is kept do not count.
        """
        pairs = [(need, size) for need, size in zip(needs, sizes, strict=True) if need.kept_blocks]
        growing = [need.kept_in(size) for need, size in pairs if need.grows_with_length]
        others = [need.kept_in(size) for need, size in pairs if not need.grows_with_length]
        return cls(int(min(growing, default=0) * tokens_per_checkpoint), int(min(others or growing, default=0)))


def group_summaries(shape: CacheShape, max_model_len: int) -> tuple[GroupPlanSummary, ...]:
    """Every block table, for requests of `max_model_len` tokens."""
    return tuple(
        GroupPlanSummary(
            group_id=group_id,
            pool_id=part.group.pool_id,
            layer_names=part.group.layer_names,
            spec=part.group.spec,
            pages=part.pages,
            request_blocks=shape.request_blocks(part.group.spec, max_model_len),
            table_bytes=shape.table_bytes(part.group.spec, max_model_len),
        )
        for group_id, part in enumerate(shape.groups)
    )


def pool_plans(
    shape: CacheShape, sizes: Sequence[int], max_model_len: int, in_flight_tokens: int
) -> tuple[PoolPlan, ...]:
    """Every pool of `sizes` blocks, for requests of `max_model_len` tokens."""
    needs = shape.needs(max_model_len, max_model_len, in_flight_tokens)
    return tuple(
        PoolPlan(
            pool_id=pool_id,
            num_blocks=size,
            group_ids=tuple(i for i, part in enumerate(shape.groups) if part.group.pool_id == pool_id),
            num_columns=max(len(part.group.layer_names) for part in shape.pool_groups(pool_id)),
            real_bytes_per_block=max(part.real_bytes_per_block for part in shape.pool_groups(pool_id)),
            bytes_per_block=need.bytes_per_block,
            request_blocks=need.request_blocks,
            in_flight_blocks=need.in_flight_blocks,
            reserved_blocks=need.reserved_blocks,
        )
        for pool_id, (size, need) in enumerate(zip(sizes, needs, strict=True))
    )
