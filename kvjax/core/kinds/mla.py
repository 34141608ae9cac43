"""Multi-head latent attention: one vector per token (or per several tokens) that all heads read.

Source:  vLLM v1/kv_cache_interface.py (MLAAttentionSpec, SlidingWindowMLASpec); managed as full and as window

A block of `block_size` tokens holds `block_size // tokens_per_state` vectors: compressed caches keep one for several
tokens. Keys and values are one vector, so there is no second array for values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.registry import register_kv_cache_spec
from kvjax.core.spec import KVCacheSpec, WholeSequenceSpec, WindowedSpec, cdiv
from pallas_kernels.layouts import PageLayout, dtype_bits, latent_layout


@dataclass(frozen=True, kw_only=True)
class LatentSpec(KVCacheSpec):
    """`head_size` numbers of `dtype` for every `tokens_per_state` tokens."""

    layer_fields: ClassVar[frozenset[str]] = frozenset({"head_size", "dtype", "tokens_per_state", "page_alignment"})

    head_size: int
    dtype: str
    tokens_per_state: int = 1
    page_alignment: int = 1  # bytes; a page is a multiple of it
    cache_role: str = "latent"  # layers of another role never share a block table with these

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("head_size", "tokens_per_state", "page_alignment"):
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        if self.block_size % self.tokens_per_state:
            raise ValueError(
                f"expected tokens_per_state to divide the block size {self.block_size}, got {self.tokens_per_state}"
            )
        dtype_bits(self.dtype)

    @property
    def states_per_block(self) -> int:
        """Vectors in a page."""
        return self.block_size // self.tokens_per_state

    @property
    def num_reserved_blocks(self) -> int:
        """None."""
        return 0

    @property
    def state_pages(self) -> None:
        """None: pages hold tokens, or vectors that stand for several."""
        return

    @property
    def entry_shapes(self) -> tuple[tuple[int, ...], ...]:
        """One vector."""
        return ((self.head_size,),)

    @property
    def page_size_bytes(self) -> int:
        """The vectors of a page, rounded up to `page_alignment`."""
        num_bytes = self.states_per_block * self.head_size * dtype_bits(self.dtype) // 8
        return cdiv(num_bytes, self.page_alignment) * self.page_alignment

    def page_layout(self, platform: str, num_shards: int = 1) -> PageLayout:
        """The array that holds one layer's pages on `platform`, whole on each of `num_shards` devices.

        `page_alignment` is for stacks that lay out bytes.
        """
        return latent_layout(
            head_dim=self.head_size, page_size=self.states_per_block, dtype=self.dtype, platform=platform
        )


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(WholeSequenceSpec, LatentSpec):
    """Latent vectors of every token. `sliding_window` is the mask of a promoted window."""

    layer_fields: ClassVar[frozenset[str]] = LatentSpec.layer_fields | {"sliding_window"}
    supports_context_parallelism: ClassVar[bool] = True
    supports_eagle: ClassVar[bool] = True

    sliding_window: int | None = None  # mask of a promoted window

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "mla_attention"

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Blocks of a request of `max_model_len` tokens."""
        return cdiv(max_model_len, self.block_size)


@dataclass(frozen=True, kw_only=True)
class LatentWindowSpec(WindowedSpec, LatentSpec):
    """Latent vectors of the last `sliding_window` tokens; who may hit them, subclasses say."""

    kept_fields: ClassVar[frozenset[str]] = frozenset({"sliding_window"})
    supports_eagle: ClassVar[bool] = True

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """As of `SlidingWindowSpec`."""
        tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return cdiv(tokens, self.block_size) + 1


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(LatentWindowSpec):
    """A window that is cached as `SlidingWindowSpec` is."""

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "sliding_window_mla"
