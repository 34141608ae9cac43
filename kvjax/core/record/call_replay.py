"""Makes recorded calls again and compares every answer.

Flow:    file of CallRecorder -> [replay_calls] -> a manager in the state that the recorded one reached
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.record.call_log import CallEncoding, read_call_log
from kvjax.core.record.call_recorder import NOT_RECORDED, known_origins
from kvjax.core.record.recorded_request import decode_request
from kvjax.core.requests.request import Request
from kvjax.errors import CallLogError


@dataclass(frozen=True)
class ReplayedCalls:
    """What a file of calls led to: every answer was as recorded."""

    manager: KVCacheManager
    num_calls: dict[str, int]  # by method
    is_complete: bool  # whether all calls of the file were made


def replay_calls(
    path: str | Path,
    on_call: Callable[[KVCacheManager], object] = lambda manager: None,
    should_stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> ReplayedCalls:
    """Makes all calls of a file again, on a manager restored from its head.

    Args:
        path: what a `CallRecorder` wrote.
        on_call: called with the manager after each call.
        should_stop: asked before each; once it says so, the rest of the file is left.
        options: as of `KVCacheManager.restore`: objects that a file does not hold.

    Raises:
        CallLogError: no file of calls, a damaged one, or an answer that differs from the recorded one.
        ValueError: as `KVCacheManager.restore`.
        OSError: the file cannot be read.
    """
    state, records = read_call_log(path)
    player = _Player(KVCacheManager.restore(state, **options), str(path))
    is_complete = True
    for record in records:
        if should_stop():
            is_complete = False
            break
        if player.play(record):
            on_call(player.manager)
    return ReplayedCalls(player.manager, dict(player.num_calls), is_complete)


class _Player:
    """The manager, and its requests by id."""

    def __init__(self, manager: KVCacheManager, path: str) -> None:
        self.manager = manager
        self.num_calls: Counter[str] = Counter()
        self._path = path
        self._encoding = CallEncoding(manager.request_table, lambda: known_origins(manager))
        self._requests: dict[str, Request] = {r.request_id: r for r in manager.request_table.requests if r is not None}

    def play(self, record: list[Any]) -> bool:
        """One record; whether it was a call."""
        kind, *parts = record
        try:
            if kind == "request":
                self._requests[parts[0]] = decode_request(*parts)
            elif kind == "sync":
                self._sync(*parts)
            else:
                self._call(*parts)
        except (KeyError, TypeError, AttributeError) as error:  # a record names what is not there
            raise CallLogError(f"{self._path}: expected a record that can be played, got {record!s:.200}") from error
        return kind == "call"

    def _sync(self, grown: list[str], tokens: list[list[int]], moved: list[str], computed: list[int]) -> None:
        for request_id, new in zip(grown, tokens, strict=True):
            self._requests[request_id].append_output_token_ids(new)
        for request_id, num_computed in zip(moved, computed, strict=True):
            self._requests[request_id].num_computed_tokens = num_computed

    def _call(self, name: str, args: list[Any], named: dict[str, Any], expected: Any) -> None:
        if name.startswith("_") or name in NOT_RECORDED:
            raise CallLogError(f"{self._path}: expected a call that is recorded, got {name!r}")
        answer = self._answer(name, [self._decode(a) for a in args], {k: self._decode(v) for k, v in named.items()})
        self.num_calls[name] += 1
        if answer != expected:
            raise CallLogError(
                f"{self._path}, call {self.num_calls.total()}: expected {name} to answer as recorded, "
                f"{expected!s:.200}, got {answer!s:.200}"
            )
        if name == "free" and answer is None:  # a request that comes back is described again
            (plain,) = args or named.values()
            self._requests.pop(plain["request"], None)

    def _decode(self, plain: Any) -> Any:
        return self._encoding.decode(plain, self._requests, self.manager.empty_kv_cache_blocks)

    def _answer(self, name: str, args: list[Any], named: dict[str, Any]) -> Any:
        method = getattr(self.manager, name)
        try:
            answer = method(*args, **named)
        except Exception as error:
            return {"error": type(error).__name__}
        for value in answer if isinstance(answer, tuple) else ():
            if isinstance(value, Request):  # made by the manager
                self._requests[value.request_id] = value
        return self._encoding.encode(answer)
