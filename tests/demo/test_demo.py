"""The demo: its conversations share prefixes, its model is small and fits them."""

from __future__ import annotations

import itertools
import os

from kvjax.demo import demo_model_path, demo_requests
from kvjax.demo.conversations import END_OF_TURN, SYSTEM_TEXT, render_turn
from kvjax.models import ModelConfig, Tokenizer

MAX_MODEL_BYTES = 12_000_000


def test_requests_have_names_of_their_own_and_end_where_an_answer_is_due() -> None:
    requests = demo_requests()
    assert 12 <= len(requests) <= 20
    assert len({request.name for request in requests}) == len({request.prompt for request in requests}) == len(requests)
    assert all(request.prompt.endswith("\nAnswer:") for request in requests)


def test_later_turns_of_a_topic_begin_with_its_earlier_ones() -> None:
    topics = itertools.groupby(demo_requests(), key=lambda request: request.name.split("/")[0])
    for _, group in topics:
        first, *rest = [request.prompt for request in group]
        assert first.startswith(SYSTEM_TEXT)
        assert rest
        assert all(prompt.startswith(first) for prompt in rest)


def test_a_finished_turn_ends_with_the_end_token() -> None:
    assert render_turn("Why?") == "Question: Why?\nAnswer:"
    assert render_turn("Why?", "So.") == f"Question: Why?\nAnswer: So.{END_OF_TURN}\n\n"


def test_the_model_is_small_hybrid_and_long_enough_for_every_request() -> None:
    folder = demo_model_path()
    assert sum(entry.stat().st_size for entry in os.scandir(folder)) <= MAX_MODEL_BYTES
    config = ModelConfig.from_folder(folder)
    assert set(config.layer_types) == {"full_attention", "sliding_attention"}
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer is not None
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.encode(END_OF_TURN)[-1:] == list(config.eos_token_ids)
    lengths = [len(tokenizer.encode(request.prompt)) for request in demo_requests()]
    assert config.sliding_window is not None
    assert min(lengths) > config.sliding_window
    assert max(lengths) + 256 <= config.max_model_len
