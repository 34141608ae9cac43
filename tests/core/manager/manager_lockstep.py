"""A `KVCacheManager` and the naive model driven by the same calls, and compared after each."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax.core import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheBlocks,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheManager,
    KVCachePoolSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    ReleaseRules,
    Request,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvjax.core.kinds.unshared import RunningStateSpec
from kvjax.core.spec import SlabSpec
from tests.core.manager.naive_manager import MAX_ENCODER, NaiveGroup, NaiveManager, NaiveRequest


def spec_of(group: NaiveGroup, ranks: int = 1) -> KVCacheSpec:
    if group.mamba is not None:
        return MambaSpec(
            block_size=group.block_size,
            shapes=((4, 2),),
            dtypes=("float32",),
            mamba_cache_mode=group.mamba,
            num_speculative_blocks=group.drafts,
        )
    size: dict[str, Any] = {"block_size": group.block_size // ranks, "head_size": 8, "dtype": "float32"}
    if group.latent:
        if group.window is None:
            return MLAAttentionSpec(**size)
        return SlidingWindowMLASpec(sliding_window=group.window, **size)
    size["num_kv_heads"] = 1
    if group.cross:
        return CrossAttentionSpec(max_num_encoder_tokens=MAX_ENCODER, **size)
    if group.sinks:
        return SinkFullAttentionSpec(sink_len=group.sinks * group.block_size, **size)
    if group.chunk is not None:
        return ChunkedLocalAttentionSpec(attention_chunk_size=group.chunk, **size)
    if group.rswa is not None:
        return RSWASpec(rswa_window=group.rswa, **size)
    if group.window is not None:
        return SlidingWindowSpec(sliding_window=group.window, num_sink_tokens=group.first, **size)
    return FullAttentionSpec(**size)


def config_of(
    groups: list[NaiveGroup],
    pool_sizes: list[int],
    ranks: int = 1,
    slabs: SlabSpec | None = None,
    idle_groups: tuple[tuple[int, int], ...] = (),
) -> KVCacheConfig:
    specs = [spec_of(group, ranks) for group in groups]
    for running_id, _ in idle_groups:
        specs[running_id] = RunningStateSpec.of(specs[running_id])
    return KVCacheConfig(
        tuple(KVCachePoolSpec(size) for size in pool_sizes),
        tuple(
            KVCacheGroupSpec((f"layers.{i}",), spec, group.pool, group.eagle)
            for i, (group, spec) in enumerate(zip(groups, specs, strict=True))
        ),
        slabs=slabs,
        idle_groups=idle_groups,
    )


@dataclass(frozen=True)
class Setup:
    """A deployment to test: small blocks, so that few tokens make many of them."""

    groups: tuple[NaiveGroup, ...]
    hash_block_size: int = 2
    max_model_len: int = 24
    caching: bool = True
    eagle: bool = False
    uncached_first: bool = False
    same_step_hits: bool = True
    max_in_flight: int | None = None
    coarse_hash_mode: str = "concat"
    dcp: int = 1  # ranks of decode context parallelism; block sizes of `groups` count all ranks
    pcp: int = 1
    retention: int | None = None
    ends: str = "all"
    blocks_per_slab: tuple[int, ...] = ()  # per pool, where they share slabs: as many as hold the largest pool
    idle_groups: tuple[
        tuple[int, int], ...
    ] = ()  # groups of `mamba` none, and those of `align` that cache their states

    @property
    def num_pools(self) -> int:
        return 1 + max(group.pool for group in self.groups)

    def with_sinks(self, pool_sizes: list[int]) -> list[int]:
        """The sizes with room for the sinks, so that requests have as many blocks as asked for."""
        return [size + sum(g.sinks for g in self.groups if g.pool == i) for i, size in enumerate(pool_sizes)]

    def cut(self, computed: int, new: int) -> int:
        """Of `new` tokens those that recurrent groups let one step take."""
        for group in self.groups:
            if self.caching and group.mamba == "align" and computed % group.block_size and new > 1 + group.drafts:
                new = min(new, -computed % group.block_size)
        return new

    def manager(self, pool_sizes: list[int], *, eviction_policy: Any = "lru", **options: Any) -> KVCacheManager:
        rules = ReleaseRules(
            free_order="uncached_first" if self.uncached_first else "append",
            coarse_hash_mode=self.coarse_hash_mode,
            retention_ends=self.ends,
        )
        sizes, slabs = self.with_sinks(pool_sizes), None
        if self.blocks_per_slab:
            counts = self.blocks_per_slab
            slabs = SlabSpec(1 + max(-(-size // count) for size, count in zip(sizes, counts, strict=True)), counts)
            sizes = [slabs.num_slabs * count for count in counts]
            eviction_policy = "learned" if eviction_policy == "lru" else eviction_policy
        return KVCacheManager(
            config_of(list(self.groups), sizes, self.dcp * self.pcp, slabs, self.idle_groups),
            self.max_model_len,
            self.hash_block_size,
            enable_caching=self.caching,
            use_eagle=self.eagle,
            max_num_reqs=1,
            max_in_flight_tokens=self.max_in_flight,
            eviction_policy=eviction_policy,
            same_step_hits=self.same_step_hits,
            dcp_world_size=self.dcp,
            pcp_world_size=self.pcp,
            retention_interval=self.retention,
            **{"rules": rules} | options,
        )

    def naive(self, pool_sizes: list[int]) -> NaiveManager:
        return NaiveManager(
            list(self.groups),
            self.with_sinks(pool_sizes),
            self.max_model_len,
            caching=self.caching,
            eagle=self.eagle,
            uncached_first=self.uncached_first,
            same_step_hits=self.same_step_hits,
            max_in_flight=self.max_in_flight,
            retention=self.retention,
            ends=self.ends,
        )


FULL = Setup((NaiveGroup(2),))
WINDOW = Setup((NaiveGroup(2, window=5),))
HYBRID = Setup((NaiveGroup(2), NaiveGroup(2, window=4), NaiveGroup(2, window=4)))
SETUPS = {
    "full": FULL,
    "full_uncached_first": Setup((NaiveGroup(2),), uncached_first=True),
    "full_no_caching": Setup((NaiveGroup(2),), caching=False),
    "full_eagle": Setup((NaiveGroup(2),), eagle=True),
    "full_coarse": Setup((NaiveGroup(4),)),
    "full_dcp": Setup((NaiveGroup(4),), dcp=2),
    "full_sink_mla_dcp_pcp": Setup(
        (NaiveGroup(4), NaiveGroup(8, sinks=1), NaiveGroup(8, latent=True, pool=1)), dcp=2, pcp=2, eagle=True
    ),
    "window": WINDOW,
    "window_1": Setup((NaiveGroup(2, window=1),)),
    "window_first": Setup((NaiveGroup(2, window=5, first=3),)),
    "window_first_1": Setup((NaiveGroup(2, window=1, first=2),), max_in_flight=3),
    "window_first_uncached_first": Setup((NaiveGroup(2, window=5, first=3),), uncached_first=True),
    "window_first_beyond": Setup((NaiveGroup(4, window=3, first=9),), eagle=True),
    "window_first_no_caching": Setup((NaiveGroup(2, window=4, first=5),), caching=False),
    "window_uncached_first": Setup((NaiveGroup(2, window=5),), uncached_first=True, max_in_flight=3),
    "window_no_caching": Setup((NaiveGroup(2, window=4),), caching=False),
    "window_eagle": Setup((NaiveGroup(2, window=6),), eagle=True),
    "chunked": Setup((NaiveGroup(2, chunk=6),)),
    "chunked_straddling": Setup((NaiveGroup(4, chunk=6),), max_in_flight=5),
    "chunked_no_caching": Setup((NaiveGroup(2, chunk=4),), caching=False, uncached_first=True),
    "mla": Setup((NaiveGroup(2, latent=True),)),
    "mla_window": Setup((NaiveGroup(2, latent=True), NaiveGroup(2, window=5, latent=True))),
    "rswa": Setup((NaiveGroup(2, rswa=5),), max_in_flight=4),
    "rswa_1": Setup((NaiveGroup(4, rswa=1),), uncached_first=True),
    "rswa_no_caching": Setup((NaiveGroup(2, rswa=4),), caching=False, max_in_flight=3),
    "rswa_eagle": Setup((NaiveGroup(2, rswa=6), NaiveGroup(4)), eagle=True),
    "rswa_hybrid": Setup(
        (NaiveGroup(2, rswa=3), NaiveGroup(2, window=4, pool=1), NaiveGroup(4, rswa=7), NaiveGroup(2, rswa=3)),
        retention=8,
    ),
    "sink": Setup((NaiveGroup(2, sinks=1),)),
    "sink_two_groups": Setup((NaiveGroup(2, sinks=2), NaiveGroup(2), NaiveGroup(2, sinks=2)), eagle=True),
    "cross": Setup((NaiveGroup(2, cross=True),)),
    "full_cross": Setup((NaiveGroup(2), NaiveGroup(2, cross=True))),
    "full_cross_sizes": Setup((NaiveGroup(4, cross=True, pool=1), NaiveGroup(2, window=5), NaiveGroup(4)), eagle=True),
    "full_chunked": Setup((NaiveGroup(2), NaiveGroup(2, chunk=8), NaiveGroup(2, chunk=8))),
    "full_chunked_sizes": Setup((NaiveGroup(4), NaiveGroup(2, chunk=6, pool=1)), same_step_hits=False),
    "deepseek_v4": Setup(  # two compressed caches, a window, and the states of two compressors, in small
        (
            NaiveGroup(16, latent=True),
            NaiveGroup(16, latent=True, pool=1),
            NaiveGroup(8, window=16, latent=True, pool=2),
            NaiveGroup(2, window=4, latent=True, pool=3),
            NaiveGroup(4, window=8, latent=True, pool=3),
        ),
        max_model_len=64,
    ),
    "mamba_none": Setup((NaiveGroup(2, mamba="none"),)),
    "mamba_none_drafts": Setup((NaiveGroup(2), NaiveGroup(2, mamba="none", drafts=2))),
    "mamba_align": Setup((NaiveGroup(2, mamba="align"),)),
    "mamba_align_drafts": Setup((NaiveGroup(2, mamba="align", drafts=2),), uncached_first=True),
    "mamba_align_no_caching": Setup((NaiveGroup(2, mamba="align", drafts=1),), caching=False),
    "full_mamba": Setup((NaiveGroup(2), NaiveGroup(4, mamba="align"), NaiveGroup(4, mamba="align"))),
    "full_mamba_drafts": Setup((NaiveGroup(2), NaiveGroup(2, mamba="align", drafts=3)), eagle=True),
    "full_mamba_pools": Setup((NaiveGroup(4), NaiveGroup(2, window=5), NaiveGroup(4, mamba="align", pool=1, drafts=1))),
    "hybrid": HYBRID,
    "hybrid_next_step_hits": Setup(HYBRID.groups, same_step_hits=False, max_in_flight=4),
    "hybrid_windows": Setup((NaiveGroup(2, window=7), NaiveGroup(2, window=3), NaiveGroup(2))),
    "hybrid_interleaved": Setup((NaiveGroup(2, window=4), NaiveGroup(2), NaiveGroup(2, window=4), NaiveGroup(2))),
    "hybrid_sizes": Setup((NaiveGroup(4), NaiveGroup(2, window=5), NaiveGroup(6, window=7)), max_model_len=36),
    "full_sizes": Setup((NaiveGroup(4), NaiveGroup(6)), max_model_len=36),
    "hybrid_sizes_last": Setup((NaiveGroup(2), NaiveGroup(4, window=5)), coarse_hash_mode="last"),
    "hybrid_uncached_first": Setup(HYBRID.groups, uncached_first=True, max_in_flight=4),
    "hybrid_uncached_first_no_caching": Setup(
        (NaiveGroup(2, chunk=4), NaiveGroup(2), NaiveGroup(2, chunk=4), NaiveGroup(2)),
        caching=False,
        uncached_first=True,
    ),
    "full_mamba_uncached_first": Setup(
        (NaiveGroup(2), NaiveGroup(4, mamba="align", drafts=1), NaiveGroup(4, mamba="align", drafts=1)),
        uncached_first=True,
    ),
    "hybrid_eagle": Setup((NaiveGroup(2), NaiveGroup(4, window=5)), eagle=True, uncached_first=True),
    "hybrid_eagle_group": Setup((NaiveGroup(2, eagle=True), NaiveGroup(4, window=5), NaiveGroup(2)), eagle=True),
    "hybrid_eagle_window": Setup((NaiveGroup(4), NaiveGroup(2, window=5, eagle=True)), eagle=True),
    "hybrid_first": Setup(
        (NaiveGroup(2), NaiveGroup(2, window=4, first=1), NaiveGroup(2, window=4, first=1), NaiveGroup(4, window=3))
    ),
    "hybrid_first_sizes": Setup(
        (NaiveGroup(4), NaiveGroup(2, window=5, first=6), NaiveGroup(6, window=7, first=2, pool=1)),
        max_model_len=36,
        same_step_hits=False,
    ),
    "hybrid_first_retained": Setup(
        (NaiveGroup(2), NaiveGroup(2, window=4, first=3), NaiveGroup(4, window=3)), retention=8
    ),
    "hybrid_chunked_retained": Setup((NaiveGroup(2), NaiveGroup(2, chunk=6), NaiveGroup(2, window=5)), retention=8),
    "chunked_retained_sizes": Setup((NaiveGroup(4), NaiveGroup(2, chunk=10)), retention=0, uncached_first=True),
    "window_retained": Setup((NaiveGroup(2, window=5),), retention=6),
    "window_retained_as_vllm": Setup((NaiveGroup(2, window=5),), retention=6, ends="vllm-0.33"),
    "hybrid_retained": Setup(HYBRID.groups, retention=8),
    "hybrid_retained_as_vllm": Setup((*HYBRID.groups, NaiveGroup(2, chunk=6)), retention=8, ends="vllm-0.33"),
    "hybrid_retained_uncached_first": Setup(HYBRID.groups, retention=8, uncached_first=True),
    "hybrid_sizes_retained": Setup(
        (NaiveGroup(4), NaiveGroup(2, window=5), NaiveGroup(6, window=7)),
        max_model_len=48,
        retention=0,
        uncached_first=True,
        ends="vllm-0.33",
    ),
    "hybrid_eagle_retained": Setup(
        (NaiveGroup(4), NaiveGroup(2, window=4, eagle=True), NaiveGroup(2, window=7)),
        eagle=True,
        retention=12,
        ends="vllm-0.33",
    ),
    "full_mamba_retained": Setup(
        (NaiveGroup(2), NaiveGroup(4, mamba="align", drafts=1), NaiveGroup(2, window=1, pool=1)), retention=8
    ),
    "hybrid_pools": Setup((NaiveGroup(2), NaiveGroup(2, window=3, pool=1), NaiveGroup(4, pool=1))),
    "hybrid_no_caching": Setup((NaiveGroup(4), NaiveGroup(2, window=5)), caching=False),
}

IN_SLABS = {  # pools that share a memory; the naive model does not know them
    "full_mamba": Setup(
        (NaiveGroup(2), NaiveGroup(4, mamba="align", pool=1), NaiveGroup(4, mamba="align", pool=1)),
        blocks_per_slab=(5, 1),
    ),
    "full_mamba_drafts": Setup(
        (NaiveGroup(4), NaiveGroup(2, window=5), NaiveGroup(4, mamba="align", pool=1, drafts=1)),
        blocks_per_slab=(3, 2),
    ),
    "full_mamba_retained": Setup(
        (NaiveGroup(2), NaiveGroup(4, mamba="align", drafts=1, pool=1), NaiveGroup(2, window=1, pool=2)),
        retention=8,
        blocks_per_slab=(4, 1, 3),
    ),
    "deepseek_v4": Setup(SETUPS["deepseek_v4"].groups, max_model_len=64, blocks_per_slab=(1, 2, 3, 4)),
    "full_sizes": Setup((NaiveGroup(4), NaiveGroup(6, pool=1)), max_model_len=36, blocks_per_slab=(3, 2)),
    "one_pool": Setup(HYBRID.groups, blocks_per_slab=(4,)),
}

RUNNING, DRAFTING = NaiveGroup(4, mamba="none"), NaiveGroup(4, mamba="none", pool=1, drafts=2)
IDLE = {  # states that are cached apart; the naive model does not know them
    "one_pool": Setup((NaiveGroup(2), RUNNING, NaiveGroup(4, mamba="align")), idle_groups=((1, 2),)),
    "pools_drafts": Setup(
        (NaiveGroup(2), DRAFTING, NaiveGroup(4, mamba="align", pool=2, drafts=2)), idle_groups=((1, 2),)
    ),
    "slabs": Setup(
        (
            NaiveGroup(2),
            *(NaiveGroup(4, mamba="none", pool=1),) * 2,
            *(NaiveGroup(4, mamba="align", pool=2),) * 2,
        ),
        idle_groups=((1, 3), (2, 4)),
        blocks_per_slab=(5, 1, 3),
    ),
    "slabs_retained": Setup(
        (NaiveGroup(2, window=5), DRAFTING, NaiveGroup(4, mamba="align", pool=2, drafts=2)),
        idle_groups=((1, 2),),
        blocks_per_slab=(4, 1, 2),
        retention=8,
    ),
}

KINDS = (  # one of each; MLA's windows beside its full layers
    "full",
    "window",
    "window_first",
    "chunked_straddling",
    "mla",
    "mla_window",
    "rswa",
    "sink",
    "cross",
    "mamba_none",
    "mamba_align",
    "mamba_align_drafts",
)
HYBRIDS = ("hybrid", "full_chunked", "full_mamba", "full_cross", "deepseek_v4")


@dataclass
class Pair:
    """One request in both worlds."""

    request: Request
    naive: NaiveRequest
    unsettled: int = 0  # computed tokens that may be taken back

    @property
    def name(self) -> str:
        return self.request.request_id


@dataclass
class Lockstep:
    setup: Setup
    pool_sizes: list[int]
    manager: KVCacheManager = field(init=False)
    naive: NaiveManager = field(init=False)
    hasher: BlockHasher = field(init=False)
    pairs: dict[str, Pair] = field(default_factory=dict)  # running
    key_of_hash: dict[bytes, tuple] = field(default_factory=dict)  # of any block size in use

    def __post_init__(self) -> None:
        self.manager = self.setup.manager(self.pool_sizes)
        self.naive = self.setup.naive(self.pool_sizes)
        self.hasher = BlockHasher(self.setup.hash_block_size, "xxhash_cbor", seed="0")

    def new_pair(self, name: str, tokens: list[int], salt: str | None = None, **options: Any) -> Pair:
        request = Request(name, tokens, cache_salt=salt, block_hasher=self.hasher, **options)
        encoder = len(tokens) % (MAX_ENCODER + 1) if self.manager.groups.reads_encoder else 0
        origin, inserts = (request.lora, request.weight_version), not request.skip_writing_prefix_cache
        return Pair(request, NaiveRequest(name, list(tokens), salt, encoder=encoder, origin=origin, inserts=inserts))

    # -- calls

    def lookup(self, pair: Pair) -> tuple[KVCacheBlocks, int]:
        hit, length = self.manager.get_computed_blocks(pair.request)
        naive_hit, naive_length = self.naive.find_hit(pair.naive)
        assert (hit.get_block_ids(), length) == (tuple(naive_hit), naive_length)
        return hit, length

    def allocate_new(self, pair: Pair, new: int, use_hit: bool = True, external: int = 0, **options: Any) -> bool:
        hit, length = self.lookup(pair) if use_hit else (None, 0)
        external = min(external, len(pair.naive.tokens) - 1 - length)
        new = max(min(new, len(pair.naive.tokens) - length - external), 0 if external else 1)
        new = self.setup.cut(length + external, new)
        shared = self.naive.find_shared(pair.naive) if use_hit else 0
        naive_hit = [list(ids) for ids in hit.get_block_ids()] if hit is not None and length else None
        ours = self.manager.allocate_slots(
            pair.request,
            new,
            length,
            hit,
            options.get("lookahead", 0),
            external,
            options.get("delay", False),
            pair.naive.encoder,
            full_sequence_must_fit=options.get("must_fit", False),
        )
        theirs = self.naive.allocate(pair.naive, new, naive_hit, length, external=external, shared=shared, **options)
        self.compare_dealt(ours, theirs)
        if ours is None:
            return False
        self.pairs[pair.name] = pair
        self.advance(pair, length + external + new)
        return True

    def allocate_running(self, pair: Pair, new: int, **options: Any) -> bool:
        new = self.setup.cut(pair.naive.computed, new)
        ours = self.manager.allocate_slots(
            pair.request,
            new,
            num_lookahead_tokens=options.get("lookahead", 0),
            delay_cache_blocks=options.get("delay", False),
            num_in_flight_tokens=pair.unsettled,
            full_sequence_must_fit=options.get("must_fit", False),
        )
        theirs = self.naive.allocate(pair.naive, new, in_flight=pair.unsettled, **options)
        self.compare_dealt(ours, theirs)
        if ours is None:
            return False
        self.advance(pair, new)
        return True

    def plan_step(self, pairs: list[Pair], new: list[int], lookahead: int = 0, delay: bool = False) -> int:
        new = [self.setup.cut(pair.naive.computed, count) for pair, count in zip(pairs, new, strict=True)]
        rows = np.array([pair.request.row for pair in pairs], np.int64)
        result = self.manager.plan_step(
            rows,
            np.array(new, np.int64),
            num_lookahead_tokens=lookahead,
            num_in_flight_tokens=np.array([pair.unsettled for pair in pairs], np.int64),
            delay_cache_blocks=delay,
        )
        dealt: list[list[tuple[int, int, int]]] = [[] for _ in self.setup.groups]
        planned = 0
        for pair, row, count in zip(pairs, rows.tolist(), new, strict=True):
            before = [len(table) for table in self.naive.tables[pair.name]]
            theirs = self.naive.allocate(pair.naive, count, lookahead=lookahead, delay=delay, in_flight=pair.unsettled)
            if theirs is None:
                break
            for entries, first, blocks in zip(dealt, before, theirs, strict=True):
                entries += [(row, first + i, block) for i, block in enumerate(blocks)]
            planned += 1
        assert result.num_planned == planned
        for update, entries in zip(result.new_blocks, dealt, strict=True):
            ours = [update.rows.tolist(), update.columns.tolist(), update.block_ids.tolist()]
            assert ours == [list(part) for part in zip(*entries, strict=True)] if entries else ours == [[], [], []]
        for pair, count in zip(pairs[:planned], new, strict=False):
            self.advance(pair, count)
        return planned

    def advance(self, pair: Pair, count: int) -> None:
        pair.request.num_computed_tokens += count
        pair.naive.computed += count

    def take_back(self, pair: Pair, count: int) -> None:
        self.advance(pair, -count)

    def append(self, pair: Pair, tokens: list[int]) -> None:
        pair.request.append_output_token_ids(tokens)
        pair.naive.tokens += tokens

    def free(self, pair: Pair) -> None:
        self._learn_hashes(pair)
        self.manager.free(pair.request)
        self.naive.free(pair.name)
        del self.pairs[pair.name]

    def preempt(self, pair: Pair) -> None:
        self.free(pair)
        pair.request.num_computed_tokens = pair.naive.computed = pair.unsettled = 0
        pair.request.num_preemptions += 1

    # -- comparison

    def compare_dealt(self, ours: KVCacheBlocks | None, theirs: list[list[int]] | None) -> None:
        assert (ours is None) == (theirs is None), f"{ours} and {theirs}"
        if ours is not None and theirs is not None:
            assert ours.get_block_ids() == tuple(theirs)

    def compare(self) -> None:
        """The whole state of both."""
        self.manager.check_invariants()
        for pair in self.pairs.values():
            self._learn_hashes(pair)
        snapshot = self.manager.snapshot()
        naive = self.naive
        assert snapshot.block_ids == {
            name: tuple(tuple(table) for table in tables) for name, tables in naive.tables.items()
        }
        assert snapshot.num_cached_blocks == {name: tuple(counts) for name, counts in naive.cached.items()}
        assert [set(ids) for ids in snapshot.fresh_blocks] == naive.fresh
        for name, lengths in snapshot.checkpoints.items():
            assert set(lengths) - {0} == naive.checkpoints[name]
        for ours, theirs in zip(snapshot.pools, naive.pools, strict=True):
            assert list(ours.free_order) == theirs.free
            assert list(ours.ref_count) == [theirs.refs[block] for block in range(theirs.num_blocks)]
            holders = {
                (group, self.key_of_hash[block_hash]): list(blocks)
                for group, by_hash in ours.blocks_by_hash.items()
                for block_hash, blocks in by_hash.items()
            }
            assert holders == theirs.holders
        for name, pair in self.pairs.items():
            assert pair.request.token_ids.tolist() == pair.naive.tokens
            assert self.manager.get_num_common_prefix_blocks(name) == naive.common_prefix(name)

    def _learn_hashes(self, pair: Pair) -> None:
        """Which tokens each hash of the request stands for, at every block size in use."""
        hashing = self.manager.groups.hashing
        for size in {group.block_size for group in self.setup.groups}:
            for i, block_hash in enumerate(hashing.of_block_size(pair.request.block_hashes, size)):
                key = pair.naive.key((i + 1) * size)
                assert self.key_of_hash.setdefault(block_hash, key) == key
