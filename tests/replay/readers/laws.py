"""What holds for the requests of every trace that was read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvjax.replay import TraceReading, TraceRequest, read_trace


def read(path: Path, text: str | bytes, **reading) -> tuple[list[TraceRequest], str]:
    """The requests of a file with this content, and what was told of it."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    told: list[str] = []
    requests = read_trace(path, reading=TraceReading(**reading), tell=told.append)
    (line,) = told
    return requests, line


def check_trace(requests: Sequence[TraceRequest]) -> None:
    """Values that a replay can take: times in order, an id for every begun block, each always after the same one."""
    assert requests
    sizes = {request.hash_block_size for request in requests}
    (size,) = sizes
    parents: dict[int, int] = {}
    for place, request in enumerate(requests):
        assert type(request.timestamp_ms) is type(request.input_length) is type(request.output_length) is int
        assert 0 <= request.timestamp_ms < 2**54
        assert place == 0 or requests[place - 1].timestamp_ms <= request.timestamp_ms
        assert 1 <= request.input_length < 2**31
        assert 0 <= request.output_length < 2**31
        assert -1 <= request.after < place
        assert request.pause_ms >= 0
        assert len(request.hash_ids) == -(-request.input_length // size)
        for before, hash_id in zip((-1, *request.hash_ids), request.hash_ids, strict=False):
            assert 0 <= hash_id < 2**31 // size
            assert parents.setdefault(hash_id, before) == before


def num_shared(a: Sequence, b: Sequence) -> int:
    """Leading items that are equal."""
    length = min(len(a), len(b))
    differs = np.flatnonzero([x != y for x, y in zip(a[:length], b[:length], strict=True)])
    return int(differs[0]) if differs.size else length


def shared_tokens(a: TraceRequest, b: TraceRequest) -> int:
    """Leading tokens that two prompts share."""
    return num_shared(a.token_ids().tolist(), b.token_ids().tolist())
