"""What one layer's cache is, which layers share a block table, and which groups share a pool of block ids.

Flow:    model config -> KVCacheSpec per layer -> [KVCacheGroupSpec, KVCachePoolSpec, KVCacheConfig] -> managers
Source:  vLLM v1/kv_cache_interface.py (names and formulas); ARCHITECTURE.md, "Pools on typed arrays"

Specs are frozen values: equal specs mean layers that one group may hold. Dtypes are names ("bfloat16").
"""

from __future__ import annotations

import abc
from collections.abc import Hashable
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from kvjax.core.tables.ints_or_arrays import IntOrArray, at_least
from pallas_kernels.layouts import PageLayout, attention_layout, cdiv, dtype_bits

NEVER = 1 << 60  # a token count that no request reaches


class StatePages(Protocol):
    """Where a kind whose pages are recurrent states keeps the state of each row of a block table."""

    def pages_of_states(
        self,
        table: np.ndarray,  # int32[rows, columns]
        num_blocks: np.ndarray,  # int64[rows]
        rows: np.ndarray,  # int64[S]
        num_tokens: np.ndarray,  # int64[S]
    ) -> np.ndarray:  # int32[S]
        """The page of each row's state after `num_tokens` tokens."""

    @property
    def num_drafts(self) -> int:
        """Most drafts of a step."""

    @property
    def num_speculative_blocks(self) -> int:
        """Drafts that have pages for states of their own; of others the states take in none until it is accepted."""

    def pages_of_drafts(
        self,
        table: np.ndarray,  # int32[rows, columns]
        num_blocks: np.ndarray,  # int64[rows]
        rows: np.ndarray,  # int64[S]
        num_tokens: np.ndarray,  # int64[S]
    ) -> np.ndarray:  # int32[S, num_speculative_blocks]
        """Pages for the states before the last of `num_tokens` tokens, the next to last one's in the last column.

        A state that a block is cached with is in that block's page.
        """

    def most_tokens(self, num_blocks: np.ndarray) -> np.ndarray:  # int64[S] -> int64[S]
        """Tokens that rows with `num_blocks` columns may have."""


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(abc.ABC):
    """Cache of one layer: `block_size` tokens a block. All that tells its kind from others.

    A kind of your own is a class of specs: what it adds to a base class here are the abstract methods that are left,
    and the flags that differ. `kvjax.core.kinds.registry` makes it known to saved states.
    """

    # Fields that say how a page looks or what of it is read, not which tokens it holds.
    layer_fields: ClassVar[frozenset[str]] = frozenset()
    # Whether lengths and slots of a step are those of the encoder's tokens, written when the encoder runs.
    reads_encoder: ClassVar[bool] = False
    # Fields that bound which tokens a request keeps, named as the options of attention that bound what a query sees.
    kept_fields: ClassVar[frozenset[str]] = frozenset()
    # First tokens of a request that every later one sees, whatever else is released.
    num_sink_tokens: ClassVar[int] = 0
    # Tokens of its answer that a request's next one sees beside the whole prompt, its own included; None: all.
    rswa_window: ClassVar[int | None] = None
    # Whether tokens ever leave what later ones see: then blocks are released before the request ends, and a shorter
    # prefix of a hit need not be a hit.
    forgets: ClassVar[bool] = False
    # Whether hits of some lengths need more blocks than others, and hits of other lengths none.
    hit_size_varies: ClassVar[bool] = False
    # Whether other requests may hit the blocks. Else they are never registered, and lookups pass the kind over.
    is_prefix_cacheable: ClassVar[bool] = True
    # Whether hits can drop their last block, as drafting heads (EAGLE) need it.
    supports_eagle: ClassVar[bool] = False
    # Whether a block may be spread over the ranks of context parallelism.
    supports_context_parallelism: ClassVar[bool] = False

    block_size: int  # tokens of a block

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"expected block_size >= 1, got {self.block_size}")

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """Name of the attention kind, as KV events publish it ("full_attention", "sliding_window", ...)."""

    @property
    def table_key(self) -> Hashable:
        """Layers of equal keys hold the same blocks of a request, so one block table can serve them."""
        kept = [field.name for field in fields(self) if field.name not in self.layer_fields]
        return (type(self), *(getattr(self, name) for name in kept))

    @property
    @abc.abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one page without any padding of a device."""

    @property
    @abc.abstractmethod
    def num_reserved_blocks(self) -> int:
        """Blocks that a group takes for good and no request holds."""

    @property
    @abc.abstractmethod
    def state_pages(self) -> StatePages | None:
        """Where a kind's recurrent states lie; None: pages hold tokens."""

    @property
    @abc.abstractmethod
    def entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what one entry of a page is made of: K and V [heads, dim], or a latent [dim]; () of states."""

    @property
    @abc.abstractmethod
    def tokens_per_state(self) -> int:
        """Tokens that one entry of a page stands for; more than 1 in compressed caches."""

    @abc.abstractmethod
    def page_layout(self, platform: str, num_shards: int = 1) -> PageLayout:
        """Arrays that hold one layer's pages on `platform` ("cpu", "gpu" or "tpu"), heads over `num_shards` devices."""

    @abc.abstractmethod
    def skipped_tokens(self, num_computed_tokens: IntOrArray) -> IntOrArray:
        """Leading tokens that no token after the first `num_computed_tokens` attends to, but for those kept."""

    @abc.abstractmethod
    def tokens_until_skipped(self, num_tokens: IntOrArray) -> IntOrArray:
        """Fewest computed tokens at which the first `num_tokens` are skipped (or `NEVER`)."""

    @abc.abstractmethod
    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Most blocks that one request ever holds at once (the admission cap of windowed kinds).

        `max_in_flight_tokens` is the most tokens that steps in flight may add (batches in flight times the
        token budget of a step).
        """


@dataclass(frozen=True, kw_only=True)
class WholeSequenceSpec(KVCacheSpec):
    """A kind whose tokens all stay visible, so that a request holds its blocks until it ends."""

    def skipped_tokens(self, num_computed_tokens: IntOrArray) -> IntOrArray:
        """None."""
        return num_computed_tokens * 0

    def tokens_until_skipped(self, num_tokens: IntOrArray) -> IntOrArray:
        """`NEVER`."""
        return num_tokens * 0 + NEVER


@dataclass(frozen=True, kw_only=True)
class WindowedSpec(KVCacheSpec):
    """A kind whose token n sees the last `sliding_window` tokens, its own included.

    tokens   0 ............ n-W | n-W+1 ................ n-1 | n
             skipped: n - W + 1 | W - 1 tokens that a hit needs
    """

    forgets: ClassVar[bool] = True

    sliding_window: int  # tokens that a query sees, its own included

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sliding_window < 1:
            raise ValueError(f"expected sliding_window >= 1, got {self.sliding_window}")

    def skipped_tokens(self, num_computed_tokens: IntOrArray) -> IntOrArray:
        """Tokens before the window of the next token."""
        return at_least(num_computed_tokens - (self.sliding_window - 1), 0)

    def tokens_until_skipped(self, num_tokens: IntOrArray) -> IntOrArray:
        """Computed tokens whose next one has a window behind them."""
        return num_tokens + (self.sliding_window - 1)


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Cache of K and V per head."""

    layer_fields: ClassVar[frozenset[str]] = frozenset({"num_kv_heads", "head_size", "head_size_v", "dtype"})
    sink_len: ClassVar[int] = 0  # tokens of the layer's own that stand before a request's, in reserved blocks

    num_kv_heads: int
    head_size: int  # numbers of a key
    dtype: str  # name of the pages' dtype, such as "bfloat16"
    head_size_v: int | None = None  # numbers of a value; None: as head_size

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        dtype_bits(self.dtype)

    @property
    def num_reserved_blocks(self) -> int:
        """Blocks of the sinks."""
        return self.sink_len // self.block_size

    @property
    def state_pages(self) -> None:
        """None: pages hold tokens."""
        return

    @property
    def entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        """K and V of one token."""
        dims_v = self.head_size if self.head_size_v is None else self.head_size_v
        return ((self.num_kv_heads, self.head_size), (self.num_kv_heads, dims_v))

    @property
    def tokens_per_state(self) -> int:
        """1."""
        return 1

    @property
    def page_size_bytes(self) -> int:
        """K and V of `block_size` tokens over all heads."""
        dims = self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)
        return self.block_size * self.num_kv_heads * dims * dtype_bits(self.dtype) // 8

    def page_layout(self, platform: str, num_shards: int = 1) -> PageLayout:
        """Arrays that hold one layer's pages on `platform`, KV heads over `num_shards` devices."""
        return attention_layout(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            head_dim_v=self.head_size_v,
            page_size=self.block_size,
            dtype=self.dtype,
            platform=platform,
            num_shards=num_shards,
        )


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table. Layer i of the group stores its pages in column i of pool `pool_id`.

    `kv_cache_spec` says which tokens the table holds. Where the layers' pages or masks differ, `layer_specs` has the
    spec of each, all of the group's `table_key`.
    """

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec  # of the block table
    pool_id: int = 0  # place in `KVCacheConfig.pools`
    is_eagle_group: bool = False  # holds layers of a drafting head, which need the hidden states of a hit's last block
    layer_specs: tuple[KVCacheSpec, ...] = ()  # empty: all layers are as `kv_cache_spec`

    def __post_init__(self) -> None:
        if self.layer_specs and len(self.layer_specs) != len(self.layer_names):
            raise ValueError(f"expected {len(self.layer_names)} layer_specs or none, got {len(self.layer_specs)}")
        for name, spec in zip(self.layer_names, self.layer_specs, strict=False):
            if spec.table_key != self.kv_cache_spec.table_key:
                raise ValueError(
                    f"layer {name!r}: expected a spec that holds the same blocks as {self.kv_cache_spec}, got {spec}; "
                    "give the layer a group of its own"
                )

    def spec_of(self, place: int) -> KVCacheSpec:
        """Spec of the group's layer number `place`."""
        return self.layer_specs[place] if self.layer_specs else self.kv_cache_spec

    @cached_property
    def tokens_per_state(self) -> frozenset[int]:
        """Tokens of a state in each layer; layers may differ."""
        return frozenset(spec.tokens_per_state for spec in self.layer_specs or (self.kv_cache_spec,))


