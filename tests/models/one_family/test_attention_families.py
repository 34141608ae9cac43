"""Decoders that only attend, over whole sequences with DenseAttention: logits of prompts and of decoded steps."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.models import DenseAttention, ModelConfig, build_model, load_model
from tests.models.golden_models import goldens_of, model_folder

FAMILIES = (
    "phi3",
    "gpt_oss",
    "llama4",
    "gemma3n",
    "gemma4",
)
PADDED_TOKENS = 256


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_prompts_and_of_decoded_steps_are_those_of_hugging_face(name: str) -> None:
    model = load_model(model_folder(name), dtype="float32")

    @jax.jit
    def forward(token_ids: jax.Array) -> jax.Array:
        cache = DenseAttention(model.config.shared_layers)
        return model.module.logits(model.module(token_ids, jnp.arange(PADDED_TOKENS), cache))

    for golden in goldens_of(name):
        token_ids = np.concatenate([golden.prompt, golden.greedy[:-1]])
        padded = np.pad(token_ids, (0, PADDED_TOKENS - len(token_ids)))
        logits = np.asarray(forward(jnp.asarray(padded)))[: len(token_ids)]
        decoded = logits[len(golden.prompt) - 1 :]
        chex.assert_trees_all_close(logits[golden.positions], golden.logits, atol=1e-4, rtol=0, strict=True)
        chex.assert_trees_all_close(decoded, golden.decode_logits, atol=1e-4, rtol=0, strict=True)
        assert decoded.argmax(-1).tolist() == golden.greedy.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_strict_promotion_of_dtypes_and_ranks_is_enough(name: str) -> None:
    config = ModelConfig.from_folder(model_folder(name))

    def forward(token_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        module = build_model(config, dtype="bfloat16", rngs=nnx.Rngs(0))
        hidden = module(token_ids, jnp.arange(20), DenseAttention(config.shared_layers))
        return hidden, module.logits(hidden)

    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        hidden, logits = jax.eval_shape(forward, jnp.arange(20))
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
