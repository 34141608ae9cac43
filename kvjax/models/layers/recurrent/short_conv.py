"""The gated short convolution of LFM2, a layer that remembers the last few tokens and nothing before them.

Flow:    hidden[T, d] -> b, c, x -> convolution of b * x -> [ShortConv] -> hidden[T, d]
Source:  LFM2 Technical Report (arXiv 2511.23404)

A layer's states are one array: the last inputs of the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
from flax import nnx

from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.convolution import CausalConv
from kvjax.models.tensor_sources import Part, TensorSource


class ShortConv(nnx.Module):
    """`out(c * conv(b * x))`, where b, c and x are projections of the layer's input."""

    def __init__(self, size: int, num_taps: int, layer: int, *, bias: bool, make: Make) -> None:
        self.b_in = make.columns(size, size, bias=bias)
        self.c_in = make.columns(size, size, bias=bias)
        self.x_in = make.columns(size, size, bias=bias)
        self.conv = CausalConv(size, num_taps, bias=bias, make=make, activation=None)
        self.out_proj = make.rows(size, size, bias=bias)
        self.layer_name = f"layers.{layer}"

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """b, c and x are one projection of the checkpoint."""
        size = self.b_in.out_features
        sources: dict[str, TensorSource] = {}
        for place, name in enumerate(("b_in", "c_in", "x_in")):
            sources[f"{name}.kernel"] = Part("in_proj.weight", place * size, 3 * size)
            sources[f"{name}.bias"] = Part("in_proj.bias", place * size, 3 * size, transposed=False)
        return sources

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """The layer's output, without residual."""
        convolved = self.conv(self.b_in(hidden) * self.x_in(hidden), self.layer_name, step.cache)
        return self.out_proj(self.c_in(hidden) * convolved)
