"""The plan of a deployment's KV cache: pools, groups, bytes, blocks, and how many requests fit.

Flow:    specs of all layers + budget -> [plan_kv_cache] -> KVCachePlan -> managers (`config`), `planning.report`
Source:  arithmetic of vLLM v1/core/kv_cache_utils.py for one pool; several pools: `planning.sizing`

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
from dataclasses import dataclass, replace

from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, KVCacheSpec
from kvjax.errors import MemoryBudgetError
from kvjax.planning.grouping import LayerGroup
from kvjax.planning.load import Load
from kvjax.planning.parallel import Parallelism
from kvjax.planning.shape import CacheShape, GroupShape
from kvjax.planning.sizing import PoolNeed, check_sizes, requests_that_fit, size_pools
from kvjax.planning.slabs import SlabShape, common_columns
from kvjax.planning.spec_rules import replicated
from kvjax.planning.states.idle_states import idle_groups_of
from kvjax.planning.summary import GroupPlanSummary, KeptCache, PoolPlan, group_summaries, pool_plans

DEFAULT_MAX_IN_FLIGHT_TOKENS = 8_192
MAX_SLOTS = 2**31  # slot mappings are int32


@dataclass(frozen=True)
class KVCachePlan:
    """What `plan_kv_cache` decided. `config` goes to the managers and the device layer, the rest explains it.

    Every rank of a replica has all pools, with the same block ids; every replica has a manager of its own. Numbers of
    requests are one replica's.
    """

    config: KVCacheConfig
    pools: tuple[PoolPlan, ...]
    groups: tuple[GroupPlanSummary, ...]
    shape: CacheShape
    max_model_len: int
    load: Load  # that the pools are balanced for
    max_in_flight_tokens: int
    hybrid: bool
    memory_bytes: int | None  # the budget of one device; None where `num_blocks` was given
    slabs: SlabShape | None = None  # of the memory that all pools share; None: each pool has its own

    @property
    def platform(self) -> str:
        """Whose padding the bytes have: "cpu", "gpu" or "tpu"."""
        return self.shape.platform

    @property
    def parallel(self) -> Parallelism:
        """Over how many devices, and how."""
        return self.shape.parallel

    @property
    def tensor_parallel(self) -> int:
        """Devices that share the KV heads."""
        return self.parallel.tensor

    @property
    def used_bytes(self) -> int:
        """Bytes of all pools on one device."""
        if self.slabs is not None:
            return self.num_slabs * self.slabs.bytes_per_slab
        return sum(pool.total_bytes for pool in self.pools)

    @property
    def num_slabs(self) -> int:
        """Of the memory that pools share, the null slab included; 0 where they share none."""
        return 0 if self.config.slabs is None else self.config.slabs.num_slabs

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
        needs = self.shape.needs(num_tokens, num_tokens, self.max_in_flight_tokens)
        if self.slabs is not None:
            return self.slabs.requests_that_fit(needs, self.num_slabs)
        return requests_that_fit(needs, [pool.num_blocks for pool in self.pools])

    @property
    def kept(self) -> KeptCache:
        """What the pools keep while nothing runs, of requests as in `load`."""
        needs = self.shape.needs_of(self.load, self.max_model_len, self.max_in_flight_tokens)
        if self.slabs is not None:
            return self.slabs.kept(needs, self.num_slabs, self.load)
        return KeptCache.of(needs, [pool.num_blocks for pool in self.pools], self.load.tokens_per_checkpoint)

    def balanced_for(self, load: Load) -> KVCachePlan:
        """The plan of the same memory for another load; the same one where pools share it.

        Raises:
            ValueError: the numbers of blocks were given.
        """
        if self.slabs is not None:
            return self
        if self.memory_bytes is None:
            raise ValueError("expected a plan of memory_bytes to balance, got one of num_blocks")
        sizes = size_pools(self.shape.needs_of(load, self.max_model_len, self.max_in_flight_tokens), self.memory_bytes)
        return replace(
            self,
            load=load,
            config=_config(self.shape, sizes, dict(self.config.shared_layers)),
            pools=pool_plans(self.shape, sizes, self.max_model_len, self.max_in_flight_tokens),
        )

    @property
    def resident_tokens(self) -> int:
        """Tokens that requests of `max_model_len` can keep in the cache together."""
        return int(self.concurrency * self.max_model_len)

    @property
    def table_bytes_per_request(self) -> int:
        """Bytes of one request's rows in all block tables."""
        return sum(group.table_bytes for group in self.groups)


