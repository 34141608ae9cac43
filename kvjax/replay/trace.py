"""Request traces in Mooncake's format: one JSON object a line.

Flow:    file -> [read_trace] -> TraceRequest list -> simulators;   workloads -> [write_trace] -> file
Source:  trace format of kvcache-ai/Mooncake

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in milliseconds and never falls. Each hash id stands for one block of 512 prompt tokens; equal ids mean
equal prompts up to and including that block. The tokens of id h are h * 512 + 0 ... h * 512 + 511, and a prompt is cut
at `input_length`, so that equal ids are equal tokens at every block size. Other keys are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.errors import TraceError

TRACE_BLOCK_SIZE = 512
MAX_HASH_ID = 2**31 // TRACE_BLOCK_SIZE - 1  # tokens are int32
_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
_RANGES = {"timestamp": (0, 2**53), "input_length": (1, 2**31 - 1), "output_length": (0, 2**31 - 1)}  # float64, int32


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    timestamp_ms: int
    input_length: int  # tokens, >= 1
    output_length: int  # tokens, >= 0
    hash_ids: tuple[int, ...]  # one per 512 tokens of the prompt, the last block counted if it is not full

    def token_ids(self) -> np.ndarray:  # int32[input_length]
        """The prompt."""
        starts = np.array(self.hash_ids, np.int32) * TRACE_BLOCK_SIZE
        tokens = starts[:, None] + np.arange(TRACE_BLOCK_SIZE, dtype=np.int32)
        return tokens.reshape(-1)[: self.input_length]


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace file, the first `limit` of them if it is given. Blank lines are skipped.

    Raises:
        TraceError: a line that is no JSON object, lacks a key, holds a wrong value, goes back in time or has the
            wrong number of hash ids, with its number; or no request at all.
        OSError: the file cannot be read.
    """
    requests: list[TraceRequest] = []
    with open(path, encoding="utf-8-sig", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if limit is not None and len(requests) >= limit:
                break
            if not line.strip():
                continue
            request = _parse_line(line, f"{path}:{number}")
            if requests and request.timestamp_ms < requests[-1].timestamp_ms:
                raise TraceError(
                    f"{path}:{number}: expected timestamp >= {requests[-1].timestamp_ms} (the request before), "
                    f"got {request.timestamp_ms}; sort the trace by time"
                )
            requests.append(request)
    if not requests:
        raise TraceError(f"{path}: expected at least one request, got none")
    return requests


def write_trace(requests: Iterable[TraceRequest], path: str | Path) -> None:
    """Writes a trace that `read_trace` reads back equal."""
    with open(path, "w", encoding="utf-8") as file:
        for request in requests:
            values = (request.timestamp_ms, request.input_length, request.output_length, request.hash_ids)
            file.write(json.dumps(dict(zip(_KEYS, values, strict=True))) + "\n")


def _parse_line(line: str, where: str) -> TraceRequest:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: expected a JSON object, got {line.strip()[:40]!r} ({error})") from error
    if not isinstance(data, dict):
        raise TraceError(f"{where}: expected a JSON object, got {type(data).__name__}")
    missing = [key for key in _KEYS if key not in data]
    if missing:
        raise TraceError(f"{where}: expected the keys {', '.join(_KEYS)}, got no {', '.join(missing)}")
    for key, (least, most) in _RANGES.items():
        if type(data[key]) is not int or data[key] < least:
            raise TraceError(f"{where}: expected {key} to be an integer >= {least}, got {data[key]!r}")
        if data[key] > most:
            raise TraceError(f"{where}: expected {key} <= {most}, got {data[key]}")
    return TraceRequest(
        timestamp_ms=data["timestamp"],
        input_length=data["input_length"],
        output_length=data["output_length"],
        hash_ids=_parse_hash_ids(data["hash_ids"], data["input_length"], where),
    )


def _parse_hash_ids(ids: Any, input_length: int, where: str) -> tuple[int, ...]:
    if not isinstance(ids, list):
        raise TraceError(f"{where}: expected hash_ids to be a list, got {ids!r}")
    expected = -(-input_length // TRACE_BLOCK_SIZE)
    if len(ids) != expected:
        raise TraceError(
            f"{where}: expected {expected} hash_ids for {input_length} tokens (one per {TRACE_BLOCK_SIZE}), "
            f"got {len(ids)}"
        )
    for value in ids:
        if type(value) is not int or not 0 <= value <= MAX_HASH_ID:
            raise TraceError(f"{where}: expected hash_ids in [0, {MAX_HASH_ID}], got {value!r}")
    return tuple(ids)
