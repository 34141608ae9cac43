"""Real model shapes of gated delta nets, for tests, benchmarks and tuning.

Source: the config.json on each model's public page (`DeltaShape.source`). Qwen: linear_num_key_heads,
linear_num_value_heads, linear_key_head_dim, linear_value_head_dim, linear_conv_kernel_dim. Kimi: num_heads, head_dim,
short_conv_kernel_size of linear_attn_config.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeltaShape:
    """One layer of a model, before tensor parallelism, which splits heads."""

    name: str
    source: str  # repository on the Hugging Face hub whose config.json says so
    key_heads: int
    value_heads: int
    key_dim: int = 128
    value_dim: int = 128
    num_taps: int = 4
    is_per_channel: bool = False  # Kimi Delta Attention: a decay for every number of the key

    def per_shard(self, num_shards: int) -> tuple[int, int]:
        """(key heads, value heads) of one of `num_shards` tensor-parallel shards; key heads are replicated beyond one.

        Raises:
            ValueError: they do not divide.
        """
        wide, narrow = max(num_shards, self.key_heads), min(num_shards, self.key_heads)
        if num_shards < 1 or self.value_heads % num_shards or wide % narrow:
            raise ValueError(
                f"{self.name}: expected shards that divide {self.value_heads} value heads and divide or are a multiple "
                f"of {self.key_heads} key heads, got {num_shards}"
            )
        return max(1, self.key_heads // num_shards), self.value_heads // num_shards

    def sizes(self, num_shards: int) -> dict[str, int]:
        """A shard's fields of a case, by name. Raises as `per_shard`."""
        key_heads, heads = self.per_shard(num_shards)
        dims = {"key_dim": self.key_dim, "value_dim": self.value_dim}
        return {"key_heads": key_heads, "heads": heads, "per_channel": int(self.is_per_channel), **dims}

    def state_shapes(self, num_shards: int = 1) -> tuple[tuple[int, int], tuple[int, int, int]]:
        """(convolution, recurrence) of one page; the convolution has q, k and v side by side."""
        key_heads, value_heads = self.per_shard(num_shards)
        channels = 2 * key_heads * self.key_dim + value_heads * self.value_dim
        return (channels, self.num_taps - 1), (value_heads, self.key_dim, self.value_dim)


class OfDeltaLayer:
    """What cases of ops over a layer's inputs have in common."""

    tokens: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    per_channel: int

    @property
    def input_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the inputs, by name."""
        of_key, of_head = (self.tokens, self.key_heads, self.key_dim), (self.tokens, self.heads)
        gates = (*of_head, self.key_dim) if self.per_channel else of_head
        return {"q": of_key, "k": of_key, "v": (*of_head, self.value_dim), "g": gates, "beta": of_head}


SHAPES = (
    DeltaShape("qwen3-next-80b-a3b", "Qwen/Qwen3-Next-80B-A3B-Instruct", 16, 32),
    DeltaShape("qwen3.5-27b", "Qwen/Qwen3.5-27B", 16, 48),
    DeltaShape("qwen3.5-397b-a17b", "Qwen/Qwen3.5-397B-A17B", 16, 64),
    DeltaShape("kimi-linear-48b-a3b", "moonshotai/Kimi-Linear-48B-A3B-Instruct", 32, 32, is_per_channel=True),
)
