"""Stands in for a manager and writes down every call with its answer.

Flow:    scheduler -> [CallRecorder] -> KVCacheManager; file -> replay_calls

    with CallRecorder(manager, "calls.kvjax") as recorder:
        scheduler = Scheduler(recorder.manager)

What a caller does beside calls (tokens appended, `num_computed_tokens` advanced, by whatever way) is seen before the
next call, by comparison: a manager reads it only then.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

import numpy as np

from kvjax.core.hashing.block_origin import BlockOrigin
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.record.call_log import CallEncoding, CallLogWriter
from kvjax.core.record.recorded_request import encode_request
from kvjax.core.requests.request import Request

# Methods that only read, or hand out live arrays. All other public ones are recorded, whoever adds them.
NOT_RECORDED = ("block_tables", "num_blocks", "snapshot", "check_invariants", "describe", "save_state", "restore")
ROWS_ARGUMENTS = (("plan_step", 0), ("settle_drafts", 0), ("take_back_step", 0))
RequestState = tuple[Request, int, int, int]  # tokens, computed tokens, preemptions


class CallRecorder:
    """A manager's calls, recorded from now on. Used from the manager's thread; each costs some 50 us more.

    Keeps the requests that were looked up until they run: one that is given up while it waits stays until the end.
    """

    def __init__(self, manager: KVCacheManager, path: str | Path) -> None:
        """Writes the manager's state and then its calls to `path`.

        Raises:
            OSError: the file cannot be written.
            NotImplementedError: the manager's state cannot be saved.
        """
        self._manager = manager
        self._table = manager.request_table
        self._encoding = CallEncoding(manager.request_table, lambda: known_origins(manager))
        self._waiting: dict[str, RequestState] = {}  # described, and not running
        self._log = CallLogWriter(path, manager.save_state())
        self._remember_rows()

    @property
    def manager(self) -> KVCacheManager:
        """This recorder, for who expects a manager."""
        return cast(KVCacheManager, self)

    def close(self) -> None:
        """Ends the file. Calls through the recorder are then made and not recorded."""
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._manager, name)
        if name.startswith("_") or name in NOT_RECORDED or not callable(attribute):
            return attribute
        return partial(self._call, name, attribute)

    def _call(self, name: str, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self._log.is_closed:
            return method(*args, **named)
        for value in (*args, *named.values()):
            if isinstance(value, Request):
                self._describe(value)
        self._sync_rows()
        encoding = self._encoding
        given = [encoding.rows(v) if (name, i) in ROWS_ARGUMENTS else encoding.encode(v) for i, v in enumerate(args)]
        given_named = {key: encoding.rows(v) if key == "rows" else encoding.encode(v) for key, v in named.items()}
        try:
            answer = method(*args, **named)
        except Exception as error:
            self._log.write(["call", name, given, given_named, {"error": type(error).__name__}])
            raise
        finally:
            self._remember_rows()
        self._log.write(["call", name, given, given_named, encoding.encode(answer)])
        return answer

    # -- what happened since the last call ----------------------------------------------------------------------------

    def _describe(self, request: Request) -> None:
        """Writes a request down that is new or has changed while it did not run."""
        if request.row >= 0:
            self._waiting.pop(request.request_id, None)
            return
        state = (request, request.num_tokens, request.num_computed_tokens, request.num_preemptions)
        if self._waiting.get(request.request_id) != state:
            self._waiting[request.request_id] = state
            self._log.write(["request", request.request_id, encode_request(request)])

    def _sync_rows(self) -> None:
        """Writes down what running requests have more, or other, than after the last call."""
        table, num_rows = self._table, self._num_tokens.size
        grown = np.flatnonzero(table.num_tokens[:num_rows] != self._num_tokens).tolist()
        moved = np.flatnonzero(table.num_computed_tokens[:num_rows] != self._num_computed).tolist()
        if not grown and not moved:
            return
        tokens = [table.token_ids[row, self._num_tokens[row] : table.num_tokens[row]].tolist() for row in grown]
        computed = table.num_computed_tokens[moved].tolist()
        self._log.write(["sync", self._ids(grown), tokens, self._ids(moved), computed])

    def _ids(self, rows: list[int]) -> list[str]:
        return [request.request_id for row in rows if (request := self._table.requests[row]) is not None]

    def _remember_rows(self) -> None:
        self._num_tokens = self._table.num_tokens.copy()
        self._num_computed = self._table.num_computed_tokens.copy()


def known_origins(manager: KVCacheManager) -> list[BlockOrigin]:
    """What cached blocks and running requests were computed under, as far as the manager can tell."""
    origins = {request.origin: None for request in manager.request_table.requests if request is not None}
    for pool in manager.block_pools:
        if pool.origins is not None:
            origins |= dict.fromkeys(pool.origins.distinct())
    return list(origins)
