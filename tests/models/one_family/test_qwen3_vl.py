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


@pytest.mark.parametrize("gate_up_shape", [(16, 32, 16), (16, 16, 32)])
@pytest.mark.parametrize("down_shape", [(16, 8, 32), (16, 32, 8)])
def test_experts_are_the_tensors_of_the_hub_or_of_transformers(
    config: ModelConfig, gate_up_shape: tuple[int, ...], down_shape: tuple[int, ...]
) -> None:
    """Gate before up: `[experts, in, out]` as Qwen/Qwen3-VL-235B-A22B has them, or `[experts, out, in]`."""
    module = nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0)))
    prefix = "model.language_model."
    tensors = {
        f"{prefix}layers.0.mlp.experts.{name}": np.random.default_rng(0).random(shape)
        for name, shape in (("gate_up_proj", gate_up_shape), ("down_proj", down_shape))
    }
    gate_up, down = (
        tensor if tensor.shape[1] == size else tensor.swapaxes(1, 2)
        for tensor, size in zip(tensors.values(), (32, 8), strict=True)
    )
    for leaf, expected in (("gate", gate_up[..., :8]), ("up", gate_up[..., 8:]), ("down", down)):
        source = tensor_source(module, ("layers", 0, "mlp", "experts", leaf), prefix).chosen(tensors, expected.shape)
        assert getattr(module.layers[0].mlp.experts, leaf).shape == expected.shape
        np.testing.assert_array_equal(source.join([tensors[name] for name in source.names], expected.shape), expected)
    head = tensor_source(module, ("lm_head", "kernel"), prefix)
    assert head.names == ("lm_head.weight",)


def test_positions_of_text_have_three_equal_axes_and_give_what_one_axis_gives(config: ModelConfig) -> None:
    module = build_model(config, rngs=nnx.Rngs(0))
    tokens, positions = jnp.arange(3, 13), jnp.arange(10)
    one = module(tokens, positions, DenseAttention())
    three = module(tokens, jnp.stack([positions] * 3), DenseAttention())
    np.testing.assert_allclose(one, three, atol=1e-5)
