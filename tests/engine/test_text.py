"""Laws of the text side: streamed text equals decoded text, and the picture adds up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvjax.engine.pool_picture import CACHED, FREE, HELD, pool_picture
from kvjax.engine.stats import PoolUse, RequestStats, StepStats
from kvjax.engine.text_stream import TextStream


class ByteTokenizer:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


@pytest.mark.parametrize("seed", range(5))
def test_streamed_text_is_the_decoded_text(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice(list("ab ü€漢𝄞\n"), size=60))
    stream, tokens, out = TextStream(ByteTokenizer()), ByteTokenizer().encode(text), ""
    while tokens:
        count = int(rng.integers(1, 4))
        piece = stream.push(tokens[:count])
        assert "\ufffd" not in piece
        out, tokens = out + piece, tokens[count:]
    assert out + stream.finish() == text


def test_half_a_character_shows_at_the_end_only() -> None:
    stream = TextStream(ByteTokenizer())
    assert stream.push(b"a\xe2\x82") == ""
    assert stream.finish() == "a\ufffd"


def step_stats(held: int, cached: int, free: int, **kwargs: int) -> StepStats:
    values = {"num_hit_tokens": 0, "num_refound_tokens": 0, "num_preemptions": 0, "released": 0, **kwargs}
    return StepStats(
        step=0,
        num_running=1,
        num_waiting=0,
        num_requests=1,
        num_new_tokens=1,
        num_sampled_tokens=1,
        num_hit_tokens=values["num_hit_tokens"],
        num_queried_tokens=1,
        num_refound_tokens=values["num_refound_tokens"],
        num_preemptions=values["num_preemptions"],
        host_us=1.0,
        pools=(PoolUse(held, cached, free, values["released"]),),
    )


def test_the_picture_shows_what_is_there() -> None:
    lines = pool_picture([step_stats(1, 0, 99), step_stats(50, 49, 1), step_stats(0, 100, 0)], 0, height=4)
    columns = ["".join(line[13 + i] for line in reversed(lines[1:5])) for i in range(3)]
    assert columns == [HELD + 3 * FREE, 2 * HELD + 2 * CACHED, 4 * CACHED]


def test_long_runs_are_drawn_in_bins_that_add_up() -> None:
    steps = [step_stats(1, 1, 1, released=1, num_hit_tokens=3, num_refound_tokens=2) for _ in range(1000)]
    lines = pool_picture(steps, 0, width=50)
    assert all(len(line) <= 13 + 50 + 10 for line in lines)
    assert any("released" in line and line.endswith("1,000") for line in lines)
    assert any("hit tokens" in line and line.endswith("3,000") for line in lines)
    assert any("refound" in line and line.endswith("2,000") for line in lines)
    assert not any("preempted" in line for line in lines)


def test_pictures_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one step"):
        pool_picture([], 0)
    with pytest.raises(ValueError, match="width and height >= 1, got 0 and 8"):
        pool_picture([step_stats(1, 1, 1)], 0, width=0)


def test_speeds_need_two_tokens_and_an_end() -> None:
    stats = RequestStats("a", num_prompt_tokens=3, arrival_time_s=1.0)
    assert stats.time_to_first_token_s is None
    assert stats.output_tokens_per_s is None
    stats.first_token_time_s, stats.finish_time_s, stats.num_output_tokens = 2.0, 4.0, 5
    assert stats.time_to_first_token_s == 1.0
    assert stats.output_tokens_per_s == 2.0
