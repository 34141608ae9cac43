"""Running sums of the logarithms of decays, whose differences are exact.

Flow:    logarithms of a tile's tokens -> [RunningSums] -> decays from token to token
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_MOST_LOG, _UNITS = 110.0, 65536.0


class RunningSums(NamedTuple):
    """Sums of the logarithms of decays from the start of a tile, whose differences are exact.

    A sum in the thousands leaves float32 few digits for what comes after it. Each addend is split into a whole number
    of 2 ** -16, of which integers are summed, and a rest so small that its sum loses nothing that counts. Addends are
    cut to +-`_MOST_LOG`, beyond which their exponential is 0 or infinite: 256 of them fit in an int32.
    """

    whole: jax.Array  # int32[..., Q] in units of 2 ** -16
    rest: jax.Array  # float32[..., Q]

    @classmethod
    def of(cls, logs: jax.Array) -> RunningSums:
        """The running sums of float32[..., Q] addends."""
        logs = jnp.clip(logs, -_MOST_LOG, _MOST_LOG)
        whole = jnp.floor(logs * _UNITS)
        rest = jnp.cumsum(logs - whole / _UNITS, axis=-1)
        return cls(jnp.cumsum(whole.astype(jnp.int32), axis=-1, dtype=jnp.int32), rest)

    def decays(self) -> jax.Array:
        """float32[..., t, s] `exp` of the sum from s + 1 to t for s <= t, else 0."""
        token = jnp.arange(self.rest.shape[-1])
        decay = _exp(self.whole[..., None] - self.whole[..., None, :], self.rest[..., None] - self.rest[..., None, :])
        return jnp.where(token[:, None] >= token, decay, 0.0)

    def since_start(self) -> jax.Array:
        """float32[..., t] `exp` of the sum up to t."""
        return _exp(self.whole, self.rest)

    def until_end(self) -> jax.Array:
        """float32[..., s] `exp` of the sum from s + 1 on."""
        whole, rest = self._last()
        return _exp(whole - self.whole, rest - self.rest)

    def of_all(self) -> jax.Array:
        """float32[..., 1] `exp` of the sum of all."""
        return _exp(*self._last())

    def _last(self) -> tuple[jax.Array, jax.Array]:
        """Both fields [..., 1] after the last addend, without a slice, which kernels in Triton cannot take."""
        is_last = lax.iota(jnp.int32, self.rest.shape[-1]) == self.rest.shape[-1] - 1
        whole, rest = (jnp.sum(jnp.where(is_last, y, 0), axis=-1, keepdims=True, dtype=y.dtype) for y in self)
        return whole, rest


def _exp(whole: jax.Array, rest: jax.Array) -> jax.Array:
    return jnp.exp(whole.astype(jnp.float32) / _UNITS + rest)
