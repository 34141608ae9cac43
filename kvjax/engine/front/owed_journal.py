"""A file of the requests that a process owes, right at any moment: whoever finds it can take them up.

Flow:    accepted requests, tokens of steps, answers -> [OwedJournal] -> file -> [read_journal] -> OwedRequests
Source:  docs/clusters.md has the format

The file grows by whole lines, each of one write; a last line that a crash cut short is left out. Where it has grown
much beyond what is owed it is written anew beside the old one, which it then replaces. Its mode is 0600, since it has
prompts. The kernel has what was written, so a process that is killed loses nothing; nothing is forced to the disk.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvjax.engine.requests.outputs import StepOutputs
from kvjax.engine.requests.owed_request import OwedRequest

VERSION = 1
NOTE_S = 0.25  # tokens go to the file so often; those that it lacks are computed again
LEAST_BYTES = 1 << 24  # a smaller file is not written anew
GROWTH = 4  # nor one that has not grown by this


@dataclass(frozen=True)
class Journal:
    """What a file says."""

    run: int = 0  # the how manieth start of its processes wrote it
    turn: int = 0  # the last that its process had heard of
    owed: dict[str, OwedRequest] = field(default_factory=dict)  # by id, in the order of their acceptance


class OwedJournal:
    """The file of one process. Methods are for any thread."""

    def __init__(
        self, path: Path, run: int, owed: Iterable[OwedRequest] = (), clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes the place of the file at `path`, with these requests.

        Raises:
            OSError: it cannot be written. What was there is as it was.
        """
        self.path = path
        self.turn = 0
        self._run = run
        self._owed = {one.request_id: one for one in owed}
        self._made: dict[str, tuple[list[int], list[float]]] = {}  # tokens and logprobs beyond those of `_owed`
        self._unwritten: dict[str, tuple[list[int], list[float]]] = {}
        self._clock = clock
        self._lock = threading.Lock()
        self._written_s = clock()
        self._write_anew()

    @property
    def num_owed(self) -> int:
        """Requests that are not answered."""
        return len(self._owed)

    def owes(self, request_id: str) -> bool:
        """Whether that request is not answered."""
        return request_id in self._owed

    def accept(self, requests: Sequence[OwedRequest]) -> None:
        """They are owed once this returns."""
        if not requests:
            return
        with self._lock:
            self._owed |= {one.request_id: one for one in requests}
            self._write([{"accept": one.to_json()} for one in requests])

    def note(self, outputs: StepOutputs) -> None:
        """Tokens of a step, but for those that end a request."""
        ended = outputs.results
        columns = zip(outputs.request_ids.tolist(), outputs.token_ids.tolist(), outputs.logprobs.tolist(), strict=True)
        with self._lock:
            for place, (request_id, token_id, logprob) in enumerate(columns):
                owed = self._owed.get(request_id)
                if place in ended or owed is None or owed.begins_anew:
                    continue
                for made in (self._made, self._unwritten):
                    tokens, logprobs = made.setdefault(request_id, ([], []))
                    tokens.append(token_id)
                    logprobs.append(logprob)
            if self._unwritten and self._clock() - self._written_s >= NOTE_S:
                self._write([])

    def end(self, request_ids: Sequence[str]) -> None:
        """They are answered, or will never be."""
        if not request_ids:
            return
        with self._lock:
            for name in request_ids:
                for known in (self._owed, self._made, self._unwritten):
                    known.pop(name, None)  # type: ignore[attr-defined]
            self._write([{"end": list(request_ids)}])

    def flush(self) -> str:
        """Everything is in the file; a word about it."""
        with self._lock:
            self._write([])
        return f"the {self.num_owed} requests that are owed are in {self.path}"

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self._unwritten:
            lines = [{"turn": self.turn, "tokens": self._unwritten}, *lines]
            self._unwritten = {}
        self._written_s = self._clock()
        data = b"".join(map(_line, lines))
        if data:
            _write_all(self._file, data)
        self._num_bytes += len(data)
        if self._num_bytes > max(LEAST_BYTES, GROWTH * self._least_bytes):
            os.close(self._file)
            self._write_anew()

    def _write_anew(self) -> None:
        for name, (tokens, logprobs) in self._made.items():
            one = self._owed[name]
            self._owed[name] = one.with_output((*one.output_token_ids, *tokens), (*one.logprobs, *logprobs))
        self._made = {}
        head = {"kvjax": "owed requests", "version": VERSION, "run": self._run, "turn": self.turn}
        data = _line(head) + b"".join(_line({"accept": one.to_json()}) for one in self._owed.values())
        new = self.path.with_name(f"{self.path.name}.new")
        new.unlink(missing_ok=True)
        self._file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        _write_all(self._file, data)
        new.replace(self.path)
        self._num_bytes = self._least_bytes = len(data)


def read_journal(path: Path) -> Journal:
    """What the file at `path` says; an empty one if there is none.

    Raises:
        ValueError: it is another file, or damaged before its last line.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Journal()
    lines = data.split(b"\n")[:-1]  # the last is empty, or cut short
    try:
        head, *rest = map(json.loads, lines)
        if head["kvjax"] != "owed requests" or head["version"] != VERSION:
            raise ValueError(f"expected version {VERSION}, got {head}")
        turn, owed, made = head["turn"], {}, {}
        for line in rest:
            turn = line.get("turn", turn)
            if "accept" in line:
                one = OwedRequest.from_json(line["accept"])
                owed[one.request_id] = one
                made[one.request_id] = [*one.output_token_ids], [*one.logprobs]
            for name, (tokens, logprobs) in line.get("tokens", {}).items():
                made[name][0].extend(tokens)
                made[name][1].extend(logprobs)
            for name in line.get("end", ()):
                owed.pop(name, None)
        requests = {name: one.with_output(tuple(made[name][0]), tuple(made[name][1])) for name, one in owed.items()}
        return Journal(head["run"], turn, requests)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"expected a file of owed requests at {path}, got another, or a damaged one: {error}"
        ) from error


def newest(journals: Sequence[Journal]) -> Journal:
    """What the processes owe together, of the journal of each: that of process 0, if it is of the last run.

    Process 0 accepts before the others do, and answers before they know of it; without its journal that of the process
    that had heard most counts. Tokens are those of whoever noted most.
    """
    run = max(one.run for one in journals)
    last = [one for one in journals if one.run == run]
    best = journals[0] if journals[0].run == run else max(last, key=lambda one: one.turn)
    owed = {
        name: max((one.owed[name] for one in last if name in one.owed), key=lambda own: len(own.output_token_ids))
        for name in best.owed
    }
    return Journal(run, best.turn, owed)


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


__all__ = ["Journal", "OwedJournal", "newest", "read_journal"]
