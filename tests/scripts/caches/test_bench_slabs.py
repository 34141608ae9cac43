"""The benchmark of slabs: where all fits every cache hits alike, and else slabs hit no more than free exchange."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from bench_slabs import Exchange, Pools, main, make_load


def test_where_all_fits_every_cache_hits_alike() -> None:
    load = list(make_load(np.random.default_rng(0), num_agents=30, num_documents=6))
    caches = [Exchange(10**12), Exchange(10**12, 0.5), Pools((34 * 2_000, 2_000), in_slabs=True)]
    caches.append(Pools((34 * 2_000, 2_000), in_slabs=False))
    hits = [[cache.serve(turn) for turn in load] for cache in caches]
    assert any(hits[0])
    assert all(each == hits[0] for each in hits)


def test_a_row_for_each_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "slabs.json"
    arguments = ["--gb", "5", "10", "--agents", "60", "--documents", "10", "--json", str(file)]
    monkeypatch.setattr("sys.argv", ["bench_slabs.py", *arguments])
    main()
    rows = json.loads(file.read_text())
    assert [row["gb"] for row in rows] == [5, 10]
    assert all(0 < row["slabs"] <= row["free_exchange"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 3
