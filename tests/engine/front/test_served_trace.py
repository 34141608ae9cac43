"""An engine's trace is its requests: lengths, order of arrival, and ids that are equal as far as prompts are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvjax.engine import SamplingParams
from kvjax.replay import ServedTrace, read_trace, write_trace
from tests.engine.engines import make_engine

BLOCK = 16


def shared_blocks(first: np.ndarray, second: np.ndarray) -> int:
    """Blocks up to which two prompts are equal, one that is not full only if both end in it."""
    count = 0
    for start in range(0, max(first.size, second.size), BLOCK):
        if not np.array_equal(first[start : start + BLOCK], second[start : start + BLOCK]):
            break
        count += 1
    return count


def test_a_served_trace_is_what_was_asked(tmp_path: Path) -> None:
    engine, served = make_engine("llama"), ServedTrace(BLOCK)
    engine.add_observer(served)
    rng = np.random.default_rng(0)
    text = rng.integers(1, 200, 60)
    prompts = [text[:n] for n in (40, 60, 32, 7, 40)] + [np.concatenate((text[:20], rng.integers(1, 200, 30)))]
    lengths = [9, 1, 3, 2, 5, 4]
    params = [SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True) for length in lengths]
    engine.generate(prompts, params)
    engine.abort(engine.add_request([1, 2, 3]))
    asked = [*prompts, np.array([1, 2, 3])]
    assert [request.input_length for request in served.requests] == [prompt.size for prompt in asked]
    assert [request.output_length for request in served.requests] == [*lengths, 0]
    for first, prompt in zip(served.requests, asked, strict=True):
        assert len(first.hash_ids) == -(-prompt.size // BLOCK)
        for second, other in zip(served.requests, asked, strict=True):
            ids = zip(first.hash_ids, second.hash_ids, strict=False)
            assert sum(a == b for a, b in ids) == shared_blocks(prompt, other)
    assert served.requests[0].timestamp_ms == 0
    write_trace(served.requests, tmp_path / "served.jsonl")
    assert read_trace(tmp_path / "served.jsonl") == served.requests


def test_bad_sizes_are_refused_and_nothing_is_nothing() -> None:
    assert ServedTrace().requests == []
    with pytest.raises(ValueError, match="expected hash_block_size >= 1, got 0"):
        ServedTrace(0)
