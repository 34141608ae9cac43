"""Running requests as arrays: a row per request, so that one step over all of them is a few vector operations.

Flow:    Request -> [RequestTable] -> KVCacheManager.plan_step, StepPlan -> sampled tokens -> append_tokens
Source:  ARCHITECTURE.md, "Structure of arrays"

A row is free, owned by a request whose attributes are views of it, or retiring (row_allocator.py).

Invariants (`check_invariants`; the test suite runs it after every test):

    I1  rows by request id, requests and their ids by row, requests' own rows and the row allocator agree
    I2  a row that is not owned has all counts 0
    I3  an owned row has 1 <= num_prompt_tokens <= num_tokens <= columns, and num_computed_tokens >= 0
    I4  block_hashes[row] is the request's own list, with num_hashed_blocks[row] = num_tokens // block size entries,
        and last_hashes[row] is the last of them; without a hasher 0 and None, whatever somebody else puts there
    I5  num_skipping rows are marked in `skips_registration`, all of them owned
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash, BlockHasher
from kvjax.core.requests.request import Request
from kvjax.core.requests.row_allocator import RowAllocator
from kvjax.core.requests.token_ids import MAX_TOKEN_ID, as_token_ids
from kvjax.core.tables.row_table import RowTable
from kvjax.errors import InvariantError, UnknownRequestError

MIN_ROWS = 16
NEVER = np.iinfo(np.int64).max
MOST_DIGITS = 18  # of the number of a fork
COUNTS = (  # by row
    "num_tokens",
    "num_prompt_tokens",
    "num_computed_tokens",
    "num_start_tokens",
    "num_hashed_blocks",
    "num_encoder_tokens",
)


@dataclass(frozen=True)
class RequestState:
    """One request's part of a snapshot. Rows are left out: they do not matter to what the requests mean."""

    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed_tokens: int
    num_encoder_tokens: int
    block_hashes: tuple[BlockHash, ...]
    skips_registration: bool = False


