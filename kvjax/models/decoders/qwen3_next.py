"""Qwen3-Next and the language models of Qwen3.5.

Flow:    Qwen3NextConfig, Qwen3_5Config, Qwen3_5MoeConfig -> [Qwen3NextDecoder, Qwen3_5Decoder]
Source:  transformers' modeling_{qwen3_next,qwen3_5,qwen3_5_moe}.py, with whose outputs they agree
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import jax
import numpy as np
from flax import nnx

from kvjax.models.config import RECURRENT
from kvjax.models.configs.experts import APART, ROWS, ExpertsConfig
from kvjax.models.configs.qwen3_next import Qwen3_5Config
from kvjax.models.decoders.llama import dense_part
from kvjax.models.layers.attention.grouped_query import Attention
from kvjax.models.layers.blocks import PreNormBlock
from kvjax.models.layers.decoder import Decoder
from kvjax.models.layers.experts import SparseFeedForward
from kvjax.models.layers.feed_forward import FeedForward
from kvjax.models.layers.make import Make
from kvjax.models.layers.recurrent.delta import GatedDeltaNet
from kvjax.models.tensor_sources import Rows, TensorSource, Whole


class GatedAttention(Attention):
    """A head's queries and its gate are rows of one tensor, one after the other."""

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """The rows of both."""
        dim, total = self.head_dim, 2 * self.q_proj.out_features
        sources: dict[str, TensorSource] = {}
        for name, start in (("q_proj", 0), ("gate_proj", dim)):
            rows = _rows_of_heads(total, 2 * dim, start, dim)
            sources[f"{name}.kernel"] = Rows("q_proj.weight", rows, total)
            sources[f"{name}.bias"] = Rows("q_proj.bias", rows, total, transposed=False)
        return sources


class InterleavedDeltaNet(GatedDeltaNet):
    """A key head's queries, keys, values and gates are rows of one tensor, one after the other."""

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """The rows of each; queries, keys and values of all heads follow each other here."""
        config = self.config
        per_key_head = config.num_value_heads // config.num_key_heads
        values = per_key_head * config.value_dim
        head, total = 2 * (config.key_dim + values), 2 * (config.key_size + config.value_size)
        parts = ((0, config.key_dim), (config.key_dim, config.key_dim), (2 * config.key_dim, values))
        qkv = sum((_rows_of_heads(total, head, start, size) for start, size in parts), ())
        z = _rows_of_heads(total, head, 2 * config.key_dim + values, values)
        heads = 2 * config.num_value_heads
        b, a = (_rows_of_heads(heads, 2 * per_key_head, start, per_key_head) for start in (0, per_key_head))
        return {
            **super().checkpoint_sources(),
            "in_proj_qkv.kernel": Rows("in_proj_qkvz.weight", qkv, total),
            "in_proj_z.kernel": Rows("in_proj_qkvz.weight", z, total),
            "in_proj_b.kernel": Rows("in_proj_ba.weight", b, heads),
            "in_proj_a.kernel": Rows("in_proj_ba.weight", a, heads),
        }


def _rows_of_heads(total: int, head: int, start: int, size: int) -> tuple[int, ...]:
    """The rows of `total` that lie in `size` rows from `start` on in every `head` rows."""
    return tuple(np.arange(total).reshape(-1, head)[:, start : start + size].ravel().tolist())


class SharedExpert(nnx.Module):
    """A feed-forward part that every token weighs by itself."""

    def __init__(self, size: int, inner: int, *, activation: str, make: Make) -> None:
        self.part = FeedForward(size, inner, activation=activation, make=make)
        self.weight = make.linear(size, 1)

    def __call__(self, hidden: jax.Array) -> jax.Array:  # [T, d] -> [T, d]
        """The part's output times a number between 0 and 1."""
        return jax.nn.sigmoid(self.weight(hidden)) * self.part(hidden)


class ExpertsBesideShared(SparseFeedForward):
    """The shared part's tensors stand beside the experts'."""

    def checkpoint_sources(self) -> Mapping[str, TensorSource]:
        """The sources of the shared part."""
        names = {f"part.{name}": f"shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
        names["weight"] = "shared_expert_gate"
        return {
            f"shared_experts.{path}.kernel": Whole(f"{name}.weight", transposed=True) for path, name in names.items()
        }


def experts_part(config: Qwen3_5Config, experts: ExpertsConfig, make: Make) -> ExpertsBesideShared:
    """The feed-forward part of a layer with experts."""
    size, act = config.hidden_size, config.hidden_act
    shared = SharedExpert(size, config.shared_intermediate_size, activation=act, make=make)
    return ExpertsBesideShared(size, experts, activation=act, make=make, shared_experts=shared, layouts=(APART, ROWS))


class DeltaBlock(PreNormBlock):
    """A gated delta net and a feed-forward part."""

    tensor_names: ClassVar[Mapping[str, str]] = {"self_attn": "linear_attn"}


class Qwen3_5Decoder(Decoder):
    """A gated delta net or gated attention, then a dense part or experts, each behind a norm."""

    ignored_tensors: ClassVar[tuple[str, ...]] = ("model.visual.", "mtp.")
    delta_net: ClassVar[type[GatedDeltaNet]] = GatedDeltaNet

    @classmethod
    def make_layer(cls, config: Qwen3_5Config, layer: int, make: Make) -> nnx.Module:
        """One layer."""
        mlp: FeedForward | ExpertsBesideShared
        if config.experts is not None and config.has_experts(layer):
            mlp = experts_part(config, config.experts, make)
        else:
            mlp = dense_part(config, make)
        if config.layer_types[layer] == RECURRENT:
            net = cls.delta_net(config.hidden_size, config.delta, layer, eps=config.rms_norm_eps, make=make)
            return DeltaBlock(config, make, self_attn=net, mlp=mlp)
        return PreNormBlock(config, make, self_attn=GatedAttention(config, layer, make), mlp=mlp)


class Qwen3NextDecoder(Qwen3_5Decoder):
    """As Qwen3.5, but for the order of the rows of its projections."""

    delta_net: ClassVar[type[GatedDeltaNet]] = InterleavedDeltaNet
