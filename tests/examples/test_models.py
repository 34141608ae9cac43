"""Models of `examples/` in Flax NNX, Equinox and plain functions: over pages they write what dense attention does."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kvjax.device import Bucket, Buckets, FunctionModel, make_update_step
from kvjax.planning import plan_kv_cache
from tests.device.dense_cache import DenseCache

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [[5, 7, 11], [13] * 20, list(range(1, 30))]
MAX_TOKENS = 6


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a script sees them."""
    monkeypatch.syspath_prepend(str(EXAMPLES))


def example(name: str) -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLES / f"model_{name}.py"))


def dense_tokens(model: Any) -> list[list[int]]:
    """Greedy continuations, the whole sequence anew for every token; padded to one length, which no query sees."""
    length = max(map(len, PROMPTS)) + MAX_TOKENS

    @jax.jit
    def logits(token_ids: jax.Array, last: jax.Array) -> jax.Array:
        hidden = model(token_ids, jnp.arange(token_ids.shape[0]), DenseCache())
        return model.logits(hidden[last][None])[0]

    def continuation(prompt: list[int]) -> list[int]:
        tokens = list(prompt)
        for _ in range(MAX_TOKENS):
            padded = np.zeros(length, np.int32)
            padded[: len(tokens)] = tokens
            tokens.append(int(jnp.argmax(logits(padded, len(tokens) - 1))))
        return tokens[len(prompt) :]

    return [continuation(prompt) for prompt in PROMPTS]


def test_nnx() -> None:
    """With a full and a windowed layer, prompts longer than the window."""
    this = example("nnx")
    model = this["Decoder"](nnx.Rngs(1))
    assert max(map(len, PROMPTS)) > this["WINDOW"]
    assert this["generate"](model, PROMPTS, MAX_TOKENS) == dense_tokens(model)


@pytest.mark.parametrize("name", ["equinox", "functions"])
def test_served(name: str) -> None:
    this = example(name)
    key = jax.random.key(1)
    model = (
        this["Decoder"](key) if name == "equinox" else FunctionModel(this["init"](key), this["forward"], this["head"])
    )
    in_flight = this["MAX_IN_FLIGHT"] * this["MAX_STEP_TOKENS"]
    plan = plan_kv_cache(
        this["kv_cache_specs"](), num_blocks=60, max_model_len=this["MAX_MODEL_LEN"], max_in_flight_tokens=in_flight
    )
    server = this["Server"](model, plan.config, eos_token_ids=())
    for i, prompt in enumerate(PROMPTS):
        server.add(str(i), prompt, MAX_TOKENS)
    assert server.serve() == {str(i): tokens for i, tokens in enumerate(dense_tokens(model))}


@pytest.mark.parametrize("model", [len, object(), {"weights": np.zeros(3)}])
def test_what_is_no_model_is_refused(model: Any) -> None:
    """Before anything is compiled; the message names what is expected."""
    this = example("functions")
    config = plan_kv_cache(this["kv_cache_specs"](), num_blocks=8, max_model_len=64, max_in_flight_tokens=64).config
    with pytest.raises(ValueError, match=r"expected a model .*FunctionModel"):
        make_update_step(model, config, Buckets((Bucket(8, 2, 4),)))
