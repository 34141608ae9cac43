"""The plan of a deployment's KV cache: pools, groups, bytes, blocks, and how many requests fit.

Flow:    specs of all layers + budget -> [plan_kv_cache] -> KVCachePlan -> managers (`config`), `planning.report`
Source:  arithmetic of vLLM v1/core/kv_cache_utils.py for one pool; several pools: `planning.sizing`

Bytes are what one device takes: its share of the KV heads under tensor parallelism, and the padding of its platform
(packed heads and 128 lanes on TPU). *Real* bytes leave the padding out.

A worked example: 80 layers of 8 KV heads of 128 in bfloat16, 16 tokens a block, 56 GiB, requests of 131,072 tokens.

    page    16 tokens * 8 heads * (128 + 128) * 2 bytes              =    65,536 bytes
    block   80 layers * 65,536                                       = 5,242,880 bytes
    blocks  56 * 2**30 // 5,242,880 = 60,129,542,144 // 5,242,880    =    11,468
    fit     (11,468 - 1 null block) / (131,072 / 16 blocks each)     =       1.4 requests

Where these figures are quoted with 10,937 blocks, units were mixed: 80 pages of 64 KiB are 5,120 KiB, read as 5.12 MB,
and 56 GiB are read as 56,000 MB; 56,000 / 5.12 = 10,937.5. Really a block is 2.4 % more (5.24288 MB) and the memory
7.4 % more (60,129.5 MB): 60,129.5 / 5.24288 = 11,468.8.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, KVCacheSpec, cdiv
from kvjax.planning.grouping import LayerGroup, group_layers
from kvjax.planning.sizing import PoolNeed, requests_that_fit, size_pools
from kvjax.planning.spec_rules import per_device, replicated
from pallas_kernels.layouts import PageLayout

DEFAULT_MAX_IN_FLIGHT_TOKENS = 8_192
MAX_SLOTS = 2**31  # slot mappings are int32
TABLE_ENTRY_BYTES = 4  # block tables are int32


@dataclass(frozen=True)
class GroupPlanSummary:
    """One block table: its layers and what a request holds of it."""

    group_id: int
    pool_id: int
    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    real_page_bytes: int  # one layer's page on one device, without padding
    page_bytes: int  # with padding
    request_blocks: int  # blocks that a request of `max_model_len` tokens holds, tokens in flight not counted
    table_bytes: int  # one request's row of the table, int32


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

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks on one device."""
        return self.num_blocks * self.bytes_per_block


