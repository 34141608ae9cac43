"""StreamingLLM: full attention through a window and the first tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
from kvjax.models import DenseAttention, ModelConfig, StreamingWindow, load_model
from tests.models.configs import llama_dict
from tests.models.golden_models import constants_of, goldens_of, model_folder
from tests.models.one_family.test_gemma4 import gemma4_dict

NAME = "streaming_llm"


def test_dense_attention_streams_as_hugging_face_with_that_mask() -> None:
    constants = constants_of(NAME)
    window = StreamingWindow(size=int(constants["window"]), num_sink_tokens=int(constants["num_sink_tokens"]))
    module = load_model(model_folder(NAME), "float32", streaming=window).module
    golden = goldens_of(NAME)[2]
    forward = jax.jit(lambda tokens: module.logits(module(tokens, jnp.arange(tokens.size), DenseAttention())))
    logits = np.asarray(forward(jnp.asarray(golden.prompt)))
    np.testing.assert_allclose(logits[golden.positions], golden.logits, atol=1e-4, rtol=0)


def test_every_layer_keeps_its_window_and_the_first_tokens() -> None:
    config = ModelConfig.from_dict(llama_dict()).for_streaming(StreamingWindow(size=24, num_sink_tokens=3))
    expected = SlidingWindowSpec(
        block_size=16, num_kv_heads=2, head_size=8, dtype="float32", sliding_window=24, num_sink_tokens=3
    )
    assert set(config.kv_cache_specs().values()) == {expected}


@pytest.mark.parametrize(
    "data",
    [
        llama_dict(architectures=["MistralForCausalLM"], sliding_window=8),
        gemma4_dict(layer_types=["full_attention"] * 4),
    ],
)
def test_layers_other_than_of_full_attention_are_refused(data: dict[str, Any]) -> None:
    config = ModelConfig.from_dict(data)
    with pytest.raises(ValueError, match=r"layers all have full attention, got .*: a window of 4 tokens cannot"):
        config.for_streaming(StreamingWindow(size=4))


@pytest.mark.parametrize(("size", "num_sink_tokens"), [(0, 4), (4, -1)])
def test_windows_that_cannot_be_are_refused(size: int, num_sink_tokens: int) -> None:
    with pytest.raises(ValueError, match=f"window of at least 1 token and num_sink_tokens >= 0, got {size} and"):
        StreamingWindow(size=size, num_sink_tokens=num_sink_tokens)


def test_a_long_generation_holds_a_constant_number_of_blocks() -> None:
    """Window 16 and 4 first tokens in blocks of 8, 8 tokens a step: 1 block of these, at most 4 of the window."""
    config = EngineConfig(
        block_size=8, num_blocks=8, max_model_len=400, max_num_seqs=1, max_num_batched_tokens=8, max_buckets=1
    )
    engine = LLMEngine.from_folder(model_folder(NAME), config, streaming=StreamingWindow(size=16, num_sink_tokens=4))
    golden = goldens_of(NAME)[0]
    engine.add_request(golden.prompt, SamplingParams(max_tokens=300, temperature=0.0))
    most = 0
    while engine.num_unfinished:
        engine.step()
        for request in engine.scheduler.running:
            (table,) = engine.manager.get_block_ids(request.request_id)
            assert table[0] != 0
            most = max(most, sum(block != 0 for block in table))
    assert most <= 5
