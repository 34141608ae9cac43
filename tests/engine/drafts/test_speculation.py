"""Settings of speculative decoding: what is refused, and what is meant where nothing is said. No jax."""

from __future__ import annotations

from typing import Any

import pytest

from kvjax.engine import EngineConfig
from kvjax.engine.scheduling.speculation import SpeculativeConfig


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "guess"}, "expected method of prompt_lookup, draft_model, got 'guess'"),
        ({"num_drafts": 0}, "expected num_drafts >= 1, got 0"),
        ({"max_ngram": 0}, "expected max_ngram >= 1, got 0"),
        ({"min_ngram": -1}, "expected min_ngram >= 1, got -1"),
        ({"max_ngram": 2, "min_ngram": 3}, "expected max_ngram >= min_ngram, got 2 and 3"),
        ({"method": "draft_model", "max_ngram": 2}, "expected no max_ngram with method 'draft_model'.*got 2"),
        ({"method": "draft_model", "min_ngram": 2}, "expected no min_ngram with method 'draft_model'.*got 2"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, (4, 2)),
        ({"max_ngram": 1}, (1, 1)),
        ({"min_ngram": 6}, (6, 6)),
        ({"max_ngram": 7, "min_ngram": 1}, (7, 1)),
    ],
)
def test_what_is_not_said_of_ngrams_follows_what_is(settings: dict[str, int], sizes: tuple[int, int]) -> None:
    assert SpeculativeConfig(**settings).ngram_sizes == sizes


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"max_num_batched_tokens": 4, "max_num_seqs": 2}, "max_num_batched_tokens > 4 .num_drafts., got 4"),
        ({"max_model_len": 4}, "max_model_len > 4 .num_drafts., got 4"),
    ],
)
def test_a_step_has_room_for_a_request_with_all_its_drafts(limits: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(num_blocks=8, speculative=SpeculativeConfig(num_drafts=4), **limits)