@dataclass(frozen=True)
class KVCachePlan:
    """What `plan_kv_cache` decided. `config` goes to the managers and the device layer, the rest explains it."""

    config: KVCacheConfig
    pools: tuple[PoolPlan, ...]
    groups: tuple[GroupPlanSummary, ...]
    max_model_len: int
    max_in_flight_tokens: int
    platform: str
    tensor_parallel: int
    hybrid: bool
    memory_bytes: int | None  # the budget of one device; None where `num_blocks` was given

    @property
    def used_bytes(self) -> int:
        """Bytes of all pools on one device."""
        return sum(pool.total_bytes for pool in self.pools)

    @property
    def unused_bytes(self) -> int:
        """Bytes of the budget that no whole block fits in; 0 without a budget."""
        return 0 if self.memory_bytes is None else self.memory_bytes - self.used_bytes

    @property
    def concurrency(self) -> float:
        """How many requests of `max_model_len` tokens fit at once."""
        return self.requests_of(self.max_model_len)

    def requests_of(self, num_tokens: int) -> float:
        """How many requests of `num_tokens` tokens each fit at once, without shared prefixes.

        Raises:
            ValueError: `num_tokens` is not in [1, max_model_len].
        """
        if not 1 <= num_tokens <= self.max_model_len:
            raise ValueError(f"expected a length in [1, {self.max_model_len}] (max_model_len), got {num_tokens}")
        needs = [
            _pool_need([self.groups[g] for g in pool.group_ids], num_tokens, self.max_in_flight_tokens)
            for pool in self.pools
        ]
        return requests_that_fit(needs, [pool.num_blocks for pool in self.pools])

    @property
    def resident_tokens(self) -> int:
        """Tokens that requests of `max_model_len` can keep in the cache together."""
        return int(self.concurrency * self.max_model_len)

    @property
    def table_bytes_per_request(self) -> int:
        """Bytes of one request's rows in all block tables (on TPU they lie in scalar memory)."""
        return sum(group.table_bytes for group in self.groups)


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec],
    *,
    max_model_len: int,
    memory_bytes: int | None = None,
    num_blocks: int | Sequence[int] | None = None,
    max_in_flight_tokens: int = DEFAULT_MAX_IN_FLIGHT_TOKENS,
    platform: str | None = None,
    tensor_parallel: int = 1,
    hybrid: bool = True,
) -> KVCachePlan:
    """Plans the cache of the layers in `specs` for either a budget or given numbers of blocks.

    `memory_bytes` is the budget of one device; `num_blocks` counts the null block and goes to every pool, or to each
    its own in a sequence. `max_in_flight_tokens` is the most tokens that steps in flight add. `platform` is "cpu",
    "gpu" or "tpu" (None: "cpu", no padding). With `hybrid` false windowed layers keep every token.

    Raises:
        MemoryBudgetError: the budget does not hold one request of `max_model_len` tokens; has the missing bytes.
        ValueError: an argument is out of range, both or none of budget and blocks are given, or ids overflow int32.
    """
    _check_arguments(max_model_len, memory_bytes, num_blocks, max_in_flight_tokens, tensor_parallel)
    platform = platform or "cpu"
    groups = [
        _summarise(group_id, group, max_model_len, platform, tensor_parallel)
        for group_id, group in enumerate(group_layers(specs, platform=platform, hybrid=hybrid))
    ]
    pools = [[g for g in groups if g.pool_id == p] for p in range(1 + max(g.pool_id for g in groups))]
    needs = [_pool_need(members, max_model_len, max_in_flight_tokens) for members in pools]
    sizes = size_pools(needs, memory_bytes) if memory_bytes is not None else _given_sizes(num_blocks, len(pools))
    for size, members in zip(sizes, pools, strict=True):
        _check_ids_fit(size, members)
    return KVCachePlan(
        config=_config(groups, sizes, platform, tensor_parallel),
        pools=tuple(
            _pool_plan(p, members, need, size)
            for p, (members, need, size) in enumerate(zip(pools, needs, sizes, strict=True))
        ),
        groups=tuple(groups),
        max_model_len=max_model_len,
        max_in_flight_tokens=max_in_flight_tokens,
        platform=platform,
        tensor_parallel=tensor_parallel,
        hybrid=hybrid,
        memory_bytes=memory_bytes,
    )


def _check_arguments(
    max_model_len: int,
    memory_bytes: int | None,
    num_blocks: int | Sequence[int] | None,
    max_in_flight_tokens: int,
    tensor_parallel: int,
) -> None:
    if (memory_bytes is None) == (num_blocks is None):
        given = "none" if memory_bytes is None else "both"
        raise ValueError(f"expected one of memory_bytes and num_blocks, got {given}")
    positive = {
        "max_model_len": max_model_len,
        "max_in_flight_tokens": max_in_flight_tokens,
        "tensor_parallel": tensor_parallel,
        "memory_bytes": 1 if memory_bytes is None else memory_bytes,
    }
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"expected {name} >= 1, got {value}")


def _given_sizes(num_blocks: int | Sequence[int] | None, num_pools: int) -> list[int]:
    sizes = [num_blocks] * num_pools if isinstance(num_blocks, int) else list(num_blocks or ())
    if len(sizes) != num_pools:
        raise ValueError(f"expected num_blocks for {num_pools} pools, got {len(sizes)} numbers")
    return sizes


