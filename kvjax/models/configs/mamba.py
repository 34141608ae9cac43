"""Sizes of Mamba layers. No jax.

Flow:    a family's config -> [Mamba1Config] -> layers.mamba, StateShapes
Source:  Mamba (arXiv 2312.00752)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.models.configs.states import StateShapes


@dataclass(frozen=True, kw_only=True)
class Mamba1Config:
    """One recurrence per channel."""

    num_channels: int
    state_dim: int
    num_taps: int  # inputs of the convolution, the token's own included
    dt_rank: int
    conv_bias: bool
    proj_bias: bool

    @property
    def state(self) -> StateShapes:
        """The last inputs of the convolution, the recurrence; both in the model's dtype, as in vLLM."""
        shapes = ((self.num_channels, self.num_taps - 1), (self.num_channels, self.state_dim))
        return StateShapes(shapes, (None, None))
