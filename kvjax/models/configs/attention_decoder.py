"""What decoders of attention layers have in common: heads, and a cache of K and V for every layer of its type. No jax.

Flow:    ConfigKeys -> [take_decoder_fields] -> a family's [AttentionDecoderConfig] -> layers, kv_cache_specs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kvjax.core.kinds.chunked_local import ChunkedLocalAttentionSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.rswa import RSWASpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.errors import ConfigError
from kvjax.models.config import CHUNKED, FEED_FORWARD, FULL, RECURRENT, SLIDING, ModelConfig, StreamingWindow
from kvjax.models.configs.decoder import DecoderConfig, take_sizes
from kvjax.models.configs.keys import ConfigKeys
from kvjax.models.configs.rope import RopeConfig
from kvjax.models.configs.states import StateShapes


@dataclass(frozen=True, kw_only=True)
class TemperatureConfig:
    """Queries at position p are multiplied by 1 + scale * ln(1 + (p + offset) // floor)."""

    floor: float  # tokens
    scale: float
    offset: int = 1


@dataclass(frozen=True, kw_only=True)
class AttentionDecoderConfig(DecoderConfig):
    """What attention layers read. A family says in its own class what else its layers need."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    layer_types: tuple[str, ...]  # per layer: FULL, SLIDING, CHUNKED, RECURRENT or FEED_FORWARD
    rope: RopeConfig | None
    rope_local: RopeConfig | None = None  # of layers that do not see all; None: as the others
    rotated_layers: tuple[bool, ...] | None = None  # per layer whether it has rotary embeddings; None: all have
    rope_interleaved: bool = False  # dimensions 2i and 2i + 1 turn together, else i and i + half of the rotated ones
    temperature: TemperatureConfig | None = None  # of queries, by position
    sliding_window: int | None = None  # tokens that a sliding layer sees, itself included
    num_sink_tokens: int = 0  # the first tokens, which every query of a sliding layer sees whatever its window
    keeps_prompt: bool = False  # every query of a sliding layer sees the prompt whatever its window (R-SWA)
    attention_chunk_size: int | None = None
    state: StateShapes | None = None  # of recurrent layers
    qkv_bias: bool = False
    o_bias: bool = False
    full_heads: tuple[int, int] | None = None  # KV heads of full layers and their dimension; None: as the others
    num_shared_layers: int = 0  # at the end, which read the pages of the last layer of their type before them
    qk_norm: bool = False  # queries and keys are normed per head
    norms_all_heads: bool = False  # these norms are over all heads of a token together
    norms_each_head: bool = False  # queries and keys are centred and normed, with weights of each head's own
    v_norm: bool = False  # values are normed per head, without a weight
    v_is_k: bool = False  # full layers have no values of their own: theirs are the keys before their norm
    output_gate: bool = False  # what attention gives is multiplied by the sigmoid of a projection
    head_gate: bool = False  # what a head gives is multiplied by the sigmoid of one number, which is projected
    has_sinks: bool = False  # every softmax has a learned logit per head, which takes weight and has no value
    attn_logit_soft_cap: float | None = None

    def __post_init__(self) -> None:
        if len(self.layer_types) != self.num_layers:
            raise ConfigError(f"expected {self.num_layers} layer_types, got {len(self.layer_types)}")
        for num_kv_heads, _ in {self.heads_of(layer) for layer in range(self.num_layers)}:
            if self.num_q_heads % num_kv_heads:
                raise ConfigError(
                    f"expected num_attention_heads to be a multiple of num_key_value_heads, "
                    f"got {self.num_q_heads} and {num_kv_heads}"
                )
        own = self.layer_types[: self.num_own_layers]
        if not 0 <= self.num_shared_layers < self.num_layers or set(own) != set(self.layer_types):
            raise ConfigError(
                f"expected num_kv_shared_layers to leave a layer of each type with pages, got {self.num_shared_layers}"
            )
        of_kinds = ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size"), (RECURRENT, "state"))
        for kind, key in of_kinds:
            if kind in self.layer_types and getattr(self, key) is None:
                raise ConfigError(f"expected a {key}, since layer_types has {kind} layers; got none")

    @property
    def cache_words(self) -> str:
        """Heads of a layer, and how many layers have states instead."""
        num_recurrent = self.layer_types.count(RECURRENT)
        states = f", {num_recurrent} layers with states" if num_recurrent else ""
        heads = f"{self.num_kv_heads} KV heads of {self.head_dim}"
        full = "" if self.full_heads is None else ", {} of {} in full layers".format(*self.full_heads)
        return heads + full + states

    @property
    def num_own_layers(self) -> int:
        """Layers with a cache of their own."""
        return self.num_layers - self.num_shared_layers

    @property
    def shared_layers(self) -> dict[str, str]:
        """Layers that read the pages of another layer, with that layer."""
        last = {kind: i for i, kind in enumerate(self.layer_types[: self.num_own_layers])}
        shared = range(self.num_own_layers, self.num_layers)
        return {f"layers.{i}": f"layers.{last[self.layer_types[i]]}" for i in shared}

    def heads_of(self, layer: int) -> tuple[int, int]:
        """KV heads of layer `layer` and the dimension of its heads."""
        if self.full_heads is not None and self.layer_types[layer] == FULL:
            return self.full_heads
        return self.num_kv_heads, self.head_dim

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The rotary embeddings of all layers that have any."""
        return tuple(rope for rope in (self.rope, self.rope_local) if rope is not None)

    def rope_of(self, layer: int) -> RopeConfig | None:
        """Rotary embedding of layer `layer`; None: it has none."""
        if self.rotated_layers is not None and not self.rotated_layers[layer]:
            return None
        is_local = self.layer_types[layer] != FULL
        return self.rope_local if is_local and self.rope_local is not None else self.rope

    def window_of(self, layer: int) -> int | None:
        """Tokens that layer `layer` sees at most, None: no such limit."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def chunk_of(self, layer: int) -> int | None:
        """Tokens of an attention chunk of layer `layer`, None: it sees across chunks."""
        return self.attention_chunk_size if self.layer_types[layer] == CHUNKED else None

    def kv_cache_specs(self, block_size: int | None = None, dtype: str | None = None) -> dict[str, KVCacheSpec]:
        """Cache of every layer that has one by its name, `layers.{i}`, in order; `dtype` None: the model's own."""
        common = {
            "block_size": block_size or self.default_block_size,
            "dtype": self.dtype if dtype is None else dtype,
        }
        own = range(self.num_own_layers)
        return {f"layers.{i}": self._layer_spec(i, common) for i in own if self.layer_types[i] != FEED_FORWARD}

    def _layer_spec(self, layer: int, common: dict[str, Any]) -> KVCacheSpec:
        layer_type, (num_kv_heads, head_dim) = self.layer_types[layer], self.heads_of(layer)
        common = common | {"num_kv_heads": num_kv_heads, "head_size": head_dim}
        if layer_type == SLIDING and self.sliding_window is not None:
            if self.keeps_prompt:
                return RSWASpec(**common, rswa_window=self.sliding_window)
            window = {"sliding_window": self.sliding_window, "num_sink_tokens": self.num_sink_tokens}
            return SlidingWindowSpec(**common | window)
        if layer_type == CHUNKED and self.attention_chunk_size is not None:
            return ChunkedLocalAttentionSpec(**common, attention_chunk_size=self.attention_chunk_size)
        full = FullAttentionSpec(**common)
        if layer_type == RECURRENT and self.state is not None:
            return self.state.spec(full.block_size, full.page_size_bytes // full.block_size, self.dtype)
        return full

    def for_streaming(self, window: StreamingWindow) -> ModelConfig:
        """The model with `window` in place of full attention; `Raises` as of `ModelConfig`."""
        if set(self.layer_types) != {FULL} or self.full_heads is not None:
            return super().for_streaming(window)
        return replace(
            self,
            layer_types=(SLIDING,) * self.num_layers,
            rope_local=None,
            sliding_window=window.size,
            num_sink_tokens=0 if window.keeps_prompt else window.num_sink_tokens,
            keeps_prompt=window.keeps_prompt,
        )

    @property
    def split_units(self) -> Mapping[str, int]:
        """Query heads and feed-forward columns."""
        return {"query heads": self.num_q_heads, "feed-forward columns": self.intermediate_size}

    def splits_cache(self, num_shards: int) -> bool:
        """Whether every device can have whole KV heads, and whole heads or channels of states.

        With fewer KV heads than devices each lies on several, if the query heads split.
        """
        num_kv_heads = [heads for heads, _ in map(self.heads_of, range(self.num_layers))]
        splits = (
            heads % num_shards == 0 or (num_shards % heads == 0 and self.num_q_heads % num_shards == 0)
            for heads in num_kv_heads
        )
        return all(splits) and (self.state is None or self.state.splits(num_shards))


def take_decoder_fields(
    keys: ConfigKeys, *, activation_key: str = "hidden_act", num_layers: int | None = None
) -> dict[str, Any]:
    """The fields that every decoder of attention layers has, but for its layer types and rotary embeddings."""
    sizes = take_sizes(keys, activation_key=activation_key, num_layers=num_layers)
    return {
        **sizes,
        "intermediate_size": keys.take_int("intermediate_size"),
        **take_heads(keys, sizes["hidden_size"]),
    }


def take_heads(keys: ConfigKeys, hidden_size: int) -> dict[str, Any]:
    """Heads, their dimension, and the scale of scores that goes by it."""
    num_q_heads = keys.take_int("num_attention_heads")
    head_dim = keys.take_int("head_dim", max(hidden_size // num_q_heads, 1))
    gives_kv_heads = keys.take_nullable("num_key_value_heads") is not None
    return {
        "num_q_heads": num_q_heads,
        "num_kv_heads": keys.take_int("num_key_value_heads") if gives_kv_heads else num_q_heads,
        "head_dim": head_dim,
        "sm_scale": head_dim**-0.5,
    }


def take_rotated(keys: ConfigKeys, num_layers: int) -> tuple[bool, ...]:
    """Per layer whether queries and keys are rotated: `no_rope_layers`, which has 1 for those that are.

    Without it, one layer in every `no_rope_layer_interval` is not.
    """
    interval = keys.take_int("no_rope_layer_interval", 4)
    rotated = keys.take("no_rope_layers", None) or [(i + 1) % interval for i in range(num_layers)]
    if len(rotated) != num_layers:
        raise ConfigError(f"{keys.where}: expected {num_layers} no_rope_layers, got {len(rotated)}")
    return tuple(map(bool, rotated))
