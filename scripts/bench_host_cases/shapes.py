"""Groups of layers that decoding cases have: every kind of attention alone, and models of several groups.

Request i starts from `prompt + i mod spread` tokens, so that every step fills blocks of some requests; spread is the
largest block size. Prompts reach past the windows that release.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any

from kvjax.core import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCachePoolSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

BLOCK_SIZE = 16
NUM_STEPS = 64
WARM_UP_STEPS = 2
VOCABULARY = 150_000
NUM_ENCODER_TOKENS = 1_500  # 30 s of audio
HEADS: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
FULL = FullAttentionSpec(**HEADS)
SLIDING = SlidingWindowSpec(sliding_window=1_024, **HEADS)
CROSS = CrossAttentionSpec(
    block_size=16, num_kv_heads=20, head_size=64, dtype="bfloat16", max_num_encoder_tokens=NUM_ENCODER_TOKENS
)
STATE = MambaSpec(
    block_size=16, shapes=((3, 8_192), (8_192, 16)), dtypes=("bfloat16", "float32"), mamba_cache_mode="align"
)


def latent_window(block_size: int, window: int, **options: Any) -> SlidingWindowMLASpec:
    return SlidingWindowMLASpec(block_size=block_size, sliding_window=window, **options)


DEEPSEEK_V4 = (
    MLAAttentionSpec(block_size=256, head_size=512, dtype="bfloat16", tokens_per_state=4),
    latent_window(64, 128, head_size=512, dtype="bfloat16"),
    latent_window(4, 8, head_size=2_048, dtype="float32"),  # states of the compressor of ratio 4
    latent_window(8, 128, head_size=1_024, dtype="float32"),  # and of ratio 128
)


@dataclass(frozen=True)
class Shape:
    """Groups, in one pool or in one each, and the tokens that requests start from."""

    specs: tuple[KVCacheSpec, ...]
    prompt: int = 1_024
    pools_apart: bool = False

    @property
    def spread(self) -> int:
        return max(spec.block_size for spec in self.specs)

    @property
    def hash_block_size(self) -> int:
        return gcd(*(spec.block_size for spec in self.specs))

    @property
    def most_tokens(self) -> int:
        return self.prompt + self.spread + WARM_UP_STEPS + NUM_STEPS

    @property
    def num_encoder_tokens(self) -> int:
        return NUM_ENCODER_TOKENS if any(isinstance(spec, CrossAttentionSpec) for spec in self.specs) else 0

    def config(self, num_requests: int) -> KVCacheConfig:
        """Pools so large that no step of a case evicts a cached block: those are the pool's cases."""
        sizes = self.group_blocks(num_requests)
        if not self.pools_apart:
            return KVCacheConfig.single_pool(sum(sizes), *self.specs)
        groups = tuple(KVCacheGroupSpec((f"layers.{i}",), spec, pool_id=i) for i, spec in enumerate(self.specs))
        return KVCacheConfig(tuple(KVCachePoolSpec(size) for size in sizes), groups)

    def group_blocks(self, num_requests: int) -> list[int]:
        """Blocks for each group, the null block and a sink included."""
        return [
            2 + num_requests * self._blocks_of_request(spec) + self.most_tokens // spec.block_size
            for spec in self.specs
        ]

    def _blocks_of_request(self, spec: KVCacheSpec) -> int:
        if isinstance(spec, CrossAttentionSpec):
            return -(-NUM_ENCODER_TOKENS // spec.block_size)
        seen = min(window_of(spec) or self.prompt, self.prompt)
        return (seen + self.spread + WARM_UP_STEPS + NUM_STEPS) // spec.block_size + 3


def window_of(spec: KVCacheSpec) -> int | None:
    """Tokens whose blocks a request keeps; None: all, or all within these prompts."""
    return 2 if isinstance(spec, MambaSpec) else getattr(spec, "sliding_window", None)


SHAPES = {
    "full": Shape((FULL,)),
    "hybrid": Shape((FULL, *[SLIDING] * 5), prompt=2_048),
    "mla": Shape((MLAAttentionSpec(block_size=16, head_size=576, dtype="bfloat16"),)),
    "chunked": Shape((ChunkedLocalAttentionSpec(attention_chunk_size=8_192, **HEADS),)),
    "sink": Shape((SinkFullAttentionSpec(sink_len=16, **HEADS),)),
    "cross": Shape((CROSS,)),
    "mamba_align": Shape((STATE,)),
    "deepseek_v4": Shape(DEEPSEEK_V4, pools_apart=True),
}
