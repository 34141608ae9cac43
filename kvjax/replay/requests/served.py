"""The trace of what an engine served, for `kvjax plan --trace` and `kvjax replay`.

Flow:    LLMEngine.add_observer -> [ServedTrace] -> requests -> write_trace, load_of
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from kvjax.replay.requests.trace import TRACE_BLOCK_SIZE, TraceRequest


class Arrival(Protocol):
    """When a request arrived, as its account says: `kvjax.engine.RequestStats`."""

    @property
    def arrival_time_s(self) -> float:
        """Seconds of a clock that never goes back."""


class EndedRequest(Protocol):
    """What is read of a `kvjax.engine.GenerationResult`."""

    @property
    def prompt_token_ids(self) -> np.ndarray:  # int32[num_prompt_tokens]
        """At least one."""

    @property
    def output_token_ids(self) -> np.ndarray:  # int32[num_output_tokens]
        """The answer."""

    @property
    def stats(self) -> Arrival:
        """The account."""


class ServedTrace:
    """An engine's observer that keeps lengths, times and hash ids of the requests that ended; no tokens.

    It belongs to the engine's thread. A prompt costs some microseconds a block, and 100 bytes a block that is new.
    Prompts share what their tokens share: salts, adapters and images are not looked at.
    """

    def __init__(self, hash_block_size: int = TRACE_BLOCK_SIZE) -> None:
        """Hash ids of `hash_block_size` tokens.

        Raises:
            ValueError: `hash_block_size` is below 1.
        """
        if hash_block_size < 1:
            raise ValueError(f"expected hash_block_size >= 1, got {hash_block_size}")
        self._hash_block_size = hash_block_size
        self._ids: dict[tuple[int, bytes], int] = {}  # (id of the block before, digest of the tokens) -> id
        self._ended: list[tuple[float, TraceRequest]] = []  # with the time of arrival, in seconds

    @property
    def requests(self) -> list[TraceRequest]:
        """In order of their arrival, the first at time 0."""
        ended = sorted(self._ended, key=itemgetter(0))
        return [replace(request, timestamp_ms=int((time_s - ended[0][0]) * 1e3)) for time_s, request in ended]

    def step_ended(self, stats: object, outputs: Any) -> None:
        """Adds the requests that the step ended."""
        results: Mapping[str, EndedRequest] = outputs.results
        for result in results.values():
            self.request_aborted(result)

    def request_aborted(self, result: EndedRequest) -> None:
        """Adds a request, with the answer that it has."""
        prompt, answer = result.prompt_token_ids, result.output_token_ids
        request = TraceRequest(0, prompt.size, answer.size, self._hash_ids(prompt), self._hash_block_size)
        self._ended.append((result.stats.arrival_time_s, request))

    def _hash_ids(self, token_ids: np.ndarray) -> tuple[int, ...]:
        before, ids = -1, []
        for start in range(0, token_ids.size, self._hash_block_size):
            tokens = token_ids[start : start + self._hash_block_size].tobytes()
            before = self._ids.setdefault((before, blake2b(tokens, digest_size=16).digest()), len(self._ids))
            ids.append(before)
        return tuple(ids)


__all__ = ["ServedTrace"]
