"""Sizes of gated delta nets and of Kimi Delta Attention. No jax.

Flow:    a family's config -> [DeltaConfig, KimiDeltaConfig] -> layers.delta, StateShapes
Source:  Gated DeltaNet (arXiv 2412.06464); Kimi Linear (arXiv 2510.26692)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core.spec import cdiv
from kvjax.models.configs.states import StateShapes

MOST_COLUMNS = 128  # of a head's matrix in a state


@dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """Value head h goes with key head `h // (num_value_heads / num_key_heads)`."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int  # inputs of the convolution, the token's own included
    rule_dtype: str | None = None  # of the rule's state; None: the model's
    most_written: float = 1.0  # of the difference between a value and what its key reads

    def __post_init__(self) -> None:
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"expected linear_num_key_heads that divide {self.num_value_heads} value heads, "
                f"got {self.num_key_heads}"
            )

    @property
    def key_size(self) -> int:
        """Numbers of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Numbers of all value heads."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """What is convolved: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def state(self) -> StateShapes:
        """The last inputs of the convolution, a matrix per value head; a token adds its key, delta and decay.

        Columns of a matrix never meet: one of more than 128 columns lies as several, whose rows are lanes of a TPU.
        """
        parts = cdiv(self.value_dim, MOST_COLUMNS)
        if self.value_dim % parts:
            parts = 1
        heads, columns = self.num_value_heads * parts, self.value_dim // parts
        return StateShapes(
            ((self.num_channels, self.num_taps - 1), (heads, self.key_dim, columns)),
            (None, self.rule_dtype),
            lane_arrays=(1,),
            num_units=self.num_key_heads,
            token_shapes=((self.num_key_heads, self.key_dim), (heads, columns), (heads,)),
            token_dtypes=(None, None, "float32"),
        )


@dataclass(frozen=True, kw_only=True)
class KimiDeltaConfig:
    """As many heads of queries, keys and values, each of `head_dim` numbers."""

    num_heads: int
    head_dim: int
    num_taps: int  # inputs of a convolution, the token's own included

    @property
    def size(self) -> int:
        """Numbers of all heads."""
        return self.num_heads * self.head_dim

    @property
    def state(self) -> StateShapes:
        """The last inputs of the three convolutions, a matrix per head; that in float32, as in vLLM.

        A token adds its key, delta and decays.
        """
        convolution, numbers = (self.size, self.num_taps - 1), (self.num_heads, self.head_dim)
        return StateShapes(
            (*[convolution] * 3, (*numbers, self.head_dim)),
            (None, None, None, "float32"),
            lane_arrays=(3,),
            num_units=self.num_heads,
            token_shapes=(numbers, numbers, numbers),
            token_dtypes=(None, None, None),
        )
