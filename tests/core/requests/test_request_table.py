"""The request table: rows are the requests, in bulk as one by one, and outlive no step that names them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvjax.core.hashing.block_hash import ALGORITHMS, BlockHasher
from kvjax.core.hashing.extra_keys import ExtraKeys
from kvjax.core.requests.request import LoRARequest, MultiModalFeature, Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.errors import InvariantError, UnknownRequestError
from tests.core.hashing.plain_hashing import plain_hashes

HASHER = BlockHasher(4, seed="s")


def make_request(request_id: str = "r", num_tokens: int = 5, **options: Any) -> Request:
    return Request(request_id, range(num_tokens), **{"block_hasher": HASHER, **options})


def state(request: Request) -> tuple:
    return (
        request.token_ids.tolist(),
        request.num_prompt_tokens,
        request.num_computed_tokens,
        list(request.block_hashes),
    )


def test_a_request_reads_the_same_in_and_out_of_a_table() -> None:
    request, table = make_request(num_tokens=9), RequestTable()
    request.append_output_token_ids([7, 8])
    request.num_computed_tokens = 6
    before, hashes = state(request), request.block_hashes
    row = table.add(request)
    assert row == request.row == table.row_of("r") == 0
    assert "r" in table
    assert len(table) == 1
    assert table.requests[row] is request
    assert table.block_hashes[row] is request.block_hashes is hashes
    assert state(request) == before
    assert (table.num_tokens[row], table.num_hashed_blocks[row]) == (11, 2)
    table.check_invariants()
    table.release(request)
    assert request.row == -1
    assert "r" not in table
    assert request.block_hashes is hashes
    assert state(request) == before
    table.check_invariants()


def test_attributes_are_views_of_the_row() -> None:
    request, table = make_request(), RequestTable()
    row = table.add(request)
    table.num_computed_tokens[row] = 4
    assert request.num_computed_tokens == 4
    request.num_computed_tokens = 5
    assert table.num_computed_tokens[row] == 5
    view = request.token_ids
    assert np.shares_memory(view, table.token_ids)
    assert not view.flags.writeable
    request.append_output_token_ids(9)
    assert table.num_tokens[row] == 6
    assert table.token_ids[row, 5] == 9


def test_a_released_request_keeps_nothing_of_the_table() -> None:
    table = RequestTable()
    request, other = make_request("a"), make_request("b")
    table.add(request)
    table.release(request)
    table.add(other)
    other.append_output_token_ids([99, 99])
    assert request.token_ids.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("with_keys", [False, True])
def test_bulk_appends_equal_single_ones(algorithm: str, with_keys: bool) -> None:
    """Rows of two hashers and of none, half of them with extra keys."""
    rng = np.random.default_rng(0)
    hashers = [BlockHasher(4, algorithm, seed="s"), BlockHasher(3, algorithm), None]
    table = RequestTable(2)
    requests, prompts = [], []
    for i in range(12):
        keys: dict[str, Any] = {}
        if with_keys and i % 2:
            keys = {"lora": LoRARequest(f"l{i}"), "mm_features": [MultiModalFeature("m", 1, i + 1)], "cache_salt": "x"}
        prompts.append(rng.integers(0, 150_000, i + 2).tolist())
        requests.append(Request(f"r{i}", prompts[-1], block_hasher=hashers[i % 3], **keys))
        table.add(requests[-1])
    for _ in range(20):
        rows = rng.permutation(12)[: rng.integers(0, 13)]
        tokens = rng.integers(0, 150_000, rows.size)
        table.append_tokens(rows, tokens)
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            prompts[row].append(token)
        table.check_invariants()
    for request, tokens in zip(requests, prompts, strict=True):
        assert request.token_ids.tolist() == tokens
        hasher = request.block_hasher
        if hasher is None:
            assert request.block_hashes == []
            continue
        features = ExtraKeys(mm_features=request.mm_features, lora=request.lora, cache_salt=request.cache_salt)
        size = hasher.block_size
        keys_of = [features.of_block(start, start + size) for start in range(0, len(tokens), size)]
        assert request.block_hashes == plain_hashes(algorithm, hasher.none_hash, tokens, size, keys_of)


def test_rows_and_columns_grow() -> None:
    table = RequestTable(1)
    requests = [make_request(str(i), 200 + 100 * i) for i in range(9)]
    assert [table.add(request) for request in requests] == list(range(9))
    assert table.capacity == 16
    assert table.token_ids.shape == (16, 1024)
    for request in requests:
        assert request.token_ids.tolist() == list(range(request.num_tokens))
    table.append_tokens(np.arange(9), np.arange(9))
    requests[8].append_output_token_ids(range(30))
    assert table.token_ids.shape == (16, 2048)
    assert requests[8].output_token_ids.tolist() == [8, *range(30)]
    table.check_invariants()


@pytest.mark.parametrize("bulk", [True, False])
def test_tokens_stay_in_their_row_at_every_length(bulk: bool) -> None:
    """Past the first columns of the table, and a full block at every fourth token."""
    table = RequestTable(3)
    requests = [make_request(name) for name in "ab"]
    rows = np.array([table.add(request) for request in requests])
    columns = table.token_ids.shape[1]
    for length in range(5, columns + 4):
        if bulk:
            table.append_tokens(rows, np.array([length, -length % 7]))
        else:
            requests[0].append_output_token_ids(length)
            requests[1].append_output_token_ids([-length % 7])
        assert table.num_hashed_blocks[rows].tolist() == [(length + 1) // 4] * 2
    table.check_invariants()
    assert requests[0].token_ids.tolist() == list(range(columns + 4))
    assert requests[1].token_ids.tolist() == [0, 1, 2, 3, 4, *(-length % 7 for length in range(5, columns + 4))]


def test_columns_never_exceed_the_model() -> None:
    table = RequestTable(max_model_len=300)
    request = make_request(num_tokens=299)
    table.add(request)
    assert table.token_ids.shape[1] == 300
    table.append_tokens(np.array([0]), np.array([1]))
    for append in (lambda: table.append_tokens(np.array([0]), np.array([1])), lambda: table.append_run(0, [1])):
        with pytest.raises(ValueError, match="request 'r': expected at most max_model_len = 300 tokens, got 301"):
            append()
    assert request.num_tokens == 300
    with pytest.raises(ValueError, match="request 'long': expected at most max_model_len = 300 tokens, got 301"):
        table.add(make_request("long", 301))
    assert len(table) == 1
    table.check_invariants()


def test_the_lowest_free_row_is_issued_first() -> None:
    table = RequestTable(4)
    requests = [make_request(str(i)) for i in range(4)]
    for request in requests:
        table.add(request)
    for i in (2, 0, 1):
        table.release(requests[i])
    assert [table.add(make_request(name)) for name in "abc"] == [0, 1, 2]


def test_a_row_is_not_reissued_while_a_step_names_it() -> None:
    table = RequestTable(2)
    first, second = make_request("1"), make_request("2")
    table.add(first)
    table.add(second)
    early, late = table.open_step(np.array([0, 1])), table.open_step(np.array([0]))
    table.release(first)
    table.check_invariants()
    assert table.add(make_request("3")) == 2  # grown instead
    table.close_step(early)
    assert table.add(make_request("4")) == 3
    table.close_step(late)
    assert table.add(make_request("5")) == 0
    table.check_invariants()


def test_a_step_keeps_its_own_rows() -> None:
    table = RequestTable()
    rows = np.array([table.add(make_request("1"))])
    step = table.open_step(rows)
    rows[0] = 5
    table.close_step(step)
    table.check_invariants()


def test_advance_moves_computed_tokens() -> None:
    table = RequestTable()
    requests = [make_request(str(i)) for i in range(3)]
    for request in requests:
        table.add(request)
    table.advance(np.array([0, 2]), np.array([3, 5]))
    table.advance(np.array([0, 2]), -1)
    assert [request.num_computed_tokens for request in requests] == [2, 0, 4]
    with pytest.raises(ValueError, match="expected num_computed_tokens >= 0, got -1"):
        table.advance(np.array([0, 1]), -1)
    assert [request.num_computed_tokens for request in requests] == [2, 0, 4]


def test_snapshots_compare_what_requests_mean() -> None:
    one, other = RequestTable(1), RequestTable(8)
    one.add(make_request("a"))
    one.add(make_request("b", 9))
    other.add(make_request("b", 9))
    other.add(make_request("a"))
    assert one.snapshot() == other.snapshot()
    assert list(one.snapshot()) == ["a", "b"]
    other.append_tokens(np.array([0]), np.array([1]))
    assert one.snapshot() != other.snapshot()


BAD_ROWS = [
    ([0, 0], "expected distinct rows, got 2 with repetitions"),
    ([0, 2], "expected rows that a request owns, got row 2"),
    ([0, 99], r"expected rows in \[0, 4\), got 0 to 99"),
    ([-1, 0], r"expected rows in \[0, 4\), got -1 to 0"),
    ([0.0, 1.0], r"expected rows as a row of integers, got float64\[2\]"),
    ([[0, 1]], r"expected rows as a row of integers, got int64\[1, 2\]"),
]


@pytest.mark.parametrize(("rows", "message"), BAD_ROWS)
def test_bad_rows_change_nothing(rows: list, message: str) -> None:
    table = RequestTable(4)
    table.add(make_request("a"))
    table.add(make_request("b"))
    before = table.snapshot()
    for call in (
        lambda: table.append_tokens(np.array(rows), np.array([1, 2])),
        lambda: table.open_step(np.array(rows)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    assert table.snapshot() == before
    table.check_invariants()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1], "expected one token per row, got 1 tokens for 2 rows"),
        ([1, -1], "expected token_ids >= 0, got -1 at index 1"),
        ([1, 0.5], "expected integer token_ids, got float64"),
        ([1, 2**31], "expected token_ids <= 2147483647"),
    ],
)
def test_bad_tokens_change_nothing(tokens: list, message: str) -> None:
    table = RequestTable(4)
    table.add(make_request("a", 3))
    table.add(make_request("b", 3))
    before = table.snapshot()
    with pytest.raises(ValueError, match=message):
        table.append_tokens(np.array([0, 1]), np.array(tokens))
    assert table.snapshot() == before
    table.check_invariants()


@pytest.mark.parametrize("row", [-1, 1, 99])
def test_a_run_needs_an_owned_row(row: int) -> None:
    table = RequestTable(4)
    table.add(make_request("a"))
    with pytest.raises(ValueError, match=f"expected rows that a request owns, got row {row}"):
        table.append_run(row, [1])


def test_misuse_of_rows_is_refused() -> None:
    table, elsewhere = RequestTable(), RequestTable()
    request = make_request()
    table.add(request)
    with pytest.raises(ValueError, match="request 'r' owns row 0 already; release it first"):
        elsewhere.add(request)
    with pytest.raises(ValueError, match="expected a request id that is not in the table, got 'r'"):
        table.add(make_request())
    with pytest.raises(UnknownRequestError, match="request 'r' owns no row of this table"):
        elsewhere.release(request)
    with pytest.raises(UnknownRequestError, match="expected the id of a request in the table, got 'x'"):
        table.row_of("x")
    table.release(request)
    with pytest.raises(UnknownRequestError, match="request 'r' owns no row of this table"):
        table.release(request)
    with pytest.raises(ValueError, match=r"expected the id of an open step, got 3; open: \[\]"):
        table.close_step(3)


@pytest.mark.parametrize("name", ["max_num_reqs", "max_model_len"])
def test_sizes_must_be_positive(name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} >= 1, got 0"):
        RequestTable(**{name: 0})


def drop_hashes(table: RequestTable) -> None:
    table.block_hashes[0].clear()
    table.num_hashed_blocks[0] = 0


CORRUPTIONS = {
    "I4: row 0: 0 hashes, expected 1": drop_hashes,
    "I4: row 0 has another last hash": lambda table: table.last_hashes.__setitem__(0, b"other"),
    "R1": lambda table: table._rows._free.append(0),
    "I1: 5 rows to issue of 4": lambda table: table._rows.grow(5),
    "I1: rows by id": lambda table: table._row_by_id.update(x=2),
    "I1: row 0": lambda table: setattr(table.requests[0], "_row", 1),
    "I2": lambda table: table.num_tokens.__setitem__(2, 1),
    "I3": lambda table: table.num_tokens.__setitem__(0, 0),
    "I4: row 0 has another": lambda table: table.block_hashes.__setitem__(0, []),
    "I4: row 0: 2 hashes, expected 1": lambda table: table.num_hashed_blocks.__setitem__(0, 2),
    "I4: row 0:": lambda table: table.num_hashed_blocks.__setitem__(0, 0),
}


@pytest.mark.parametrize("message", CORRUPTIONS)
def test_the_checker_sees_a_broken_law(message: str) -> None:
    table = RequestTable(4)
    table.add(make_request())
    table.check_invariants()
    CORRUPTIONS[message](table)
    with pytest.raises(InvariantError, match=message):
        table.check_invariants()


class TableMachine(RuleBasedStateMachine):
    """Any sequence of calls, against lists of tokens by request id and a set of rows that steps name."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RequestTable(1)
        self.hasher = BlockHasher(3, "xxhash_cbor", seed="s")
        self.requests: list[Request] = []
        self.tokens: dict[str, list[int]] = {}
        self.steps: dict[int, list[int]] = {}
        for size in (1, 2, 3, 9):
            self.create(size, True)
            self.table.add(self.requests[-1])

    def fenced(self) -> set[int]:
        return {row for rows in self.steps.values() for row in rows}

    @rule(size=st.integers(1, 9), hashed=st.booleans())
    def create(self, size: int, hashed: bool) -> None:
        name = f"r{len(self.requests)}"
        self.tokens[name] = list(range(size))
        self.requests.append(Request(name, self.tokens[name], block_hasher=self.hasher if hashed else None))

    @rule(data=st.data())
    def add_or_release(self, data: st.DataObject) -> None:
        if not self.requests:
            return
        request = data.draw(st.sampled_from(self.requests))
        if request.row >= 0:
            self.table.release(request)
        else:
            assert self.table.add(request) not in self.fenced()

    @rule(data=st.data())
    def append_in_bulk(self, data: st.DataObject) -> None:
        owners = [request for request in self.requests if request.row >= 0]
        chosen = data.draw(st.permutations(owners))[: data.draw(st.integers(0, 9))]
        new = data.draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(chosen), max_size=len(chosen)))
        self.table.append_tokens(np.array([request.row for request in chosen], np.int64), np.array(new, np.int64))
        for request, token in zip(chosen, new, strict=True):
            self.tokens[request.request_id].append(token)

    @rule(data=st.data(), run=st.lists(st.integers(0, 300), max_size=7))
    def append_run(self, data: st.DataObject, run: list[int]) -> None:
        if self.requests:
            request = data.draw(st.sampled_from(self.requests))
            request.append_output_token_ids(run)
            self.tokens[request.request_id] += run

    @rule(data=st.data())
    def open_step(self, data: st.DataObject) -> None:
        rows = sorted({request.row for request in self.requests} - {-1})
        chosen = data.draw(st.lists(st.sampled_from(rows), unique=True)) if rows else []
        self.steps[self.table.open_step(np.array(chosen, np.int64))] = chosen

    @rule(data=st.data())
    def close_step(self, data: st.DataObject) -> None:
        if self.steps:
            step = data.draw(st.sampled_from(sorted(self.steps)))
            self.table.close_step(step)
            del self.steps[step]

    @invariant()
    def requests_agree(self) -> None:
        self.table.check_invariants()
        for request in self.requests:
            tokens = self.tokens[request.request_id]
            assert request.token_ids.tolist() == tokens
            size = len(tokens) if request.block_hasher else 0
            assert request.block_hashes == plain_hashes("xxhash_cbor", self.hasher.none_hash, tokens[:size], 3)


TestTableMachine = TableMachine.TestCase
TestTableMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
