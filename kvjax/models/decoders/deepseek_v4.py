"""DeepSeek V4.

Flow:    DeepseekV4Config -> [DeepseekV4Decoder]
Source:  transformers' modeling_deepseek_v4.py, with whose outputs it agrees; tensors are named as those of
         deepseek-ai/DeepSeek-V4-Flash
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from kvjax.models.configs.deepseek_v4 import DeepseekV4Config
from kvjax.models.layers.attention.compressed import CompressedAttention
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import Experts, Router, expert_weights, router_logits, router_scores
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.forward_step import ForwardStep
from kvjax.models.layers.hyper_connections import HyperConnection, HyperHead
from kvjax.models.layers.make import Make


class HashRouter(nnx.Module):
    """The token's id says which experts it has; scores only weight them."""

    def __init__(self, config: DeepseekV4Config, *, make: Make) -> None:
        self.kernel = make.param(config.hidden_size, config.experts.num_experts, scale=config.hidden_size**-0.5)
        self.tid2eid = nnx.Param(jnp.zeros((config.vocab_size, config.experts.top_k), jnp.int32))
        self.config = config.experts

    def __call__(self, hidden: jax.Array, token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """float32[T, k] weights and int32[T, k] experts."""
        experts = jnp.take(self.tid2eid[...], token_ids, axis=0, mode="clip")
        scores = router_scores(router_logits(hidden, self.kernel[...]), self.config)
        return expert_weights(scores, experts, self.config), experts


class SharedExpert(FeedForward):
    """The one that every token has."""

    tensor_names: ClassVar[Mapping[str, str]] = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


class RoutedFeedForward(nnx.Module):
    """Experts by score or by token id, and one that every token has."""

    def __init__(self, config: DeepseekV4Config, layer: int, make: Make) -> None:
        size, experts, activation = config.hidden_size, config.experts, config.hidden_act
        self.is_hashed = config.hashed_layers[layer]
        self.gate: Callable[..., tuple[jax.Array, jax.Array]] = (
            HashRouter(config, make=make) if self.is_hashed else Router(size, experts, make=make, has_bias=True)
        )
        self.experts = Experts(size, experts, activation=activation, make=make, names=("w1", "w3", "w2"))
        self.shared_experts = SharedExpert(
            size, experts.intermediate_size, activation=activation, make=make, limit=experts.limit
        )

    def __call__(self, hidden: jax.Array, step: ForwardStep) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output, without residual."""
        chosen = self.gate(hidden, step.token_ids) if self.is_hashed else self.gate(hidden)
        return self.experts(hidden, *chosen) + self.shared_experts(hidden)


class HyperBlock(nnx.Module):
    """A layer: attention and experts, each behind a norm and between streams."""

    def __init__(self, config: DeepseekV4Config, layer: int, make: Make) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attn = CompressedAttention(config, layer, make)
        self.ffn = RoutedFeedForward(config, layer, make)
        self.attn_norm = make.norm(size, eps=eps)
        self.ffn_norm = make.norm(size, eps=eps)
        self.hc_attn = HyperConnection(size, config.hyper, norm_eps=eps, make=make)
        self.hc_ffn = HyperConnection(size, config.hyper, norm_eps=eps, make=make)

    def __call__(self, streams: jax.Array, step: ForwardStep) -> jax.Array:  # [T, n, d]
        """The streams after the layer."""
        hidden, mixing = self.hc_attn.split(streams)
        streams = self.hc_attn.join(self.attn(self.attn_norm(hidden), step), mixing, streams)
        hidden, mixing = self.hc_ffn.split(streams)
        return self.hc_ffn.join(self.ffn(self.ffn_norm(hidden), step), mixing, streams)


class DeepseekV4Decoder(Decoder):
    """Hidden states are streams [T, n, d] between embeddings and the last norm."""

    tensor_prefixes: ClassVar[tuple[str, ...]] = ("", "model.")
    tensor_names: ClassVar[Mapping[str, str]] = {"lm_head": "head"}
    ignored_tensors: ClassVar[tuple[str, ...]] = ("mtp.", "model.mtp.")  # layers that predict further tokens
    # First as the Hub has it, and then what transformers 5 writes in another way.
    tensor_renames: ClassVar[Mapping[str, str]] = {
        r"^embed\.": "embed_tokens.",
        r"\.hc_(attn|ffn)_(fn|base|scale)$": r".hc_\1.\2",
        r"^hc_head_(fn|base|scale)$": r"hc_head.\1",
        r"\.gate\.bias$": ".gate.e_score_correction_bias",
        r"\.hc_head\.hc_(fn|base|scale)$": r".hc_head.\1",
        r"\.attn\.norm\.": ".attn.kv_norm.",
    }

    def __init__(self, config: DeepseekV4Config, *, dtype: str, rngs: nnx.Rngs) -> None:
        """Random weights in `dtype`."""
        super().__init__(config, dtype=dtype, rngs=rngs)
        make = Make(jnp.dtype(dtype), rngs)
        self.hc_head = HyperHead(config.hidden_size, config.hyper, norm_eps=config.rms_norm_eps, make=make)
        self.num_streams = config.hyper.num_streams

    @staticmethod
    def make_layer(config: DeepseekV4Config, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        return HyperBlock(config, layer, make)

    def expand(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, n, d]
        """Every stream begins as the token's embedding."""
        return jnp.broadcast_to(hidden[:, None], (hidden.shape[0], self.num_streams, hidden.shape[1]))

    def collapse(self, hidden: jax.Array) -> jax.Array:  # [T, n, d] -> [T, d]
        """What the last norm gets of the streams."""
        return self.hc_head(hidden)