def plan_kv_cache(
    specs: Mapping[str, KVCacheSpec],
    *,
    max_model_len: int,
    memory_bytes: int | None = None,
    num_blocks: int | Sequence[int] | None = None,
    max_in_flight_tokens: int = DEFAULT_MAX_IN_FLIGHT_TOKENS,
    request_len: int | None = None,
    load: Load | None = None,
    platform: str | None = None,
    tensor_parallel: int | None = None,
    parallel: Parallelism | None = None,
    hybrid: bool = True,
    shared_layers: Mapping[str, str] | None = None,
    one_memory: bool = False,
) -> KVCachePlan:
    """Plans the cache of the layers in `specs` for either a budget or given numbers of blocks.

    Args:
        specs: cache of every layer that has one, by the layer's name.
        max_model_len: tokens of the longest request; one always fits.
        memory_bytes: the budget of one device.
        num_blocks: of every pool, or each pool's own in a sequence; the null block counts.
        max_in_flight_tokens: the most tokens that steps in flight add.
        request_len: several pools are balanced so that as many requests of so many tokens as possible run at once.
        load: several pools are balanced for it instead; None of both: for `Load()`, of at most `max_model_len` tokens.
        platform: "cpu", "gpu" or "tpu", whose padding counts; None: "cpu", no padding.
        tensor_parallel: devices that share the KV heads, where that is all parallelism there is.
        parallel: all of it, instead.
        hybrid: whether windowed and chunked layers release blocks; else they keep every token, in the full layers'
            table.
        shared_layers: layers without a cache of their own, each with the layer whose pages it reads.
        one_memory: whether pools of unlike pages share `memory_bytes` in slabs, instead of a part each; where there is
            one pool, or one of unlike layers, nothing changes.

    Raises:
        MemoryBudgetError: the budget or the blocks do not hold one request of `max_model_len` tokens; has the missing
            bytes or blocks and the longest request that fits.
        ValueError: an argument is out of range, both or none of budget and blocks are given, both of length and load,
            both ways of parallelism, blocks with `one_memory`, heads or tokens do not split over the devices, or ids
            overflow int32.
        NotImplementedError: a kind does not work with context parallelism.
    """
    _check_arguments(max_model_len, memory_bytes, num_blocks, max_in_flight_tokens)
    if one_memory and memory_bytes is None:
        raise ValueError(f"expected memory_bytes with one_memory=True, got num_blocks {num_blocks}: slabs are of bytes")
    load = _load(request_len, load, max_model_len)
    if parallel is None:
        parallel = Parallelism(tensor=1 if tensor_parallel is None else tensor_parallel)
    elif tensor_parallel is not None:
        raise ValueError(f"expected tensor_parallel or parallel, got both: {tensor_parallel} and {parallel}")
    columns = common_columns(specs, platform or "cpu", hybrid) if one_memory else None
    shape = CacheShape.of(specs, platform=platform or "cpu", parallel=parallel, hybrid=hybrid, group_size=columns)
    needs = shape.needs_of(load, max_model_len, max_in_flight_tokens)
    slabs = SlabShape.of(shape, needs) if columns is not None else None
    slab_spec = None
    if slabs is not None and memory_bytes is not None:
        slab_spec = slabs.spec_of(slabs.slabs_of_budget(needs, memory_bytes))
        sizes = [slab_spec.num_slabs * count for count in slab_spec.blocks_per_slab]
    elif memory_bytes is not None:
        sizes = _sizes_of_budget(shape, needs, memory_bytes, max_model_len, max_in_flight_tokens)
    else:
        sizes = _given_sizes(num_blocks, shape.num_pools)
        _check_given_sizes(shape, needs, sizes, max_model_len, max_in_flight_tokens)
    for pool_id, size in enumerate(sizes):
        _check_ids_fit(size, shape.pool_groups(pool_id), parallel.context)
    return KVCachePlan(
        config=replace(_config(shape, sizes, shared_layers or {}), slabs=slab_spec),
        pools=pool_plans(shape, sizes, max_model_len, max_in_flight_tokens),
        groups=group_summaries(shape, max_model_len),
        shape=shape,
        max_model_len=max_model_len,
        load=load,
        max_in_flight_tokens=max_in_flight_tokens,
        hybrid=hybrid,
        memory_bytes=memory_bytes,
        slabs=slabs,
    )


