"""The comparison of memories on a small trace: blocks of any size say what tokens say, and no case runs twice."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from kvjax.replay import write_trace
from kvjax.replay.requests.trace import cut_tails
from tests.replay.random_traces import random_trace

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from compare_memories import COLUMNS, in_blocks, main


@pytest.mark.parametrize("block_size", [48, 64, 160, 1_000])
@pytest.mark.parametrize("seed", range(2))
def test_prompts_share_blocks_that_hold_equal_prefixes(seed: int, block_size: int) -> None:
    trace = cut_tails(random_trace(seed, 12, hash_block_size=64))
    blocks = in_blocks(trace, block_size)
    assert [len(own.hash_ids) - 1 for own in blocks] == [(own.input_length - 1) // block_size for own in trace]
    tokens = [request.token_ids() for request in trace]
    for (a, b), (own, other) in zip(product(tokens, repeat=2), product(blocks, repeat=2), strict=True):
        shared = min(len(own.hash_ids), len(other.hash_ids)) - 1
        for num in range(1, shared + 1):
            is_equal = np.array_equal(a[: num * block_size], b[: num * block_size])
            assert (own.hash_ids[:num] == other.hash_ids[:num]) == is_equal
        assert own is other or own.hash_ids[-1] != other.hash_ids[-1]


def test_a_row_for_each_model_and_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("compare_memories.SPLITS", [100, 5_000])
    write_trace(random_trace(3, 20, hash_block_size=512), tmp_path / "trace.jsonl")
    arguments = [str(tmp_path / "trace.jsonl"), "--json", str(tmp_path / "found.json"), "--memory", "2,60"]
    for num_runs in (2 * 5 + 2 * 2, 0):
        assert main([*arguments, "--models", "jamba-1.5-mini,gemma-3-27b"]) == 0
        out, log = capsys.readouterr()
        assert log.count("running") == num_runs
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in out.splitlines()]
    assert rows[0] == ["model", "GB", *COLUMNS, "of it"]
    assert [row[:2] for row in rows[2:]] == [
        [model, size] for model in ("jamba-1.5-mini", "gemma-3-27b") for size in ("2", "60")
    ]
    assert len(set(rows[3][2:5])) == 1  # everything fits
    assert 0 < float(rows[3][5]) <= float(rows[3][2]) <= float(rows[3][6])  # equal pages are long blocks
    assert rows[4][2] == rows[4][4] == ""  # one pool
