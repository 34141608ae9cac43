"""Engines of toy models that take more than tokens, and what their requests must give: the whole sequence at once."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.engine import EngineConfig, GenerationResult, LLMEngine, SamplingParams
from kvjax.models import LoadedModel
from tests.device.toy_inputs import dense_logits, toy_model

MAX_MODEL_LEN = 40
NUM_BLOCKS = 30  # for two long requests at once; of four some are preempted
MODES = [
    {"async_scheduling": async_scheduling, "enable_prefix_caching": caching, "max_num_seqs": max_num_seqs}
    for async_scheduling in (False, True)
    for caching in (False, True)
    for max_num_seqs in (2, 4)
]
OTHER_SETTINGS: list[dict[str, Any]] = [
    {"sub_block_hits": True},
    {"zero_new_pages": True},
    {"miss_reasons": True, "eviction_policy": "cost"},
    {"max_num_batched_tokens": 4, "watermark": 0.1},
]


@dataclasses.dataclass(frozen=True)
class InputRequest:
    """One prompt, what comes with it to `add_request`, and what of it `dense_logits` takes."""

    prompt: list[int]
    given: dict[str, Any]
    dense: dict[str, Any]


@functools.cache
def model_of(kind: str) -> LoadedModel:
    return toy_model(kind)


@functools.cache
def base_engine(kind: str) -> LLMEngine:
    """Holds the compiled step of one model."""
    return LLMEngine(model_of(kind), base_config())


def base_config(**settings: Any) -> EngineConfig:
    base = EngineConfig(
        block_size=4,
        num_blocks=NUM_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_embedding_rows=24,
        max_buckets=1,
    )
    return dataclasses.replace(base, **settings)


def make_engine(kind: str, **settings: Any) -> LLMEngine:
    """An engine without a compilation of its own."""
    return LLMEngine(model_of(kind), base_config(**settings), like=base_engine(kind))


def run(engine: LLMEngine, ids: Sequence[str]) -> list[GenerationResult]:
    """Steps until the requests have ended; their results."""
    results: dict[str, GenerationResult] = {}
    while engine.num_unfinished or engine._runner.num_in_flight:
        for result in engine.step().results.values():
            results[result.request_id] = result
        engine.check_invariants()
    assert engine.manager.usage == 0
    return [results[request_id] for request_id in ids]


def add(engine: LLMEngine, requests: Sequence[InputRequest], max_tokens: int = 8, n: int = 1) -> list[str]:
    """Queues greedy requests; ids of all samples."""
    ids = []
    for request in requests:
        params = SamplingParams(n=n, max_tokens=max_tokens, temperature=0.0)
        first = engine.add_request(request.prompt, params, **request.given)
        ids += [first, *(f"{first}.{i}" for i in range(1, n))]
    return ids


def assert_greedy(kind: str, request: InputRequest, result: GenerationResult) -> None:
    """Every token is the best one after all before it, by the whole sequence at once."""
    generated = result.output_token_ids.tolist()
    best = dense_logits(model_of(kind).module, [*request.prompt, *generated], **request.dense).argmax(axis=-1)
    assert best[len(request.prompt) - 1 : -1].tolist() == generated


def assert_all_greedy(
    kind: str, requests: Sequence[InputRequest], results: Sequence[GenerationResult], n: int = 1
) -> None:
    for i, result in enumerate(results):
        assert_greedy(kind, requests[i // n], result)


def distinct_outputs(results: Sequence[GenerationResult]) -> int:
    return len({tuple(result.output_token_ids.tolist()) for result in results})


def random_tokens(seed: int, length: int) -> list[int]:
    """Of the toy's vocabulary without its placeholder."""
    return np.random.default_rng(seed).integers(0, 30, length).tolist()
