"""An engine whose steps of decoding have programs of their own, as on a GPU, gives the same tokens."""

from __future__ import annotations

from typing import Any

import pytest

from kvjax.device import Buckets, DeviceBatch
from kvjax.engine import LLMEngine
from tests.engine.engines import assert_greedy_is_golden, base_config, loaded

NAME = "llama"


def test_tokens_are_the_same_in_programs_of_decoding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of both kinds run, each in a bucket of its kind."""
    default, from_plan = Buckets.default, DeviceBatch.from_plan
    kinds: list[tuple[bool, bool]] = []

    def apart(**limits: Any) -> Buckets:
        return default(**{**limits, "decode_apart": True})

    def counted(plan: Any, *arguments: Any) -> DeviceBatch:
        batch = from_plan(plan, *arguments)
        kinds.append((batch.is_decode, plan.num_tokens == plan.num_requests))
        return batch

    monkeypatch.setattr(Buckets, "default", apart)
    monkeypatch.setattr(DeviceBatch, "from_plan", counted)
    config = base_config(NAME, max_buckets=3)
    assert_greedy_is_golden(LLMEngine(loaded(NAME), config), NAME)
    assert set(kinds) == {(True, True), (False, False)}