class RequestTable:
    """Table of one manager's running requests, used from one thread. `append_tokens` costs some 50 ns a row.

    Memory is that of the tokens which running requests have. The arrays are replaced when the table grows: read them
    through the table each time, write none but `num_computed_tokens`, and copy what you pass to jax.
    """

    def __init__(self, max_num_reqs: int | None = None, max_model_len: int | None = None):
        """`max_num_reqs` is the first number of rows, a hint; no request may have more than `max_model_len` tokens.

        Raises:
            ValueError: either is below 1.
        """
        for name, value in (("max_num_reqs", max_num_reqs), ("max_model_len", max_model_len)):
            if value is not None and value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        rows = max_num_reqs or MIN_ROWS
        self.max_model_len = max_model_len
        self._tokens = RowTable(1, rows, max_model_len)
        self.num_tokens = self._tokens.lengths
        self.num_prompt_tokens = np.zeros(rows, np.int64)
        self.num_computed_tokens = np.zeros(rows, np.int64)
        self.num_start_tokens = np.zeros(rows, np.int64)  # computed tokens that a request was admitted with
        self.num_hashed_blocks = np.zeros(rows, np.int64)
        self.num_encoder_tokens = np.zeros(rows, np.int64)
        self.requests: list[Request | None] = [None] * rows
        self.request_ids = np.full(rows, None, np.object_)  # text; None where a row is not owned
        self.block_hashes: list[list[BlockHash]] = [[] for _ in range(rows)]
        self.last_hashes = np.full(rows, None, np.object_)  # of each row's last full block
        self.skips_registration = np.zeros(rows, np.bool_)  # rows whose blocks become no hits
        self.num_skipping = 0  # such rows
        self._has_extra_keys = np.zeros(rows, np.bool_)
        self._hasher: BlockHasher | None = None  # of the requests that have one, unless they differ
        self._hashers_differ = False
        self._checked_rows = b""  # the last rows that were found good, until one is released
        self._next_hash_at = np.zeros(rows, np.int64)  # num_tokens at which an owned row's next block is full
        self._scratch = np.zeros(rows, np.int64)
        self._rows = RowAllocator(rows)
        self._row_by_id: dict[str, int] = {}
        self._last_number = 0  # the largest that an id `<text>.<number>` ends in, of a request that is here or gone

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def token_ids(self) -> np.ndarray:  # int32[rows, columns]
        """Tokens of the rows; what is behind a row's `num_tokens` means nothing."""
        return self._tokens.entries[0]

    def tokens_of(self, row: int) -> np.ndarray:  # int32[num_tokens]
        """The tokens of a row, as a view."""
        start = row * self._tokens.stride
        return self._tokens.flat[start : start + self.num_tokens.item(row)]

    @property
    def capacity(self) -> int:
        """Rows, owned or not."""
        return len(self.requests)

    def __len__(self) -> int:
        return len(self._row_by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_by_id

    def row_of(self, request_id: str) -> int:
        """Row of a request.

        Raises:
            UnknownRequestError: no request of that id owns a row.
        """
        row = self._row_by_id.get(request_id)
        if row is None:
            raise UnknownRequestError(f"expected the id of a request in the table, got {request_id!r}")
        return row

    def new_ids(self, request_id: str, n: int) -> list[str]:
        """Ids `<request_id>.<number>` that no request which is or was in the table has; none is given twice."""
        first = self._last_number + 1
        self._last_number += n
        return [f"{request_id}.{number}" for number in range(first, first + n)]

    def add(self, request: Request) -> int:
        """Gives the request a row, copies its state there and returns the row.

        Raises:
            ValueError: the request owns a row, its id is in the table, or it has more than max_model_len tokens.
                Nothing is changed.
        """
        request_id, table = request.request_id, self._tokens
        if request.row >= 0:
            raise ValueError(f"request {request_id!r} owns row {request.row} already; release it first")
        if request_id in self._row_by_id:
            raise ValueError(f"expected a request id that is not in the table, got {request_id!r}")
        tokens = request.stored_tokens()
        num_tokens = tokens.size
        self._check_length(num_tokens, request_id)
        table.reserve_columns(num_tokens)
        if not self._rows.num_free:
            self._double_rows()
        row = self._rows.take()
        start = row * table.stride
        table.flat[start : start + num_tokens] = tokens
        self.num_tokens[row] = num_tokens
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        self.requests[row] = request
        self.request_ids[row] = request_id
        self.block_hashes[row] = request.block_hashes
        self._row_by_id[request_id] = row
        if "." in request_id:
            self._note_number(request_id)
        self._has_extra_keys[row] = request.has_extra_keys
        if request.skip_writing_prefix_cache:
            self.skip_registration(row)
        request.move_to_row(self, row)
        self._note_hasher(request.block_hasher)
        self._note_hashes(row, request)
        return row

    def release(self, request: Request) -> None:
        """Copies the row's state back to the request and gives the row up.

        Raises:
            UnknownRequestError: the request owns no row of this table. Nothing is changed.
        """
        row = request.row
        if row < 0 or row >= self.capacity or self.requests[row] is not request:
            raise UnknownRequestError(f"request {request.request_id!r} owns no row of this table")
        tokens = self.tokens_of(row)
        request.move_from_row(tokens, self.num_prompt_tokens.item(row), self.num_computed_tokens.item(row))
        self._tokens.discard_row(row, tokens.size)
        self.num_tokens[row] = self.num_prompt_tokens[row] = self.num_computed_tokens[row] = 0
        self.num_start_tokens[row] = self.num_hashed_blocks[row] = self.num_encoder_tokens[row] = 0
        self.requests[row] = self.request_ids[row] = None
        self.block_hashes[row] = []
        self.last_hashes[row] = None
        if self.num_skipping:
            self.num_skipping -= self.skips_registration.item(row)
            self.skips_registration[row] = False
        self._checked_rows = b""
        del self._row_by_id[request.request_id]
        self._rows.give_back(row)
        if not self._row_by_id:
            self._hasher, self._hashers_differ = None, False

    def skip_registration(self, row: int) -> None:
        """No block that an owned row fills from here on becomes a prefix hit, until the row is released."""
        if not self.skips_registration[row]:
            self.skips_registration[row] = True
            self.num_skipping += 1

    # -- fences -------------------------------------------------------------------------------------------------------

    def open_step(self, rows: np.ndarray) -> int:  # rows: integer[num_rows], distinct
        """Notes that a step in flight names these rows, and returns its id for `close_step`.

        Raises:
            ValueError: a row is unknown, not owned or named twice. Nothing is changed.
        """
        rows, _ = self.owned_rows(rows)
        return self._rows.open_step(rows)

    def close_step(self, step_id: int) -> None:
        """Ends a step, whose results are read: rows released meanwhile may be issued again.

        Raises:
            ValueError: no step of that id is open. Nothing is changed.
        """
        self._rows.close_step(step_id)

    # -- tokens -------------------------------------------------------------------------------------------------------

    def append_tokens(
        self,
        rows: np.ndarray,  # integer[num_rows], distinct
        token_ids: np.ndarray,  # integer[num_rows] in [0, 2**31)
    ) -> None:
        """Appends one token to each row and hashes the blocks that become full.

        Raises:
            ValueError: a row is unknown, not owned, named twice or at max_model_len, or a token is not an integer in
                [0, 2**31). Nothing is changed.
        """
        rows, lengths = self.owned_rows(rows)
        tokens = as_token_ids(token_ids)
        if rows.size != tokens.size:
            raise ValueError(f"expected one token per row, got {tokens.size} tokens for {rows.size} rows")
        if not rows.size:
            return
        longest = int(lengths.max())
        if self.max_model_len is not None and longest >= self.max_model_len:
            self._check_length(longest + 1, self._request_of(int(rows[lengths.argmax()])).request_id)
        self._tokens.reserve_columns(longest + 1)
        self._tokens.flat[rows * self._tokens.stride + lengths] = tokens  # faster than an index of two
        lengths += 1
        self.num_tokens[rows] = lengths
        full = rows[lengths >= self._next_hash_at[rows]]
        if full.size:
            self._hash_full_blocks(full)

    def append_run(self, row: int, token_ids: Any) -> None:  # token_ids: integer[n] in [0, 2**31)
        """Appends several tokens to one owned row and hashes the blocks that become full.

        Raises:
            ValueError: as `append_tokens`. Nothing is changed.
        """
        tokens = as_token_ids(token_ids)
        request = self._request_of(row)
        start = int(self.num_tokens[row])
        end = start + tokens.size
        self._check_length(end, request.request_id)
        self._tokens.reserve_columns(end)
        self.token_ids[row, start:end] = tokens
        self.num_tokens[row] = end
        if end >= self._next_hash_at[row]:
            request.extend_block_hashes()
            self._note_hashes(row, request)

    def advance(self, rows: np.ndarray, num_tokens: np.ndarray | int) -> None:  # rows distinct
        """Adds to the computed tokens of each row; negative after a rejection.

        Raises:
            ValueError: a count would fall below 0. Nothing is changed.
        """
        counts = self.num_computed_tokens[rows] + num_tokens
        if counts.size and int(counts.min()) < 0:
            raise ValueError(f"expected num_computed_tokens >= 0, got {int(counts.min())}")
        self.num_computed_tokens[rows] = counts

    def _hash_full_blocks(self, rows: np.ndarray) -> None:
        """Hashes the next block of each row, all rows of one hasher at once."""
        if not self._hashers_differ:
            assert self._hasher is not None  # a row without a hasher has no next block to hash
            self._hash_rows(self._hasher, rows)
            return
        hashers: list[Any] = [self._request_of(row).block_hasher for row in rows.tolist()]
        for hasher in set(hashers):
            self._hash_rows(hasher, rows[[other == hasher for other in hashers]])

    def _hash_rows(self, hasher: BlockHasher, rows: np.ndarray) -> None:
        size = hasher.block_size
        starts = self.num_hashed_blocks[rows] * size
        first = rows * self._tokens.stride + starts
        blocks = self._tokens.flat[first[:, None] + np.arange(size)]
        extra_keys = None
        if np.count_nonzero(self._has_extra_keys[rows]):
            requests = map(self._request_of, rows.tolist())
            extra_keys = [r.extra_keys_of_block(s, s + size) for r, s in zip(requests, starts.tolist(), strict=True)]
        parents = self.last_hashes[rows].tolist()
        if None in parents:
            parents = [hasher.none_hash if parent is None else parent for parent in parents]
        hashes = hasher.hash_blocks(blocks, parents, extra_keys)
        for row, new in zip(rows.tolist(), hashes, strict=True):
            self.block_hashes[row].append(new)
        self.last_hashes[rows] = np.fromiter(hashes, np.object_, len(hashes))
        self.num_hashed_blocks[rows] += 1
        self._next_hash_at[rows] += size

    def _note_number(self, request_id: str) -> None:
        """Remembers the number that `<text>.<number>` ends in, unless it is too large to be that of a fork."""
        number = request_id.rpartition(".")[2]
        if number.isdecimal() and len(number) <= MOST_DIGITS:
            self._last_number = max(self._last_number, int(number))

    def _note_hasher(self, hasher: BlockHasher | None) -> None:
        """Remembers whether all requests that have a hasher have the same."""
        if hasher is self._hasher:
            return
        if self._hasher is None:
            self._hasher = hasher
        elif hasher is not None and hasher != self._hasher:
            self._hashers_differ = True

    # -- checks and growth --------------------------------------------------------------------------------------------

    def owned_rows(self, rows: Any) -> tuple[np.ndarray, np.ndarray]:
        """`rows` as int64[n], checked to be known, owned and distinct, and their num_tokens.

        Raises:
            ValueError: they are not.
        """
        index = np.asarray(rows)
        if index.ndim != 1 or (index.size and index.dtype.kind not in "iu"):
            raise ValueError(f"expected rows as a row of integers, got {index.dtype}{list(index.shape)}")
        index = index.astype(np.int64, copy=False)
        if not index.size:
            return index, index
        key = index.tobytes()
        if key == self._checked_rows:
            return index, self.num_tokens[index]
        if int(index.view(np.uint64).max()) >= self.capacity:  # a negative row is a huge one
            raise ValueError(f"expected rows in [0, {self.capacity}), got {int(index.min())} to {int(index.max())}")
        lengths = self.num_tokens[index]
        if not lengths.min():
            raise ValueError(f"expected rows that a request owns, got row {int(index[lengths.argmin()])}")
        order = np.arange(index.size)
        self._scratch[index] = order
        if not (self._scratch[index] == order).all():
            raise ValueError(f"expected distinct rows, got {int(index.size)} with repetitions")
        self._checked_rows = key
        return index, lengths

    def _request_of(self, row: int) -> Request:
        request = self.requests[row] if 0 <= row < len(self.requests) else None
        if request is None:
            raise ValueError(f"expected rows that a request owns, got row {row}")
        return request

    def _check_length(self, num_tokens: int, request_id: str) -> None:
        if self.max_model_len is not None and num_tokens > self.max_model_len:
            raise ValueError(
                f"request {request_id!r}: expected at most max_model_len = {self.max_model_len} tokens, "
                f"got {num_tokens}"
            )

    def _note_hashes(self, row: int, request: Request) -> None:
        """Sets what the row knows of its hashes from the request's list."""
        hasher, hashes = request.block_hasher, request.block_hashes
        num_hashed = 0 if hasher is None else len(hashes)
        self.num_hashed_blocks[row] = num_hashed
        self.last_hashes[row] = hashes[-1] if num_hashed else None
        self._next_hash_at[row] = NEVER if hasher is None else (num_hashed + 1) * hasher.block_size

    def _double_rows(self) -> None:
        old, new = self.capacity, 2 * self.capacity
        self._tokens.reserve_rows(new)
        self.num_tokens = self._tokens.lengths
        for name in (*COUNTS[1:], "_next_hash_at", "_scratch"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(old, np.int64)))
        self.requests += [None] * old
        self.request_ids = np.append(self.request_ids, np.full(old, None, np.object_))
        self.last_hashes = np.append(self.last_hashes, np.full(old, None, np.object_))
        self.skips_registration = np.append(self.skips_registration, np.zeros(old, np.bool_))
        self._has_extra_keys = np.append(self._has_extra_keys, np.zeros(old, np.bool_))
        self.block_hashes += [[] for _ in range(old)]
        self._rows.grow(new)

    # -- inspection ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, RequestState]:
        """State of every request that owns a row, comparable with `==`."""
        return {
            request_id: RequestState(
                token_ids=tuple(self.token_ids[row, : self.num_tokens[row]].tolist()),
                num_prompt_tokens=int(self.num_prompt_tokens[row]),
                num_computed_tokens=int(self.num_computed_tokens[row]),
                num_encoder_tokens=int(self.num_encoder_tokens[row]),
                block_hashes=tuple(self.block_hashes[row]),
                skips_registration=bool(self.skips_registration[row]),
            )
            for request_id, row in sorted(self._row_by_id.items())
        }

    def check_invariants(self) -> None:
        """Checks I1 to I5 and those of the row allocator.

        Raises:
            InvariantError: one of them does not hold.
        """
        owned = [row for row, request in enumerate(self.requests) if request is not None]
        by_id = sorted(self._row_by_id.values())
        _hold(by_id == owned, f"I1: rows by id {by_id}, owned {owned}")
        _hold(self._rows.num_rows == self.capacity, f"I1: {self._rows.num_rows} rows to issue of {self.capacity}")
        self._rows.check_invariants(owned)
        skipping = np.flatnonzero(self.skips_registration).tolist()
        _hold(len(skipping) == self.num_skipping, f"I5: {self.num_skipping} rows counted as skipping, {skipping} do")
        _hold(set(skipping) <= set(owned), f"I5: rows {skipping} skip registration, owned {owned}")
        for row in range(self.capacity):
            self._check_row(row)

    def _check_row(self, row: int) -> None:
        request = self.requests[row]
        request_id = None if request is None else request.request_id
        _hold(self.request_ids[row] == request_id, f"I1: row {row} of {request} has the id {self.request_ids[row]!r}")
        total, prompt, computed, start, hashed, encoder = (int(getattr(self, name)[row]) for name in COUNTS)
        if request is None:
            _hold(
                not any((total, prompt, computed, start, hashed, encoder)), f"I2: row {row} is not owned but has counts"
            )
            _hold(self.last_hashes[row] is None, f"I2: row {row} is not owned but has a hash")
            return
        _hold(request.row == row and self._row_by_id.get(request.request_id) == row, f"I1: row {row} and {request}")
        _hold(1 <= prompt <= total <= self.token_ids.shape[1] and computed >= 0, f"I3: row {row}: {request}")
        _hold(self.block_hashes[row] is request.block_hashes, f"I4: row {row} has another list of hashes")
        hashes = [] if request.block_hasher is None else request.block_hashes
        expected = 0 if request.block_hasher is None else total // request.block_hasher.block_size
        _hold(hashed == len(hashes) == expected, f"I4: row {row}: {hashed} hashes, expected {expected}")
        last = hashes[-1] if hashes else None
        _hold(self.last_hashes[row] == last, f"I4: row {row} has another last hash")


def _hold(condition: bool, message: str) -> None:
    if not condition:
        raise InvariantError(message)


__all__ = ["MAX_TOKEN_ID", "RequestState", "RequestTable"]
