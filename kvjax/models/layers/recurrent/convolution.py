"""The short convolution of recurrent layers, whose state is its last inputs.

Flow:    x[T, C] -> cache.update_states -> [CausalConv] -> [T, C]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from kvjax.device import convolve_states
from kvjax.models.layers.make import Make
from kvjax.models.tensor_sources import TensorSource, Whole


class CausalConv(nnx.Module):
    """Every channel over its last `num_taps` inputs, then SiLU, or nothing where `activation` is None."""

    def __init__(
        self, num_channels: int, num_taps: int, *, bias: bool, make: Make, activation: str | None = "silu"
    ) -> None:
        self.weight = make.param(num_channels, num_taps, scale=num_taps**-0.5)
        self.bias = make.zeros(num_channels) if bias else None
        self.activation = activation

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """By channel."""
        num_channels = self.weight.shape[0]
        return {"weight": (0, num_channels), "bias": (0, num_channels)}

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """The weight as torch has it: channels, inputs of a channel (one), taps."""
        num_channels, num_taps = self.weight.shape
        return {"weight": Whole("weight", shape=(num_channels, 1, num_taps))}

    def __call__(self, x: jax.Array, layer_name: str, cache: Any, *, array: int = 0) -> jax.Array:  # [T, C] -> [T, C]
        """The convolution, from and to the layer's array of states number `array`."""
        bias = None if self.bias is None else self.bias[...]
        return convolve_states(cache, layer_name, x, self.weight[...], bias, activation=self.activation, array=array)
