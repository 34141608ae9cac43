"""The decoders against Hugging Face's float32 outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import Decoder, DenseAttention, ModelConfig, build_model, load_model
from tests.models.golden_models import GOLDEN_MODELS, goldens_of, model_folder

PADDED_TOKENS = 320

Forward = Callable[[np.ndarray], np.ndarray]


def dense_forward(module: Decoder) -> Forward:
    """Logits of a whole sequence, padded at its end so that one compilation serves all lengths."""

    @jax.jit
    def forward(token_ids: jax.Array) -> jax.Array:
        return module.logits(module(token_ids, jnp.arange(PADDED_TOKENS), DenseAttention()))

    def padded(token_ids: np.ndarray) -> np.ndarray:
        row = np.zeros(PADDED_TOKENS, np.int32)
        row[: len(token_ids)] = token_ids
        return np.asarray(forward(jnp.asarray(row)))[: len(token_ids)]

    return padded


@pytest.fixture(scope="module", params=GOLDEN_MODELS)
def golden_model(request: pytest.FixtureRequest) -> tuple[str, Forward]:
    return request.param, dense_forward(load_model(model_folder(request.param), "float32").module)


def test_logits_are_those_of_hugging_face(golden_model: tuple[str, Forward]) -> None:
    name, forward = golden_model
    goldens = goldens_of(name)
    logits = [forward(golden.prompt)[golden.positions] for golden in goldens]
    chex.assert_trees_all_close(logits, [golden.logits for golden in goldens], atol=1e-4, rtol=0, strict=True)


def test_greedy_tokens_are_those_of_hugging_face(golden_model: tuple[str, Forward]) -> None:
    """Step k's token is the best after prompt and greedy tokens before k, so one pass shows all steps."""
    name, forward = golden_model
    for golden in goldens_of(name):
        assert golden.least_gap > 1e-3
        logits = forward(np.concatenate([golden.prompt, golden.greedy[:-1]]))[len(golden.prompt) - 1 :]
        assert logits.argmax(-1).tolist() == golden.greedy.tolist()
        best = np.sort(logits, axis=-1)
        assert (best[:, -1] - best[:, -2]).min() > 1e-3


def test_bfloat16_weights_give_bfloat16_hidden_states_and_float32_logits() -> None:
    module = load_model(model_folder("qwen3"), dtype="bfloat16").module
    golden = goldens_of("qwen3")[0]

    @jax.jit
    def forward(token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = module(token_ids, jnp.arange(token_ids.size), DenseAttention())
        return hidden, module.logits(hidden)

    hidden, logits = forward(jnp.asarray(golden.prompt))
    assert hidden.dtype == jnp.bfloat16
    assert logits.dtype == jnp.float32
    assert np.abs(np.asarray(logits)[golden.positions] - golden.logits).mean() < 0.2


def test_strict_promotion_of_dtypes_and_ranks_is_enough() -> None:
    config = ModelConfig.from_folder(model_folder("gemma3"))

    def forward(token_ids: jax.Array) -> jax.Array:
        module = build_model(config, dtype="bfloat16", rngs=nnx.Rngs(0))
        return module.logits(module(token_ids, jnp.arange(20), DenseAttention()))

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert jax.eval_shape(forward, jnp.arange(20)).shape == (20, config.vocab_size)


def test_padding_tokens_outside_the_vocabulary_are_clipped_not_nan() -> None:
    module = load_model(model_folder("llama")).module
    forward = jax.jit(lambda token_ids: module(token_ids, jnp.arange(3), DenseAttention()))
    chex.assert_tree_all_finite(forward(jnp.asarray([1, -1, 10_000])))


def test_architectures_without_a_decoder_are_refused_and_those_with_one_named() -> None:
    config = dataclasses.replace(ModelConfig.from_folder(model_folder("qwen3")), architecture="BertModel")
    with pytest.raises(NotImplementedError, match=r"expected one of the architectures .*LlamaFor.* got BertModel"):
        build_model(config, rngs=nnx.Rngs(0))
