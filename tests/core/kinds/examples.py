"""Specs of every kind, small, for suites that run over all of them; and a kind of a user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.core import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    register_kv_cache_spec,
)
from kvjax.core.kinds.recurrent_spec import RecurrentSpec
from kvjax.core.kinds.ring_state import RingStateSpec
from kvjax.core.kinds.unshared import ReplayedWindowMLASpec, RequestBufferSpec, RunningStateSpec
from kvjax.core.tables.ints_or_arrays import IntOrArray

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
LATENT: dict[str, Any] = {"head_size": 8, "dtype": "float32"}
STATE: dict[str, Any] = {"shapes": ((4, 2), (3,)), "dtypes": ("float32", "bfloat16")}


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class HalfAttentionSpec(AttentionSpec):
    """A user's own kind: token n sees the later half of what came before, tokens n // 2 to n.

    What a user writes: its name, what is skipped, how many blocks that leaves, and what the kind supports.
    """

    forgets: ClassVar[bool] = True
    supports_context_parallelism: ClassVar[bool] = True
    supports_eagle: ClassVar[bool] = True

    @property
    def kind(self) -> str:
        return "half_attention"

    def skipped_tokens(self, num_computed_tokens: IntOrArray) -> IntOrArray:
        return num_computed_tokens // 2

    def tokens_until_skipped(self, num_tokens: IntOrArray) -> IntOrArray:
        return 2 * num_tokens

    def max_blocks_per_request(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        unseen = max(max_model_len - max_in_flight_tokens, 0) // 2
        return -(-max_model_len // self.block_size) - max(unseen // self.block_size - 1, 0)


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class DeltaRuleSpec(RecurrentSpec):
    """A user's own recurrent kind: a matrix of `size` by `size` a head, and its name."""

    supports_eagle: ClassVar[bool] = True

    num_heads: int
    size: int

    @property
    def kind(self) -> str:
        return "delta_rule"

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        return ((self.num_heads, self.size, self.size),)

    @property
    def state_dtypes(self) -> tuple[str, ...]:
        return ("float32",)


EXAMPLES: dict[str, KVCacheSpec] = {
    "full": FullAttentionSpec(block_size=4, **HEADS),
    "full_promoted": FullAttentionSpec(block_size=2, sliding_window=6, **HEADS),
    "window": SlidingWindowSpec(block_size=2, sliding_window=7, **HEADS),
    "window_1": SlidingWindowSpec(block_size=4, sliding_window=1, **HEADS),
    "window_first": SlidingWindowSpec(block_size=2, sliding_window=5, num_sink_tokens=3, **HEADS),
    "chunked": ChunkedLocalAttentionSpec(block_size=2, attention_chunk_size=8, **HEADS),
    "chunked_straddling": ChunkedLocalAttentionSpec(block_size=4, attention_chunk_size=6, **HEADS),
    "mla": MLAAttentionSpec(block_size=4, tokens_per_state=2, **LATENT),
    "mla_window": SlidingWindowMLASpec(block_size=2, sliding_window=5, **LATENT),
    "rswa": RSWASpec(block_size=2, rswa_window=5, **HEADS),
    "sink": SinkFullAttentionSpec(block_size=2, sink_len=4, **HEADS),
    "cross": CrossAttentionSpec(block_size=2, max_num_encoder_tokens=7, **HEADS),
    "mamba_none": MambaSpec(block_size=2, num_speculative_blocks=1, **STATE),
    "mamba_align": MambaSpec(block_size=4, mamba_cache_mode="align", **STATE),
    "mamba_drafts": MambaSpec(block_size=2, mamba_cache_mode="align", num_speculative_blocks=2, **STATE),
    "ring": RingStateSpec.of(
        MambaSpec(block_size=4, mamba_cache_mode="align", token_shapes=((4,),), token_dtypes=("float32",), **STATE),
        ring_tokens=3,
        num_drafts=2,
    ),
    "buffer": RequestBufferSpec(block_size=4, num_bytes=12),
    "running": RunningStateSpec(block_size=4, num_speculative_blocks=1, **STATE),
    "mla_window_replayed": ReplayedWindowMLASpec(block_size=2, sliding_window=5, **LATENT),
    "own": HalfAttentionSpec(block_size=2, **HEADS),
    "own_recurrent": DeltaRuleSpec(
        block_size=4, num_heads=2, size=3, mamba_cache_mode="align", num_speculative_blocks=1
    ),
}
