"""Engines for tests: one compiled step per golden model and pool size, shared by all engines that differ elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from kvjax.engine import EngineConfig, GenerationResult, LLMEngine, SamplingParams
from kvjax.models import LoadedModel, load_model
from tests.models.golden_models import goldens_of, model_folder

NUM_GREEDY_TOKENS = 32
AMPLE_BLOCKS = 600
FEW_BLOCKS = {"llama": 31, "qwen3": 31, "gemma3": 87, "demo": 122}  # room for two or three requests at once
MAX_MODEL_LEN = {"llama": 136, "qwen3": 136, "gemma3": 136, "demo": 288}


@functools.cache
def loaded(name: str) -> LoadedModel:
    return load_model(model_folder(name), "float32")


def base_config(name: str, **settings: Any) -> EngineConfig:
    """The settings of `name`'s tests, changed by `settings`."""
    base = EngineConfig(
        block_size=8,
        num_blocks=AMPLE_BLOCKS,
        max_model_len=MAX_MODEL_LEN[name],
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_buckets=1,
    )
    return dataclasses.replace(base, **settings)


@functools.cache
def base_engine(name: str, num_blocks: int) -> LLMEngine:
    """Holds the compiled step of one model and pool size; runs nothing itself."""
    return LLMEngine(loaded(name), base_config(name, num_blocks=num_blocks))


def make_engine(name: str, **settings: Any) -> LLMEngine:
    """An engine of a golden model with settings of its own, without a compilation of its own."""
    config = base_config(name, **settings)
    assert config.num_blocks is not None
    return LLMEngine(loaded(name), config, like=base_engine(name, config.num_blocks))


def golden_prompts(name: str) -> list[np.ndarray]:
    return [golden.prompt for golden in goldens_of(name)]


def assert_greedy_is_golden(engine: LLMEngine, name: str, order: list[int] | None = None) -> list[GenerationResult]:
    """Runs the model's prompts, in `order`, and compares with what Hugging Face transformers computed."""
    goldens = goldens_of(name)
    order = list(range(len(goldens))) if order is None else order
    params = SamplingParams(max_tokens=NUM_GREEDY_TOKENS, temperature=0.0)
    results = engine.generate([goldens[i].prompt for i in order], params)
    for i, result in zip(order, results, strict=True):
        np.testing.assert_array_equal(result.output_token_ids, goldens[i].greedy, err_msg=f"{name}, prompt {i}")
    assert_no_leak(engine)
    return results


def assert_no_leak(engine: LLMEngine) -> None:
    engine.check_invariants()
    assert engine.num_unfinished == 0
    for manager in engine.managers:
        assert manager.usage == 0
        assert len(manager.request_table) == 0
