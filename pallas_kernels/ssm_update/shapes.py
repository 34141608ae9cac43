"""Real model shapes of Mamba layers, for tests, benchmarks and tuning.

Source: the config.json on each model's public page (`SsmShape.source`). Jamba (Mamba 1): mamba_expand * hidden_size
channels, mamba_d_state, mamba_d_conv. Mamba 2: num_heads, head_dim, state_size, n_groups, conv_kernel; in the files of
state-spaces d_model 2560 with the code's defaults (expand 2, headdim 64, d_state 128, ngroups 1, d_conv 4).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SsmShape:
    """One Mamba layer of a model, before tensor parallelism, which splits heads (and groups where there are more)."""

    name: str
    source: str  # repository on the Hugging Face hub whose config.json says so
    num_heads: int  # Mamba 1: channels
    state_dim: int
    head_dim: int | None = None  # None: Mamba 1
    num_groups: int = 1
    num_taps: int = 4

    def per_shard(self, num_shards: int) -> tuple[int, int]:
        """(heads, groups) of one of `num_shards` tensor-parallel shards; groups are replicated beyond one.

        Raises:
            ValueError: they do not divide.
        """
        wide, narrow = max(num_shards, self.num_groups), min(num_shards, self.num_groups)
        if num_shards < 1 or self.num_heads % num_shards or wide % narrow:
            raise ValueError(
                f"{self.name}: expected shards that divide {self.num_heads} heads and divide or are a multiple of "
                f"{self.num_groups} groups, got {num_shards}"
            )
        return self.num_heads // num_shards, max(1, self.num_groups // num_shards)

    def state_shapes(self, num_shards: int = 1) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(convolution, scan) of one page. Mamba 2 convolves b and c of its groups as well."""
        heads, groups = self.per_shard(num_shards)
        if self.head_dim is None:
            return (heads, self.num_taps - 1), (heads, self.state_dim)
        channels = heads * self.head_dim + 2 * groups * self.state_dim
        return (channels, self.num_taps - 1), (heads, self.head_dim, self.state_dim)


SHAPES = (
    SsmShape("jamba-1.5-mini", "ai21labs/AI21-Jamba-1.5-Mini", 8192, 16),
    SsmShape("jamba-1.5-large", "ai21labs/AI21-Jamba-1.5-Large", 16384, 16),
    SsmShape("mamba2-2.7b", "state-spaces/mamba2-2.7b", 80, 128, 64),
    SsmShape("mamba-codestral-7b", "mistralai/Mamba-Codestral-7B-v0.1", 128, 128, 64, num_groups=8),
)
