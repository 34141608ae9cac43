"""Laws of a request's tokens, and of the file that a trace is written to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvjax.replay import TraceRequest, read_trace, write_trace
from kvjax.replay.requests.trace import cut_tails


def test_round_trip(tmp_path: Path) -> None:
    requests = [TraceRequest(0, 1, 0, (3,)), TraceRequest(0, 512, 9, (4,)), TraceRequest(70, 513, 1, (4, 4_194_303))]
    write_trace(requests, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == requests
    assert read_trace(tmp_path / "t.jsonl", limit=2) == requests[:2]


def test_round_trip_of_other_blocks_and_waits(tmp_path: Path) -> None:
    requests = [TraceRequest(0, 5, 0, (3,), 16), TraceRequest(4, 6, 9, (9,), 16, after=0, pause_ms=12)]
    write_trace(requests, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == requests


def test_tokens_follow_from_hash_ids() -> None:
    tokens = TraceRequest(0, 600, 1, (2, 7)).token_ids()
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [*range(1024, 1536), *range(3584, 3584 + 88)]
    assert TraceRequest(0, 512, 1, (4_194_303,)).token_ids()[-1] == 2**31 - 1
    assert TraceRequest(0, 20, 1, (2, 7), hash_block_size=16).token_ids().tolist() == [*range(32, 48), *range(112, 116)]


def test_prompts_that_are_cut_share_whole_blocks_alone() -> None:
    trace = [
        TraceRequest(0, 1_000, 1, (3, 9)),
        TraceRequest(1, 1_024, 1, (3, 9)),
        TraceRequest(2, 5, 1, (3,)),
        TraceRequest(3, 40, 1, (1, 2, 4), hash_block_size=16),
    ]
    cut = cut_tails(trace)
    assert [request.input_length for request in cut] == [513, 1_025, 1, 33]
    assert [request.hash_ids[:-1] for request in cut] == [(3,), (3, 9), (), (1, 2)]
    assert len({request.hash_ids[-1] for request in cut} - {1, 2, 3, 4, 9}) == 4


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "none.jsonl")