@dataclass(frozen=True)
class KVCachePoolSpec:
    """One space of block ids. Every array of every column has `num_blocks` pages; block 0 is the null block."""

    num_blocks: int  # the null block included
    columns: tuple[PageLayout, ...] = ()  # the arrays of each column; empty where nothing runs on a device

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ValueError(f"expected num_blocks >= 2 (block 0 is the null block), got {self.num_blocks}")

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block id over all columns, padding included."""
        return sum(column.page_bytes for column in self.columns)


@dataclass(frozen=True)
class SlabSpec:
    """One memory for all pools, in slabs that each hold blocks of one pool at a time; slab 0 has the null blocks."""

    num_slabs: int  # slab 0 included
    blocks_per_slab: tuple[int, ...]  # per pool

    def __post_init__(self) -> None:
        if self.num_slabs < 2:
            raise ValueError(f"expected num_slabs >= 2 (slab 0 has the null blocks), got {self.num_slabs}")
        if min(self.blocks_per_slab, default=0) < 1:
            raise ValueError(f"expected blocks_per_slab >= 1 of each pool, got {self.blocks_per_slab}")


@dataclass(frozen=True)
class KVCacheConfig:
    """All pools and groups of a deployment. Group order is the order of block tables everywhere.

    A layer of `shared_layers` has no pages of its own: it reads those that the layer named beside it writes.
    """

    pools: tuple[KVCachePoolSpec, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    shared_layers: tuple[tuple[str, str], ...] = ()  # (layer, the layer whose pages it reads)
    slabs: SlabSpec | None = None  # None: every pool has all of its blocks to itself
    # (a group of states that requests run on, the group that caches them in fewer bits), layer by layer
    idle_groups: tuple[tuple[int, int], ...] = ()
    layer_index: dict[str, tuple[int, int]] = field(
        init=False, repr=False, compare=False
    )  # of the model -> group, column

    def __post_init__(self) -> None:
        if not self.kv_cache_groups:
            raise ValueError("expected at least one KV-cache group, got none")
        index: dict[str, tuple[int, int]] = {}
        for group_id, group in enumerate(self.kv_cache_groups):
            if not 0 <= group.pool_id < len(self.pools):
                raise ValueError(f"group {group_id}: expected pool_id in [0, {len(self.pools)}), got {group.pool_id}")
            for column, name in enumerate(group.layer_names):
                if name in index:
                    raise ValueError(f"layer {name!r} is in groups {index[name][0]} and {group_id}; expected one group")
                index[name] = (group_id, column)
        owners = dict(index)
        for name, owner in self.shared_layers:
            if name in index:
                raise ValueError(f"layer {name!r} shares the pages of {owner!r}; expected it in no group")
            if owner not in owners:
                raise ValueError(f"layer {name!r}: expected to share the pages of a layer in a group, got {owner!r}")
            index[name] = owners[owner]
        idle = {group_id for _, group_id in self.idle_groups}
        object.__setattr__(self, "layer_index", {name: at for name, at in index.items() if at[0] not in idle})
        self._check_columns()
        self._check_idle_groups()
        if self.slabs is not None:
            sizes = tuple(self.slabs.num_slabs * count for count in self.slabs.blocks_per_slab)
            given = tuple(pool.num_blocks for pool in self.pools)
            if sizes != given:
                raise ValueError(f"expected pools of {sizes} blocks to fill {self.slabs}, got {given}")

    def _check_columns(self) -> None:
        """Groups can share the arrays of a pool only if layer i of each has the same pages, for every i."""
        owners: dict[tuple[int, int], tuple[KVCacheGroupSpec, str]] = {}
        for group in self.kv_cache_groups:
            columns = self.pools[group.pool_id].columns
            if not columns:
                continue  # no arrays: ids alone may be shared by anything
            platform = columns[0].platform
            for place, name in enumerate(group.layer_names):
                owner, owner_name = owners.setdefault((group.pool_id, place), (group, name))
                both = (owner.spec_of(place), group.spec_of(place))
                if owner is not group and both[0].page_layout(platform) != both[1].page_layout(platform):
                    raise ValueError(
                        f"layers {owner_name!r} and {name!r} cannot share column {place} of pool {group.pool_id}: "
                        f"expected equal pages, got those of {both[0]} and {both[1]}; "
                        "give one group a pool of its own"
                    )

    def _check_idle_groups(self) -> None:
        """Raises ValueError unless both groups of every pair hold states of equally many layers."""
        for pair in self.idle_groups:
            if not all(0 <= group_id < len(self.kv_cache_groups) for group_id in pair):
                raise ValueError(f"expected idle_groups in [0, {len(self.kv_cache_groups)}), got {pair}")
            running, idle = (self.kv_cache_groups[group_id] for group_id in pair)
            if running.kv_cache_spec.state_pages is None or idle.kv_cache_spec.state_pages is None:
                raise ValueError(f"expected groups of recurrent states as idle_groups, got {pair}")
            sizes = [(len(group.layer_names), group.kv_cache_spec.block_size) for group in (running, idle)]
            if sizes[0] != sizes[1]:
                raise ValueError(f"idle_groups {pair}: expected equal numbers of layers and block sizes, got {sizes}")

    @classmethod
    def single_pool(cls, num_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
        """A config of one pool without columns and one group of one layer per spec: for host-side work and tests."""
        groups = tuple(KVCacheGroupSpec((f"layers.{i}",), spec) for i, spec in enumerate(specs))
        return cls((KVCachePoolSpec(num_blocks),), groups)


__all__ = [
    "NEVER",
    "AttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCachePoolSpec",
    "KVCacheSpec",
    "SlabSpec",
    "StatePages",
    "WholeSequenceSpec",
    "WindowedSpec",
    "cdiv",
]
