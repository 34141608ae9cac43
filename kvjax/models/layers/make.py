"""Makes the parameters of a model's layers in one dtype, from one stream of random numbers.

Flow:    dtype, rngs -> [Make] -> Linear, RMSNorm, embeddings, raw parameters
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.decoder import DecoderConfig
from kvjax.models.layers.linear import Linear
from kvjax.models.layers.norm import LayerNorm, RMSNorm


@dataclass(frozen=True)
class Make:
    """What every layer's constructor needs to make its parameters."""

    dtype: jnp.dtype
    rngs: nnx.Rngs

    def linear(
        self, in_size: int, out_size: int, *, bias: bool = False, split: str | None = None, units: int | None = None
    ) -> Linear:
        """A projection [in_size, out_size] whose random weights keep the variance of their input."""
        init = nnx.initializers.normal(in_size**-0.5)
        return Linear(
            in_size,
            out_size,
            use_bias=bias,
            param_dtype=self.dtype,
            kernel_init=init,
            rngs=self.rngs,
            split=split,
            units=units,
        )

    def columns(self, in_size: int, out_size: int, *, bias: bool = False, units: int | None = None) -> Linear:
        """A projection whose outputs are split over devices, `units` of them (heads) whole."""
        return self.linear(in_size, out_size, bias=bias, split="columns", units=units)

    def rows(self, in_size: int, out_size: int, *, bias: bool = False, units: int | None = None) -> Linear:
        """A projection whose inputs are split over devices."""
        return self.linear(in_size, out_size, bias=bias, split="rows", units=units)

    def norm(self, size: int, *, eps: float, offset: float = 0.0) -> RMSNorm:
        """An RMSNorm over `size` dimensions."""
        return RMSNorm(size, eps=eps, offset=offset, dtype=self.dtype)

    def hidden_norm(self, config: DecoderConfig) -> RMSNorm | LayerNorm:
        """A norm of hidden states, as the model has them."""
        if config.centres_norms:
            return LayerNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=self.dtype, has_bias=False)
        return self.norm(config.hidden_size, eps=config.rms_norm_eps, offset=config.norm_offset)

    def head_norm(self, num_heads: int, size: int, *, eps: float) -> LayerNorm:
        """A LayerNorm over `size` dimensions of a head, without bias, with weights for each of `num_heads`."""
        return LayerNorm(size, eps=eps, dtype=self.dtype, has_bias=False, num_heads=num_heads)

    def layer_norm(self, size: int, *, eps: float) -> LayerNorm:
        """A LayerNorm over `size` dimensions."""
        return LayerNorm(size, eps=eps, dtype=self.dtype)

    def embedding(self, num_rows: int, size: int) -> nnx.Embed:
        """A table of `num_rows` vectors."""
        init = nnx.initializers.normal(size**-0.5)
        return nnx.Embed(num_rows, size, param_dtype=self.dtype, embedding_init=init, rngs=self.rngs)

    def param(self, *shape: int, scale: float = 1.0) -> nnx.Param[jax.Array]:
        """A parameter of normal random numbers times `scale`."""
        return nnx.Param(scale * jax.random.normal(self.rngs.params(), shape, self.dtype))

    def zeros(self, *shape: int) -> nnx.Param[jax.Array]:
        """A parameter of zeros."""
        return nnx.Param(jnp.zeros(shape, self.dtype))

    def ones(self, *shape: int) -> nnx.Param[jax.Array]:
        """A parameter of ones."""
        return nnx.Param(jnp.ones(shape, self.dtype))

    def float32_zeros(self, *shape: int) -> nnx.Param[jax.Array]:
        """A parameter of zeros that stays in float32 whatever the dtype of the others."""
        return nnx.Param(jnp.zeros(shape, jnp.float32))

    def float32_normal(self, *shape: int, scale: float = 1.0) -> nnx.Param[jax.Array]:
        """As `param`, in float32 whatever the dtype of the others."""
        return nnx.Param(scale * jax.random.normal(self.rngs.params(), shape, jnp.float32))
