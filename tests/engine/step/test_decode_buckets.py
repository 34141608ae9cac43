"""An engine whose steps of decoding have programs of their own, as on a GPU, gives the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from kvjax.device import Buckets, DeviceBatch
from kvjax.engine import LLMEngine, SpeculativeConfig
from tests.engine.engines import assert_greedy_is_golden, base_config, loaded

NAME = "llama"


@pytest.mark.parametrize("num_drafts", [0, 3])
def test_tokens_are_the_same_in_programs_of_decoding_alone(num_drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of each kind run, each in a bucket of its kind: one token a request, with drafts, prompts."""
    default, from_plan = Buckets.default, DeviceBatch.from_plan
    kinds: list[tuple[bool, int]] = []

    def apart(**limits: Any) -> Buckets:
        return default(**{**limits, "decode_apart": True, "drafts_apart": True})

    def counted(plan: Any, *arguments: Any) -> DeviceBatch:
        batch = from_plan(plan, *arguments)
        kinds.append((batch.is_decode, int(plan.num_new_tokens.max())))
        return batch

    monkeypatch.setattr(Buckets, "default", apart)
    monkeypatch.setattr(DeviceBatch, "from_plan", counted)
    speculative = SpeculativeConfig(num_drafts=num_drafts) if num_drafts else None
    config = base_config(NAME, max_buckets=2 + bool(num_drafts), speculative=speculative)
    assert_greedy_is_golden(LLMEngine(loaded(NAME), config), NAME)
    assert {is_decode for is_decode, _ in kinds} == {True, False}
    assert all(is_decode == (longest <= 1 + num_drafts) for is_decode, longest in kinds)
    assert max(longest for is_decode, longest in kinds if is_decode) == 1 + num_drafts