def _check_arguments(
    max_model_len: int,
    memory_bytes: int | None,
    num_blocks: int | Sequence[int] | None,
    max_in_flight_tokens: int,
) -> None:
    if (memory_bytes is None) == (num_blocks is None):
        given = "none" if memory_bytes is None else "both"
        raise ValueError(f"expected one of memory_bytes and num_blocks, got {given}")
    positive = {
        "max_model_len": max_model_len,
        "max_in_flight_tokens": max_in_flight_tokens,
        "memory_bytes": 1 if memory_bytes is None else memory_bytes,
    }
    for name, value in positive.items():
        if value < 1:
            raise ValueError(f"expected {name} >= 1, got {value}")


def _load(request_len: int | None, load: Load | None, max_model_len: int) -> Load:
    """What the arguments say; of at most `max_model_len` tokens."""
    if request_len is None:
        load = Load() if load is None else load
        return replace(load, tokens_per_checkpoint=min(load.tokens_per_checkpoint, max_model_len))
    if load is not None:
        raise ValueError(f"expected request_len or load, got both: {request_len} and {load}")
    if not 1 <= request_len <= max_model_len:
        raise ValueError(f"expected request_len in [1, {max_model_len}] (max_model_len), got {request_len}")
    return Load(request_len, max_running=None)


def _sizes_of_budget(
    shape: CacheShape, needs: Sequence[PoolNeed], memory_bytes: int, max_model_len: int, in_flight_tokens: int
) -> list[int]:
    try:
        return size_pools(needs, memory_bytes)
    except MemoryBudgetError as error:
        longest = shape.longest_request(memory_bytes, max_model_len, in_flight_tokens)
        raise _with_longest(error, longest, in_flight_tokens) from None


def _given_sizes(num_blocks: int | Sequence[int] | None, num_pools: int) -> list[int]:
    sizes = [num_blocks] * num_pools if isinstance(num_blocks, int) else list(num_blocks or ())
    if len(sizes) != num_pools:
        raise ValueError(f"expected num_blocks for {num_pools} pools, got {len(sizes)} numbers")
    if min(sizes) < 2:
        raise ValueError(f"expected num_blocks >= 2 (block 0 is the null block), got {min(sizes)}")
    return sizes


def _check_given_sizes(
    shape: CacheShape, needs: Sequence[PoolNeed], sizes: Sequence[int], max_model_len: int, in_flight_tokens: int
) -> None:
    try:
        check_sizes(needs, sizes)
    except MemoryBudgetError as error:
        longest = shape.longest_request_in(sizes, max_model_len, in_flight_tokens)
        raise _with_longest(error, longest, in_flight_tokens) from None


def _with_longest(error: MemoryBudgetError, longest: int, in_flight_tokens: int) -> MemoryBudgetError:
    return MemoryBudgetError(
        f"{error}. The longest request that fits has {longest:,} tokens"
        if longest
        else f"{error}. No request fits with {in_flight_tokens:,} tokens in flight"
    )


def _check_ids_fit(num_blocks: int, groups: Sequence[GroupShape], context_ranks: int) -> None:
    """A block id stands for a block on every context rank, and slot ids count them all."""
    slots = num_blocks * context_ranks * max(shape.group.spec.block_size for shape in groups)
    if slots > MAX_SLOTS:
        raise ValueError(
            f"expected at most {MAX_SLOTS:,} slots in a pool (slot ids are int32), got {num_blocks:,} blocks with "
            f"{slots:,} slots; give less memory to a device"
        )


def _config(shape: CacheShape, sizes: Sequence[int], shared_layers: Mapping[str, str]) -> KVCacheConfig:
    """For arrays that all tensor-parallel devices share."""
    tensor, pools = shape.parallel.tensor, []
    for pool_id, size in enumerate(sizes):
        widest = max((s.group for s in shape.pool_groups(pool_id)), key=lambda group: len(group.layer_names))
        specs = [replicated(spec, tensor) for spec in widest.layer_specs]
        pools.append(KVCachePoolSpec(size, tuple(spec.page_layout(shape.platform, tensor) for spec in specs)))
    groups = tuple(_config_group(s.group, tensor) for s in shape.groups)
    return KVCacheConfig(tuple(pools), groups, tuple(shared_layers.items()), idle_groups=idle_groups_of(groups))


def _config_group(group: LayerGroup, tensor_parallel: int) -> KVCacheGroupSpec:
    specs = tuple(replicated(spec, tensor_parallel) for spec in group.layer_specs)
    table = replicated(group.spec, tensor_parallel)
    alike = all(spec == table for spec in specs)
    return KVCacheGroupSpec(group.layer_names, table, group.pool_id, layer_specs=() if alike else specs)
