"""What the layers of a model share while one step is traced: tokens, positions, rotary tables, the cache.

Flow:    token_ids, positions, cache -> [ForwardStep] -> every layer
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.models.configs.rope import RopeConfig
from kvjax.models.layers.rotary import RopeTables, rope_tables


class Cache(Protocol):
    """What a layer calls for attention: `kvjax.device.StepCache` when serving, `DenseAttention` when training.

    Layers of other kinds call the other methods of `StepCache`, which `DenseAttention` does not have.
    """

    def __call__(
        self,
        layer_name: str,
        q: jax.Array,  # [T, Hq, D]
        k: jax.Array | None,  # [T, Hkv, D]; None: the layer reads another's pages
        v: jax.Array | None,  # [T, Hkv, D]
        options: AttentionOptions,
        /,
    ) -> jax.Array:  # [T, Hq, D]
        """Attention outputs of the step's tokens in the layer of that name."""


@dataclass
class ForwardStep:
    """One trace of a model over the flat tokens of a step."""

    token_ids: jax.Array  # int32[T]
    positions: jax.Array  # int32[T], or [3, T] for multimodal positions
    cache: Any  # a Cache; recurrent and other kinds of layers call further methods
    max_model_len: int
    rows: jax.Array | None = None  # int32[N] tokens whose hidden states are wanted, in the last layer; None: all
    picks: jax.Array | None = None  # int32[T, K] tokens that the last indexer named, for layers without one
    _tables: dict[tuple[RopeConfig, int], RopeTables] = field(default_factory=dict)

    def mark_layer(self) -> None:
        """Tells a serving cache that a layer begins, or that all have ended."""
        mark_layer(self.cache)

    def narrow(self, layer: Any) -> None:
        """Says that `layer` is the last: one that `narrows` leaves out what no later step and no logits need."""
        if getattr(layer, "narrows", False):
            self.rows = getattr(self.cache, "wanted", None)

    def wanted(self, x: jax.Array) -> jax.Array:  # [T, ...] -> [N, ...]
        """The wanted rows of `x`, or `x` as it is where all are wanted, or it has these alone."""
        return x if self.rows is None or x.shape[0] != self.token_ids.shape[0] else x[self.rows]

    def take_rope_tables(self, rope: RopeConfig, head_dim: int, tables: RopeTables) -> None:
        """Takes `tables` for those of `rope`."""
        self._tables[rope, head_dim] = tables

    def rope_tables(self, rope: RopeConfig, head_dim: int) -> RopeTables:
        """Cosines and sines of the step's positions, made once."""
        key = (rope, head_dim)
        if key not in self._tables:
            self._tables[key] = rope_tables(rope, self.positions, head_dim, self.max_model_len)
        return self._tables[key]


def mark_layer(cache: Any) -> None:
    """Tells `cache`, if it serves, that a layer begins, or that all have ended: steps may be cut there."""
    mark = getattr(cache, "mark_layer", None)
    if mark is not None:
        mark()
