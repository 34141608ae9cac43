"""A projection that knows how it is split over devices, and may keep its weights in eight bits.

Flow:    x[..., in] -> [Linear] -> [..., out]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


class Linear(nnx.Linear):
    """`split` is "columns" (outputs), "rows" (inputs) or None (whole on every device).

    `units` things (heads, say) must stay whole: where devices do not divide them, so does the projection. After
    `keep_quantised` its kernel is of eight bits, and `kernel_scale` float32[in / rows, out / columns] says what blocks
    of it are multiplied by.
    """

    def __init__(self, in_size: int, out_size: int, *, split: str | None, units: int | None, **kwargs: Any) -> None:
        super().__init__(in_size, out_size, **kwargs)
        self.split = split
        self.units = units
        self.kernel_scale: nnx.Param[jax.Array] | None = None
        self.kernel_block: tuple[int, int] | None = None

    def param_splits(self) -> dict[str, tuple[int, int]]:
        """By parameter: the dimension that devices split, and how many parts it may have at most or a divisor of."""
        if self.split == "columns":
            units = self.units or self.out_features
            return {"kernel": (1, units), "bias": (0, units)}
        if self.split == "rows":
            return {"kernel": (0, self.units or self.in_features)}
        return {}

    def keep_quantised(self, kernel: jax.Array, scale: jax.Array, block: tuple[int, int]) -> None:
        """Takes a kernel of eight bits [in, out] and the scale of each block of `block` inputs and outputs."""
        self.kernel = nnx.Param(kernel)
        self.kernel_scale = nnx.data(nnx.Param(scale))
        self.kernel_block = block

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:  # [..., in] -> [..., out]
        """The projection, in the dtype of `inputs` where the kernel is quantised."""
        if self.kernel_scale is None or self.kernel_block is None:
            return super().__call__(inputs) if out_sharding is None else super().__call__(inputs, out_sharding)
        out = scaled_matmul(inputs, self.kernel[...], self.kernel_scale[...], self.kernel_block)
        return out if self.bias is None else out + self.bias[...].astype(out.dtype)


def scaled_matmul(
    inputs: jax.Array,  # [..., in]
    kernel: jax.Array,  # float8 or int8[in, out]
    scale: jax.Array,  # float32[in / rows, out / columns]
    block: tuple[int, int],  # rows and columns; the last block of each may be cut off
) -> jax.Array:  # [..., out] in the dtype of `inputs`
    """`inputs @ (kernel * scale)`: the kernel is converted on its way into the product, sums over blocks are scaled.

    XLA's TPU compiler makes one fusion of it that reads the kernel's bytes once. Were the kernel multiplied by scales
    before the product, it would be written whole in 16 bits first.
    """
    rows, columns = block
    flat = inputs.reshape(-1, kernel.shape[0])
    by_output = scale if scale.shape[1] == 1 else jnp.repeat(scale, columns, axis=1)[:, : kernel.shape[1]]
    whole = kernel.shape[0] // rows * rows
    sums = _block_sums(flat[:, :whole], kernel[:whole], by_output[: whole // rows]) if whole else 0.0
    if whole < kernel.shape[0]:
        sums += _block_sums(flat[:, whole:], kernel[whole:], by_output[-1:])
    return jnp.asarray(sums, inputs.dtype).reshape(*inputs.shape[:-1], kernel.shape[1])


def _block_sums(inputs: jax.Array, kernel: jax.Array, scale: jax.Array) -> jax.Array:  # float32[T, out]
    """As `scaled_matmul`, where blocks are of equal size and every output has its own scale or shares one."""
    num_blocks = scale.shape[0]
    by_block = inputs.reshape(inputs.shape[0], num_blocks, -1)
    kernels = kernel.reshape(num_blocks, -1, kernel.shape[1]).astype(inputs.dtype)
    sums = jnp.einsum("tbi,bio->bto", by_block, kernels, preferred_element_type=jnp.float32)
    return (sums * scale[:, None]).sum(axis=0)


__all__ = ["Linear", "scaled_matmul"]
