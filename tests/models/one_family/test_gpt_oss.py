"""GPT-OSS: what its config.json may leave out, and which checkpoints are refused."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.configs import load_model_config
from kvjax.errors import ConfigError
from kvjax.models import ModelConfig
from kvjax.models.config import FULL, SLIDING
from kvjax.models.decoders.gpt_oss import GptOssExperts
from kvjax.models.layers.make import Make
from tests.models.configs import llama_dict


def gpt_oss_dict(**changes: Any) -> dict[str, Any]:
    """A small GPT-OSS."""
    return llama_dict(architectures=["GptOssForCausalLM"], model_type="gpt_oss", **changes)


def test_keys_that_files_leave_out_are_those_of_transformers() -> None:
    config = ModelConfig.from_dict(gpt_oss_dict())
    assert config.layer_types == (SLIDING, FULL)
    assert (config.sliding_window, config.head_dim, config.rms_norm_eps) == (128, 64, 1e-5)
    assert (config.experts.num_experts, config.experts.top_k) == (128, 4)
    assert (config.swiglu_alpha, config.swiglu_limit, config.qkv_bias, config.o_bias) == (1.702, 7.0, True, True)
    rope = config.rope
    assert (rope.rope_type, rope.theta, rope.factor, rope.original_max_len) == ("yarn", 150_000.0, 32.0, 4096)
    assert not rope.truncate


def test_the_file_on_the_hub_says_what_its_defaults_do() -> None:
    config: Any = load_model_config("gpt-oss-120b")
    assert config.rope == ModelConfig.from_dict(gpt_oss_dict()).rope
    assert (config.experts.num_experts, config.experts.top_k, config.quant_method) == (128, 4, "mxfp4")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"layer_types": ["full_attention"]}, r"expected 2 layer_types \(num_hidden_layers\), got 1"),
        (
            {"layer_types": ["full_attention", "chunked_attention"]},
            "expected layer_types among full_attention, sliding_attention, got chunked_attention",
        ),
        ({"dtype": "int8"}, "expected 'dtype' among .*, got 'int8'"),
        ({"num_local_experts": 2}, r"expected num_experts_per_tok in \[1, 2\], got 4"),
    ],
)
def test_configs_that_cannot_be_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        ModelConfig.from_dict(gpt_oss_dict(**changes))


def test_experts_are_those_of_the_paper_one_token_and_expert_at_a_time() -> None:
    """Gate and up in turn, both clamped; the gate is x * sigmoid(alpha * x), what it multiplies has one added."""
    config: Any = ModelConfig.from_dict(
        gpt_oss_dict(num_local_experts=5, num_experts_per_tok=2, swiglu_limit=0.5, hidden_size=8, intermediate_size=6)
    )
    module = GptOssExperts(config, Make(jnp.dtype("float32"), nnx.Rngs(0)))
    random = np.random.default_rng(0)
    module.gate_up_proj_bias[...] = jnp.asarray(random.normal(size=(5, 12)), jnp.float32)
    module.down_proj_bias[...] = jnp.asarray(random.normal(size=(5, 8)), jnp.float32)
    hidden, weights = random.normal(size=(7, 8)), random.random((7, 2))
    experts = np.array([random.permutation(5)[:2] for _ in range(7)], np.int32)
    expected = np.zeros((7, 8))
    for token in range(7):
        for weight, expert in zip(weights[token], experts[token], strict=True):
            both = hidden[token] @ np.asarray(module.gate_up_proj[expert]) + np.asarray(
                module.gate_up_proj_bias[expert]
            )
            gate, up = np.minimum(both[::2], 0.5), np.clip(both[1::2], -0.5, 0.5)
            inner = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
            out = inner @ np.asarray(module.down_proj[expert]) + np.asarray(module.down_proj_bias[expert])
            expected[token] += weight * out
    got = module(jnp.asarray(hidden, jnp.float32), jnp.asarray(weights, jnp.float32), jnp.asarray(experts))
    np.testing.assert_allclose(got, expected, atol=1e-5)
