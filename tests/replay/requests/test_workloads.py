"""Laws of generated workloads: valid traces, equal for equal seeds, and of the shape they are named for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.replay import WORKLOADS, generate_workload, read_trace, write_trace
from kvjax.replay.bounds.infinite_cache import InfiniteCache


@pytest.mark.parametrize("kind", WORKLOADS)
def test_a_workload_is_a_valid_trace(kind: str, tmp_path: Path) -> None:
    workload = generate_workload(kind, 300, seed=1)
    assert len(workload) == 300
    write_trace(workload, tmp_path / "t.jsonl")
    assert read_trace(tmp_path / "t.jsonl") == workload


@pytest.mark.parametrize("kind", WORKLOADS)
def test_seeds_decide(kind: str) -> None:
    assert generate_workload(kind, 100, seed=1) == generate_workload(kind, 100, seed=1)
    assert generate_workload(kind, 100, seed=1) != generate_workload(kind, 100, seed=2)


@pytest.mark.parametrize("kind", WORKLOADS)
def test_a_shorter_workload_is_the_beginning_of_a_longer_one(kind: str) -> None:
    assert generate_workload(kind, 50, seed=3) == generate_workload(kind, 200, seed=3)[:50]


@pytest.mark.parametrize(
    ("kind", "least"), [("chat", 0.6), ("agents", 0.85), ("documents", 0.5), ("scan", 0.1), ("flood", 0.2)]
)
def test_prefixes_repeat(kind: str, least: float) -> None:
    workload = generate_workload(kind, 1_000)
    cache = InfiniteCache(16)
    hits = sum(map(cache.lookup_and_add, workload))
    assert least < hits / sum(request.input_length for request in workload) < 0.98


def test_equal_ids_are_equal_prefixes() -> None:
    prefixes: dict[int, tuple[int, ...]] = {}
    for kind in WORKLOADS:
        prefixes.clear()
        for request in generate_workload(kind, 500):
            for end, hash_id in enumerate(request.hash_ids, start=1):
                assert prefixes.setdefault(hash_id, request.hash_ids[:end]) == request.hash_ids[:end]


def test_unknown_kinds_no_requests_and_negative_seeds_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a workload of chat, agents, documents, scan, flood, got 'chats'"):
        generate_workload("chats", 10)
    with pytest.raises(ValueError, match="expected num_requests >= 1, got 0"):
        generate_workload("chat", 0)
    with pytest.raises(ValueError, match="expected seed >= 0, got -1"):
        generate_workload("chat", 1, seed=-1)
