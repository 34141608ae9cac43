"""One request of a trace, and the file of JSON lines that other tools can write.

Flow:    kvjax.replay.readers | workloads -> [TraceRequest] -> simulators;   any of them -> [write_trace] -> file
Source:  trace format of kvcache-ai/Mooncake

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ...]}

`timestamp` is in milliseconds. Each hash id stands for one block of 512 prompt tokens; equal ids mean equal prompts up
to and including that block. The tokens of id h are h * 512 + 0 ... h * 512 + 511, and a prompt is cut at
`input_length`, so that equal ids are equal tokens at every block size. Keys of ours, where a trace needs them:

    hash_block_size    tokens of a hash id, if not 512
    after, pause_ms    the request comes so long after the answer of that row (from 0), where a replay has answers; -1:
                       it comes at its time
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

TRACE_BLOCK_SIZE = 512
MAX_TOKENS = 2**31  # token ids are int32


def num_ids(hash_block_size: int) -> int:
    """Hash ids of so many tokens that there can be: 0 and up to below it."""
    return MAX_TOKENS // hash_block_size


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace. All requests of a trace have the same `hash_block_size`."""

    timestamp_ms: int
    input_length: int  # tokens, >= 1
    output_length: int  # tokens, >= 0
    hash_ids: tuple[int, ...]  # one per block of the prompt, the last block counted if it is not full
    hash_block_size: int = TRACE_BLOCK_SIZE  # tokens
    after: int = -1  # place in the trace of an earlier request whose answer it waits for; -1: it comes at its time
    pause_ms: int = 0  # from that answer on

    def token_ids(self) -> np.ndarray:  # int32[input_length]
        """The prompt."""
        starts = np.array(self.hash_ids, np.int32) * np.int32(self.hash_block_size)
        tokens = starts[:, None] + np.arange(self.hash_block_size, dtype=np.int32)
        return tokens.reshape(-1)[: self.input_length]


def cut_tails(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Prompts of whole hash blocks and a token of their own: a trace does not say what two share below that."""
    first_own = 1 + max(max(request.hash_ids, default=0) for request in requests)
    return [
        replace(request, input_length=whole * request.hash_block_size + 1, hash_ids=(*request.hash_ids[:whole], own))
        for own, request in enumerate(requests, first_own)
        for whole in [request.input_length // request.hash_block_size]
    ]


def write_trace(requests: Sequence[TraceRequest], path: str | Path | int) -> None:
    """Writes a trace that `read_trace` reads back equal; a descriptor in place of a path is closed then."""
    has_size = any(request.hash_block_size != TRACE_BLOCK_SIZE for request in requests)
    has_waits = any(request.after >= 0 for request in requests)
    with open(path, "w", encoding="utf-8") as file:
        for request in requests:
            values = {
                "timestamp": request.timestamp_ms,
                "input_length": request.input_length,
                "output_length": request.output_length,
                "hash_ids": request.hash_ids,
                **({"hash_block_size": request.hash_block_size} if has_size else {}),
                **({"after": request.after, "pause_ms": request.pause_ms} if has_waits else {}),
            }
            file.write(json.dumps(values) + "\n")
