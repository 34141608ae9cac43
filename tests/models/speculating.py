"""Engines of every family that speculate, with one compiled step a family, and drafters that are wrong on purpose.

engine = speculating_engine(family)             # prompt lookup
engine = speculating_engine(family, RANDOM)     # a small Llama of random weights drafts
engine = wrong_engine(family, seed)             # some of the right tokens, then a wrong one
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from flax import nnx

from kvjax.core.requests.request_table import RequestTable
from kvjax.engine import LLMEngine, SpeculativeConfig
from kvjax.engine.front import llm_engine
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.sampling.sampling_table import SamplingTable
from kvjax.engine.scheduling.speculation import Drafts
from kvjax.models import LoadedModel, build_model
from kvjax.models.config import ModelConfig
from tests.models.configs import llama_dict
from tests.models.families import Family, engine_config, loaded
from tests.models.golden_models import goldens_of

NUM_DRAFTS = 3
RANDOM, ITSELF = "random", "itself"  # draft models


@functools.cache
def random_llama(vocab_size: int) -> LoadedModel:
    """A small Llama of random weights: it knows nothing of any golden model."""
    config = ModelConfig.from_dict(llama_dict(vocab_size=vocab_size, max_position_embeddings=512))
    return LoadedModel(config, build_model(config, rngs=nnx.Rngs(0)), None)


def draft_model(family: Family, name: str | None) -> LoadedModel | None:
    """The draft model of that name."""
    if name is None:
        return None
    return random_llama(loaded(family).config.vocab_size) if name == RANDOM else loaded(family)


@functools.cache
def base_engine(family: Family, draft_name: str | None = None, async_scheduling: bool = False) -> LLMEngine:
    """Holds compiled steps; runs nothing itself."""
    method = "prompt_lookup" if draft_name is None else "draft_model"
    speculative = SpeculativeConfig(method=method, num_drafts=NUM_DRAFTS)
    config = engine_config(family, speculative=speculative, async_scheduling=async_scheduling)
    like = None if draft_name is None or family.memory_bytes is not None else base_engine(family)
    return LLMEngine(loaded(family), config, draft_model=draft_model(family, draft_name), like=like)


def speculating_engine(family: Family, draft_name: str | None = None, **settings: Any) -> LLMEngine:
    """An engine with settings of its own that compiles nothing.

    How a draft model's cache and the target's divide a memory hangs on how many steps are in flight.
    """
    divides = draft_name is not None and family.memory_bytes is not None
    base = base_engine(family, draft_name, divides and settings.get("async_scheduling", False))
    config = replace(base.config, **settings)
    return LLMEngine(loaded(family), config, draft_model=draft_model(family, draft_name), like=base)


def wrong_engine(family: Family, seed: int, **settings: Any) -> LLMEngine:
    """An engine whose drafts are `WrongDrafts`."""
    answers = {golden.prompt.tobytes(): golden.greedy for golden in goldens_of(family.name)}
    base = base_engine(family)  # beside the patch
    with mock.patch.object(llm_engine, "PromptLookup", lambda table, *_: WrongDrafts(table, answers, seed)):
        return LLMEngine(loaded(family), replace(base.config, **settings), like=base)


class WrongDrafts:
    """Drafts of the golden answers up to a random place, where a wrong token stands; a `Drafter`."""

    device_tokens = None

    def __init__(self, table: RequestTable, answers: dict[bytes, np.ndarray], seed: int) -> None:
        self.num_settled: dict[tuple[int, int], int] = {}  # (drafts, accepted) -> how often
        self._table = table
        self._answers = answers
        self._random = np.random.default_rng(seed)

    def start(self, request: EngineRequest) -> None:
        pass

    def stop(self, request: EngineRequest) -> None:
        pass

    def count(self, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
        return self._random.integers(0, limits + 1)

    def propose(self, rows: np.ndarray, counts: np.ndarray, sampling: SamplingTable) -> Drafts:
        token_ids = np.zeros((rows.size, NUM_DRAFTS), np.int32)
        for i in np.flatnonzero(counts).tolist():
            row, count = rows.item(i), counts.item(i)
            num_prompt_tokens = self._table.num_prompt_tokens.item(row)
            tokens = self._table.tokens_of(row)
            answer = self._answers[tokens[:num_prompt_tokens].tobytes()]
            token_ids[i, :count] = answer[tokens.size - num_prompt_tokens :][:count]
            wrong = int(self._random.integers(0, count + 1))
            if wrong < count:
                token_ids[i, wrong] = (token_ids[i, wrong] + 1) % 256
                token_ids[i, wrong + 1 : count] = self._random.integers(0, 256, count - wrong - 1)
        return Drafts(token_ids)

    def settle(self, rows: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        for pair in zip(num_drafts.tolist(), num_accepted.tolist(), strict=True):
            self.num_settled[pair] = self.num_settled.get(pair, 0) + 1