def _check_ids_fit(num_blocks: int, groups: Sequence[GroupPlanSummary]) -> None:
    slots = num_blocks * max(group.spec.block_size for group in groups)
    if slots > MAX_SLOTS:
        raise ValueError(
            f"expected at most {MAX_SLOTS:,} slots in a pool (slot ids are int32), got {num_blocks:,} blocks with "
            f"{slots:,} slots; give less memory to a device"
        )


def _summarise(
    group_id: int, group: LayerGroup, max_model_len: int, platform: str, tensor_parallel: int
) -> GroupPlanSummary:
    local = per_device(group.spec, tensor_parallel)
    return GroupPlanSummary(
        group_id=group_id,
        pool_id=group.pool_id,
        layer_names=group.layer_names,
        spec=group.spec,
        real_page_bytes=local.page_size_bytes,
        page_bytes=local.page_layout(platform).page_bytes,
        request_blocks=group.spec.max_blocks_per_request(max_model_len, 0),
        table_bytes=TABLE_ENTRY_BYTES * cdiv(max_model_len, group.spec.block_size),
    )


def _pool_need(groups: Sequence[GroupPlanSummary], num_tokens: int, max_in_flight_tokens: int) -> PoolNeed:
    """What the groups of one pool need for requests of `num_tokens` tokens.

    A resident request holds `max_blocks_per_request` with nothing in flight; tokens in flight add the difference to
    the bound with them, once per deployment, since steps share the token budget.
    """
    specs = [group.spec for group in groups]
    resident = sum(spec.max_blocks_per_request(num_tokens, 0) for spec in specs)
    in_flight = sum(spec.max_blocks_per_request(num_tokens, max_in_flight_tokens) for spec in specs) - resident
    return PoolNeed(
        bytes_per_block=max(len(group.layer_names) * group.page_bytes for group in groups),
        request_blocks=resident,
        in_flight_blocks=in_flight,
        grows_with_length=any(_grows_with_length(spec) for spec in specs),
    )


def _grows_with_length(spec: KVCacheSpec) -> bool:
    """Whether a request of 2**40 tokens holds more blocks than one of half that."""
    return spec.max_blocks_per_request(2**40, 0) > spec.max_blocks_per_request(2**39, 0)


def _pool_plan(pool_id: int, groups: Sequence[GroupPlanSummary], need: PoolNeed, num_blocks: int) -> PoolPlan:
    widest = max(groups, key=lambda group: len(group.layer_names))
    return PoolPlan(
        pool_id=pool_id,
        num_blocks=num_blocks,
        group_ids=tuple(group.group_id for group in groups),
        num_columns=len(widest.layer_names),
        real_bytes_per_block=len(widest.layer_names) * widest.real_page_bytes,
        bytes_per_block=need.bytes_per_block,
        request_blocks=need.request_blocks,
        in_flight_blocks=need.in_flight_blocks,
    )


def _config(
    groups: Sequence[GroupPlanSummary], sizes: Sequence[int], platform: str, tensor_parallel: int
) -> KVCacheConfig:
    """Columns have the whole model's shapes: sharding splits them, so replicated heads are written out."""
    columns: list[tuple[PageLayout, ...]] = []
    for pool_id in range(len(sizes)):
        widest = max((g for g in groups if g.pool_id == pool_id), key=lambda g: len(g.layer_names))
        layout = replicated(widest.spec, tensor_parallel).page_layout(platform)
        columns.append((layout,) * len(widest.layer_names))
    return KVCacheConfig(
        pools=tuple(KVCachePoolSpec(size, cols) for size, cols in zip(sizes, columns, strict=True)),
        kv_cache_groups=tuple(
            KVCacheGroupSpec(g.layer_names, replicated(g.spec, tensor_parallel), g.pool_id) for g in groups
        ),
    )
