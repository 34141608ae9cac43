"""What one layer's cache is, which layers share a block table, and which groups share a pool of block ids.

Flow:    model config -> KVCacheSpec per layer -> [KVCacheGroupSpec, KVCachePoolSpec, KVCacheConfig] -> managers
Source:  vLLM v1/kv_cache_interface.py (names and formulas); pools on typed arrays: DESIGN, "Pools on typed arrays"

Specs are frozen values: equal specs mean layers that one group may hold. Dtypes are names ("bfloat16").
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, field

from pallas_kernels.layouts import PageLayout, attention_layout, cdiv, dtype_bits


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec(abc.ABC):
    """Cache of one layer: `block_size` tokens a block."""

    block_size: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"expected block_size >= 1, got {self.block_size}")

    @property
    @abc.abstractmethod
    def kind(self) -> str:
        """Name of the attention kind, as KV events publish it ("full_attention", "sliding_window", ...)."""

    @property
    @abc.abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one page without any padding of a device."""

    @abc.abstractmethod
    def page_layout(self, platform: str) -> PageLayout:
        """Arrays that hold one layer's pages on `platform` ("cpu", "gpu" or "tpu")."""

    @abc.abstractmethod
    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Most blocks that one request ever holds at once (the admission cap of windowed kinds).

        `max_in_flight_tokens` is the most tokens that steps in flight may add (batches in flight times the
        token budget of a step).
        """


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Cache of K and V per head."""

    num_kv_heads: int
    head_size: int
    dtype: str
    head_size_v: int | None = None  # None: as head_size

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_kv_heads", "head_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        dtype_bits(self.dtype)

    @property
    def page_size_bytes(self) -> int:
        """K and V of `block_size` tokens over all heads."""
        dims = self.head_size + (self.head_size if self.head_size_v is None else self.head_size_v)
        return self.block_size * self.num_kv_heads * dims * dtype_bits(self.dtype) // 8

    def page_layout(self, platform: str) -> PageLayout:
        """Arrays that hold one layer's pages on `platform`."""
        return attention_layout(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            head_dim_v=self.head_size_v,
            page_size=self.block_size,
            dtype=self.dtype,
            platform=platform,
        )


@dataclass(frozen=True)
class KVCacheGroupSpec:
    """Layers that share one block table. Layer i of the group stores its pages in column i of pool `pool_id`."""

    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec
    pool_id: int = 0
    is_eagle_group: bool = False  # holds layers of a drafting head, which need the hidden states of a hit's last block


@dataclass(frozen=True)
class KVCachePoolSpec:
    """One space of block ids. Every array of every column has `num_blocks` pages; block 0 is the null block."""

    num_blocks: int
    columns: tuple[PageLayout, ...] = ()

    def __post_init__(self) -> None:
        if self.num_blocks < 2:
            raise ValueError(f"expected num_blocks >= 2 (block 0 is the null block), got {self.num_blocks}")

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block id over all columns, padding included."""
        return sum(column.page_bytes for column in self.columns)


@dataclass(frozen=True)
class KVCacheConfig:
    """All pools and groups of a deployment. Group order is the order of block tables everywhere."""

    pools: tuple[KVCachePoolSpec, ...]
    kv_cache_groups: tuple[KVCacheGroupSpec, ...]
    layer_index: dict[str, tuple[int, int]] = field(init=False, repr=False, compare=False)  # layer -> group, column

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
        object.__setattr__(self, "layer_index", index)

    @classmethod
    def single_pool(cls, num_blocks: int, *specs: KVCacheSpec) -> KVCacheConfig:
        """A config of one pool without columns and one group of one layer per spec: for host-side work and tests."""
        groups = tuple(KVCacheGroupSpec((f"layers.{i}",), spec) for i, spec in enumerate(specs))
        return cls((KVCachePoolSpec(num_blocks),), groups)


__all__ = [
    "AttentionSpec",
    "KVCacheConfig",
    "KVCacheGroupSpec",
    "KVCachePoolSpec",
    "KVCacheSpec",
    "cdiv",
]
