"""What is peculiar to Qwen3-VL: what stands for image tokens, and the tensors of its experts."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import DenseAttention, ModelConfig, build_model
from kvjax.models.tensor_sources import tensor_source
from tests.models.configs import qwen3_vl_dict


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig.from_dict(qwen3_vl_dict(head_dim=128))


def test_a_config_says_what_stands_for_a_token(config: ModelConfig) -> None:
    assert config.embedding_dim == 32 * 4  # its vector, and those of three layers
    assert config.placeholder_token_ids == (1, 2)
    assert config.has_mrope


def test_experts_are_the_tensors_of_the_hub(config: ModelConfig) -> None:
    """`[experts, in, 2 * out]`, gate before up, as Qwen/Qwen3-VL-235B-A22B has them."""
    module = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    prefix = "model.language_model."
    for leaf, name, shape in (
        ("gate", "gate_up_proj", (16, 32, 16)),
        ("up", "gate_up_proj", (16, 32, 16)),
        ("down", "down_proj", (16, 8, 32)),
    ):
        path = ("layers", 0, "mlp", "experts", leaf)
        source = tensor_source(module, path, prefix)
        assert source.names == (f"{prefix}layers.0.mlp.experts.{name}",)
        assert source.shapes(getattr(module.layers[0].mlp.experts, leaf).shape) == (shape,)
    head = tensor_source(module, ("lm_head", "kernel"), prefix)
    assert head.names == ("lm_head.weight",)


def test_positions_of_text_have_three_equal_axes_and_give_what_one_axis_gives(config: ModelConfig) -> None:
    module = build_model(config, rngs=nnx.Rngs(0))
    tokens, positions = jnp.arange(3, 13), jnp.arange(10)
    one = module(tokens, positions, DenseAttention())
    three = module(tokens, jnp.stack([positions] * 3), DenseAttention())
    np.testing.assert_allclose(one, three, atol=1e-5)
