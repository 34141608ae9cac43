"""The file of recorded calls: what is in it, and how a manager's arguments and answers are written.

Flow:    CallRecorder -> [CallLogWriter] -> file -> [read_call_log] -> replay_calls

A gzip file of CBOR items, each behind its length in 4 big-endian bytes:

    {"format": "kvjax-calls", "version": 1, "state": bytes}    the manager when recording began (manager_state.py)
    ["request", id, {...}]                                     a request that no record described yet
    ["sync", ids, [tokens, ...], ids, [computed, ...]]         what was appended to requests, and what they computed
    ["call", method, [arguments], {named ones}, answer]        or {"error": class name} in place of the answer

Numbers, text, bytes and lists stand for themselves; a map with one key for anything else:

    {"request": id}      {"blocks": [int32 bytes per group]}      {"array": [dtype, shape, bytes]}
    {"rows": ids}        rows of the request table, which differ between managers, by the requests that own them
    {"origins": [...]}   a predicate, as the (salt, adapter, weight version) triples that it holds for
    {"lora": [name, path, id]}  {"value": [class name, field, ...]}    any other frozen value, in answers only
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import cbor2
import numpy as np

from kvjax.core.hashing.block_origin import BlockOrigin
from kvjax.core.hashing.extra_keys import LoRARequest
from kvjax.core.manager.pins import PinnedPrefix
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.step.step_plan import TableUpdate
from kvjax.errors import CallLogError

FORMAT, VERSION = "kvjax-calls", 1
LENGTH_BYTES = 4
INLINE = (bool, int, float, str, bytes)


class CallLogWriter:
    """An open file of calls. `write` costs some 10 us and 1 us a number."""

    def __init__(self, path: str | Path, state: bytes) -> None:
        self._file = gzip.GzipFile(path, "wb", compresslevel=1)
        self.write({"format": FORMAT, "version": VERSION, "state": state})

    def write(self, item: Any) -> None:
        """Adds an item."""
        data = cbor2.dumps(item)
        self._file.write(len(data).to_bytes(LENGTH_BYTES, "big"))
        self._file.write(data)

    @property
    def is_closed(self) -> bool:
        """Whether the file has ended."""
        return self._file.closed

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


def read_call_log(path: str | Path) -> tuple[bytes, Iterator[list[Any]]]:
    """The state that a file of calls begins with, and its records.

    Raises:
        CallLogError: no file of calls, one of another version, or (while records are read) one that ends early.
        OSError: the file cannot be read.
    """
    items = _items(path)
    head = next(items, None)
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        raise CallLogError(f"{path}: expected a file of recorded calls, got another")
    if head.get("version") != VERSION:
        raise CallLogError(f"{path}: expected calls of version {VERSION}, got version {head.get('version')!r}")
    return head["state"], items


def _items(path: str | Path) -> Iterator[Any]:
    with gzip.open(path, "rb") as file:
        num_items = 0
        while True:
            try:
                length = file.read(LENGTH_BYTES)
                if not length:
                    return
                data = file.read(int.from_bytes(length, "big"))
                item = cbor2.loads(data)
            except gzip.BadGzipFile as error:
                raise CallLogError(f"{path}: expected a file of recorded calls, got another ({error})") from error
            except Exception as error:  # it ends early, or holds anything
                raise CallLogError(f"{path}: expected a whole file, got one damaged at item {num_items}") from error
            num_items += 1
            yield item


# -- arguments and answers --------------------------------------------------------------------------------------------


class CallEncoding:
    """How arguments and answers of one manager's calls are written and read."""

    def __init__(self, request_table: RequestTable, known_origins: Callable[[], list[BlockOrigin]]) -> None:
        self._table = request_table
        self._known_origins = known_origins

    def encode(self, value: Any) -> Any:
        """The value as plain data.

        Raises:
            NotImplementedError: it is of a class that no call has among its arguments.
        """
        if value is None or type(value) in INLINE:
            return value
        if isinstance(value, np.ndarray):
            return {"array": [value.dtype.str, list(value.shape), value.tobytes()]}
        if isinstance(value, TableUpdate):
            return {"value": ["TableUpdate", *self._update(value)]}
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, list | tuple):
            return [self.encode(part) for part in value]
        if isinstance(value, set | frozenset):
            return sorted(value)
        if isinstance(value, dict):
            return {"dict": [[self.encode(key), self.encode(part)] for key, part in value.items()]}
        if isinstance(value, Request):
            return {"request": value.request_id}
        if isinstance(value, KVCacheBlocks):
            return {"blocks": [value.num_shared_tokens, *(ids.astype("<i4").tobytes() for ids in value.block_ids)]}
        if isinstance(value, LoRARequest):
            return {"lora": [value.name, value.path, value.adapter_id]}
        if is_dataclass(value):
            parts = [self.encode(getattr(value, field.name)) for field in fields(value)]
            return {"value": [type(value).__name__, *parts]}
        if callable(value):
            matching = [origin for origin in self._known_origins() if value(origin)]
            return {"origins": [self.encode([o.cache_salt, o.lora, o.weight_version]) for o in matching]}
        raise NotImplementedError(f"a {type(value).__name__} cannot be recorded as part of a call")

    def _update(self, update: TableUpdate) -> list[Any]:
        """The parts of an update, none if it is empty."""
        if not update.rows.size:
            return []
        return [self.rows(update.rows), update.columns.tolist(), update.block_ids.tolist()]

    def rows(self, rows: Any) -> Any:
        """Rows by the requests that own them; as they are where one is owned by none."""
        requests = self._table.requests
        index = np.asarray(rows)
        if index.ndim != 1 or (index.size and (index.dtype.kind not in "iu" or index.min() < 0)):
            return self.encode(rows)
        if index.size and (index.max() >= len(requests) or any(requests[row] is None for row in index.tolist())):
            return self.encode(rows)
        return {"rows": [requests[row].request_id for row in index.tolist()]}  # type: ignore[union-attr]

    def decode(self, plain: Any, requests: dict[str, Request], no_blocks: KVCacheBlocks) -> Any:
        """An argument out of plain data."""
        if isinstance(plain, list):
            return [self.decode(part, requests, no_blocks) for part in plain]
        if not isinstance(plain, dict):
            return plain
        ((kind, content),) = plain.items()
        if kind == "request":
            return requests[content]
        if kind == "rows":
            return np.array([self._table.row_of(request_id) for request_id in content], np.int64)
        if kind == "blocks":
            num_shared, *by_group = content
            ids = tuple(np.frombuffer(of_group, "<i4").astype(np.int32) for of_group in by_group)
            return KVCacheBlocks(ids, no_blocks.pools, num_shared)
        if kind == "array":
            dtype, shape, data = content
            return np.frombuffer(data, dtype).reshape(shape)
        if kind == "lora":
            return LoRARequest(*content)
        if kind == "dict":
            return {key: self.decode(part, requests, no_blocks) for key, part in content}
        if kind == "origins":
            triples = [self.decode(triple, requests, no_blocks) for triple in content]
            return {BlockOrigin(*triple) for triple in triples}.__contains__
        if kind == "value" and content[0] == "PinnedPrefix":
            pin_id, num_tokens, block_ids = content[1:]
            return PinnedPrefix(pin_id, num_tokens, tuple(map(tuple, block_ids)))
        if kind == "value" and content[0] == "PageCopies":
            return PageCopies(*(self.decode(part, requests, no_blocks) for part in content[1:]))
        raise CallLogError(f"expected an argument of a known kind, got {kind!r}")
