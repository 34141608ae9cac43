"""Step plans hold what the manager's tables say, request by request, and nothing of them afterwards."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mla import MLAAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.manager.kv_cache_manager import KVCacheManager
from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.requests.request import Request
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec
from kvjax.core.step import step_builder
from kvjax.core.step.group_plans import GroupTables
from kvjax.core.step.step_builder import NO_UPDATE, build_step_plan, logits_requests
from kvjax.core.step.step_plan import StepPlan, TableUpdate

SIZES = {"num_kv_heads": 1, "head_size": 4, "dtype": "float32"}


def hybrid_manager() -> KVCacheManager:
    """Full attention with blocks of 4 in one pool, a window of 9 with blocks of 8 in another."""
    config = KVCacheConfig(
        (KVCachePoolSpec(200), KVCachePoolSpec(100)),
        (
            KVCacheGroupSpec(("a",), FullAttentionSpec(block_size=4, **SIZES), 0),
            KVCacheGroupSpec(("b",), SlidingWindowSpec(block_size=8, sliding_window=9, **SIZES), 1),
        ),
    )
    return KVCacheManager(config, max_model_len=200, hash_block_size=4, enable_caching=False)


def start(manager: KVCacheManager, name: str, num_tokens: int, num_computed: int = 0, num_new: int = 0) -> int:
    """A running request with `num_computed` tokens done and blocks for `num_new` more; its row."""
    tokens = np.random.default_rng(num_tokens).integers(0, 1000, num_tokens)
    request = Request(name, tokens)
    for done, count in ((0, num_computed), (num_computed, num_new)):
        if count:
            request.num_computed_tokens = done
            assert manager.allocate_slots(request, count) is not None
    return request.row


def check_against_the_tables(plan: StepPlan, manager: KVCacheManager, wanted: dict[str, bool]) -> None:
    """The plan again, one request at a time in plain Python."""
    table, token, logits = manager.request_table, 0, []
    for i, (name, row) in enumerate(zip(plan.request_ids, plan.rows.tolist(), strict=True)):
        request = table.requests[row]
        computed, count = request.num_computed_tokens, int(plan.num_new_tokens[i])
        assert request.request_id == name
        assert plan.num_computed_tokens[i] == computed
        assert plan.query_start_loc[i] == token
        assert plan.positions[token : token + count].tolist() == list(range(computed, computed + count))
        assert plan.token_ids[token : token + count].tolist() == request.token_ids[computed:][:count].tolist()
        for group_id, group in enumerate(plan.groups):
            size = manager.kv_cache_config.kv_cache_groups[group_id].kv_cache_spec.block_size
            ids = manager.get_block_ids(name)[group_id]
            assert group.block_tables[i].tolist() == ids + [0] * (group.block_tables.shape[1] - len(ids))
            assert group.seq_lens[i] == computed + count
            slots = [ids[p // size] * size + p % size for p in range(computed, computed + count)]
            assert group.slot_mapping[token : token + count].tolist() == slots
        token += count
        if wanted[name]:
            logits.append(token - 1)
    assert plan.query_start_loc[-1] == token == plan.num_tokens
    assert plan.logits_indices.tolist() == logits
    assert [plan.request_ids[i] for i in logits_requests(plan)] == [n for n in plan.request_ids if wanted[n]]
    assert [group.pool_id for group in plan.groups] == [0, 1]
    assert [group.kind for group in plan.groups] == ["full_attention", "sliding_window"]


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_a_plan_made_request_by_request(seed: int) -> None:
    rng = np.random.default_rng(seed)
    manager, rows, counts, wanted = hybrid_manager(), [], [], {}
    is_decode_only = seed % 3 == 0
    for i in range(int(rng.integers(1, 7))):
        computed = int(rng.integers(0, 40))
        count = 1 if is_decode_only or rng.random() < 0.4 else int(rng.integers(1, 25))
        length = computed + count + int(rng.integers(0, 3))
        rows.append(start(manager, f"r{i}", length, computed, count))
        counts.append(count)
        wanted[f"r{i}"] = length == computed + count
    order = rng.permutation(len(rows))
    plan = build_step_plan(manager, np.array(rows)[order], np.array(counts)[order])
    check_against_the_tables(plan, manager, wanted)
    given = [f"r{i}" for i in order]
    ones = [name for name in given if counts[int(name[1:])] == 1]
    assert plan.request_ids == (*ones, *(name for name in given if name not in ones))
    assert plan.distribution.tolist() == [len(ones), len(ones), len(rows)]


def test_groups_of_one_spec_have_tables_of_their_own_wherever_they_stand() -> None:
    """Window, full, window, another window: what a plan says of each is what its own table says."""
    window = SlidingWindowSpec(block_size=4, sliding_window=9, **SIZES)
    specs = (window, FullAttentionSpec(block_size=4, **SIZES), window, replace(window, sliding_window=5))
    groups = tuple(KVCacheGroupSpec((f"layer{i}",), spec, 0) for i, spec in enumerate(specs))
    config = KVCacheConfig((KVCachePoolSpec(200),), groups)
    manager = KVCacheManager(config, max_model_len=200, hash_block_size=4, enable_caching=False)
    rows = np.array([start(manager, f"r{i}", 21 + i, 20, 1 + i) for i in range(3)])
    assert sorted(i for tables in manager.group_tables() for i in tables.group_ids) == [0, 1, 2, 3]
    for order in ([0], [0, 1, 2]):
        plan = build_step_plan(manager, rows[order], np.array([1, 2, 3])[order])
        assert [group.kind for group in plan.groups] == [spec.kind for spec in specs]
        for group_id, group in enumerate(plan.groups):
            ids = np.array([manager.get_block_ids(name)[group_id][:6] for name in plan.request_ids])
            assert group.block_tables[:, :6].tolist() == ids.tolist()
            own = np.repeat(np.arange(len(order)), plan.num_new_tokens)
            slots = ids[own, plan.positions // 4] * 4 + plan.positions % 4
            assert group.slot_mapping.tolist() == slots.tolist()


def arrays_of(value: object) -> list[np.ndarray]:
    """Every array inside a plan."""
    if isinstance(value, np.ndarray):
        return [value]
    if isinstance(value, tuple):
        return [array for item in value for array in arrays_of(item)]
    if hasattr(value, "__dataclass_fields__"):
        return [array for f in fields(value) for array in arrays_of(getattr(value, f.name))]
    return []


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 5, 2]], ids=["decode", "mixed"])
def test_shares_no_memory_with_the_host_state(counts: list[int]) -> None:
    manager = hybrid_manager()
    rows = np.array([start(manager, f"r{i}", 20, 12, count) for i, count in enumerate(counts)])
    num_new = np.array(counts)
    plan = build_step_plan(manager, rows, num_new)
    table = manager.request_table
    live = [rows, num_new, table.token_ids, table.num_tokens, table.num_computed_tokens]
    live += [f(group_id) for f in (manager.block_tables, manager.num_blocks) for group_id in range(2)]
    assert len(arrays_of(plan)) > 15
    assert not any(np.shares_memory(a, b) for a in arrays_of(plan) for b in live)


@pytest.mark.parametrize("source", [0, 2])
def test_a_token_sampled_one_step_before_needs_no_host_token(source: int) -> None:
    """`a` decodes a sampled token (also the first) that the host has not seen; `b` ends its prompt with known ones."""
    manager = hybrid_manager()
    rows = [start(manager, "b", 9, 4, 5), start(manager, "a", 6, 6, 1)]
    manager.request_table.token_ids[rows[1], 6:] = 99  # left behind by someone else
    plan = build_step_plan(manager, np.array(rows), np.array([5, 1]), last_token_source=np.array([-1, source]))
    assert plan.request_ids == ("a", "b")
    assert plan.token_ids[0] == 0
    assert plan.positions.tolist() == [6, 4, 5, 6, 7, 8]
    assert plan.token_source.tolist() == [source, -1, -1, -1, -1, -1]
    assert plan.logits_indices.tolist() == [0, 5]


def test_wanted_logits_updates_and_page_edits_are_passed_on() -> None:
    manager = hybrid_manager()
    rows = np.array([start(manager, "long", 9, 0, 4), start(manager, "one", 9, 8, 1)])
    update = TableUpdate(rows, np.array([0, 0]), np.array([1, 2], np.int32))
    copies = (PageCopies(np.array([1]), np.array([2])), PageCopies(np.array([3]), np.array([4])))
    zeros = (np.array([5]), np.array([6]))
    options = {"new_blocks": (update, NO_UPDATE), "page_copies": copies, "pages_to_zero": zeros}
    plan = build_step_plan(manager, rows, np.array([4, 1]), wants_logits=np.array([True, False]), **options)
    assert plan.request_ids == ("one", "long")
    assert plan.logits_indices.tolist() == [4]
    assert logits_requests(plan).tolist() == [1]
    own = plan.groups[0].new_blocks
    assert [part.tolist() for part in (own.rows, own.columns, own.block_ids)] == [rows.tolist(), [0, 0], [1, 2]]
    assert plan.page_copies == copies
    assert plan.pages_to_zero == zeros


@pytest.mark.parametrize("seed", range(4))
def test_compressed_caches_have_slots_of_states(seed: int) -> None:
    """Groups of one ratio each, and one whose layers differ."""
    rng = np.random.default_rng(seed)
    specs = [MLAAttentionSpec(block_size=16, head_size=4, dtype="float32", tokens_per_state=r) for r in (1, 4, 16)]
    groups = [KVCacheGroupSpec((f"layers.{i}",), spec) for i, spec in enumerate(specs)]
    mixed = KVCacheGroupSpec(("a", "b", "c", "d"), specs[1], layer_specs=(specs[1], specs[2], specs[0], specs[1]))
    config = KVCacheConfig((KVCachePoolSpec(200),), (*groups, mixed))
    manager = KVCacheManager(config, 200, 16, enable_caching=False)
    rows, counts = [], []
    for name in "abc":
        computed, new = int(rng.integers(0, 40)), int(rng.integers(1, 40))
        rows.append(start(manager, name, computed + new, computed, new))
        manager.request_table.num_computed_tokens[rows[-1]] = computed
        counts.append(new)
    plan = build_step_plan(manager, np.array(rows), np.array(counts))

    def check(group_id: int, ratio: int, seq_lens: np.ndarray, slot_mapping: np.ndarray) -> None:
        ends, size, slots = plan.num_computed_tokens + plan.num_new_tokens, 16 // ratio, []
        for name, computed, end in zip(plan.request_ids, plan.num_computed_tokens, ends, strict=True):
            ids = manager.get_block_ids(name)[group_id]
            states = range(computed // ratio, end // ratio)  # those whose last token is new
            slots += [ids[i // size] * size + i % size for i in states]
        assert slot_mapping.tolist() == slots
        assert seq_lens.tolist() == (ends // ratio).tolist()

    for group_id, spec in enumerate(specs):
        group = plan.groups[group_id]
        check(group_id, spec.tokens_per_state, group.seq_lens, group.slot_mapping)
        assert [states.tokens_per_state for states in group.compressed] == [spec.tokens_per_state] * (group_id > 0)
        for states in group.compressed:
            check(group_id, states.tokens_per_state, states.seq_lens, states.slot_mapping)
    assert [states.tokens_per_state for states in plan.groups[3].compressed] == [1, 4, 16]
    for states in plan.groups[3].compressed:
        check(3, states.tokens_per_state, states.seq_lens, states.slot_mapping)


class Shape(NamedTuple):
    """Of padded tables."""

    num_requests: int
    num_columns: int


@pytest.mark.parametrize("more", [(0, 0), (3, 2), (0, 9), (2, 60)], ids=str)
def test_tables_made_in_a_shape_are_the_same_tables(more: tuple[int, int]) -> None:
    """Zero beyond the requests and their blocks, whether the live tables are as wide as the shape or not."""
    manager = hybrid_manager()
    for i, length in enumerate([30, 9, 17]):  # rows before and behind those of the step
        start(manager, f"r{i}", length, length - 1, 1)
    rows, counts, asked = np.array([2, 0]), np.array([1, 1]), []

    def pick(*sizes: int) -> Shape:
        asked.append(sizes)
        return Shape(sizes[1] + more[0], sizes[2] + more[1])

    plan, made = (build_step_plan(manager, rows, counts, pick_shape=picked) for picked in (None, pick))
    assert asked == [(2, 2, 8)]  # tokens, requests, blocks of 30 tokens
    for group, expected in zip(made.groups, plan.groups, strict=True):
        padded = group.padded_tables
        assert padded is not None
        assert expected.padded_tables is None
        assert padded.shape == (2 + more[0], 8 + more[1])
        assert group.block_tables.tolist() == expected.block_tables.tolist()
        assert padded[:2, : group.block_tables.shape[1]].tolist() == expected.block_tables.tolist()
        assert np.count_nonzero(padded) == np.count_nonzero(expected.block_tables)
        assert not any(np.shares_memory(padded, manager.block_tables(group_id)) for group_id in range(2))
        with pytest.raises(ValueError, match="read-only"):
            padded[0, 0] = 1


def test_a_step_that_fits_no_shape_takes_no_page_edits() -> None:
    config = KVCacheConfig.single_pool(50, FullAttentionSpec(block_size=4, **SIZES))
    manager = KVCacheManager(config, 100, 4, enable_caching=False, zero_new_pages=True)
    rows = np.array([start(manager, "a", 9, 0, 9)])

    def pick(*sizes: int) -> Shape:
        raise ValueError(f"no shape for {sizes}")

    with pytest.raises(ValueError, match=r"no shape for \(9, 1, 3\)"):
        build_step_plan(manager, rows, np.array([9]), pick_shape=pick)
    [pages] = build_step_plan(manager, rows, np.array([9])).pages_to_zero
    assert pages.size == 3


@pytest.mark.parametrize("shape", [Shape(0, 3), Shape(1, 2)], ids=str)
def test_a_shape_that_is_too_small_is_refused(shape: Shape) -> None:
    manager = hybrid_manager()
    rows = np.array([start(manager, "a", 9, 0, 9)])
    message = rf"at least 1 requests and 3 columns, got {shape.num_requests} and {shape.num_columns}"
    with pytest.raises(ValueError, match=message):
        build_step_plan(manager, rows, np.array([9]), pick_shape=lambda *sizes: shape)


@dataclass(frozen=True, kw_only=True)
class CounterSpec(FullAttentionSpec):
    """A kind that the step builder has never heard of: states of which row r's is in the first of its blocks."""

    @property
    def state_pages(self) -> CounterSpec:
        return self

    def pages_of_states(
        self, table: np.ndarray, num_blocks: np.ndarray, rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        return table[rows, 0]

    @property
    def num_drafts(self) -> int:
        return 0

    @property
    def num_speculative_blocks(self) -> int:
        return 0

    def pages_of_drafts(
        self, table: np.ndarray, num_blocks: np.ndarray, rows: np.ndarray, num_tokens: np.ndarray
    ) -> np.ndarray:
        return np.zeros((rows.size, 0), np.int32)

    def most_tokens(self, num_blocks: np.ndarray) -> np.ndarray:
        return num_blocks * self.block_size


@dataclass(frozen=True, kw_only=True)
class CaptionSpec(FullAttentionSpec):
    """Another, that attends to an encoder."""

    @property
    def reads_encoder(self) -> bool:
        return True


def test_a_new_kind_says_itself_what_its_pages_hold() -> None:
    tables = plain_tables(["a", "b"])
    tables.kv_cache_config = KVCacheConfig.single_pool(
        50, CounterSpec(block_size=4, **SIZES), CaptionSpec(block_size=4, **SIZES)
    )
    (own,) = tables.group_tables()
    tables.group_tables = lambda: [own, own._replace(group_ids=(1,))]
    tables.request_table.num_encoder_tokens = np.array([3, 6])
    tables.request_table.num_computed_tokens = np.array([0, 19])
    tables.take_page_copies = tables.take_pages_to_zero = tuple
    states, captions = build_step_plan(tables, np.array([0, 1]), np.array([8, 1])).groups  # comes out as 1, 0
    assert states.state_write is not None
    assert states.state_read is not None
    assert states.state_write.tolist() == [11, 1]
    assert states.state_read.tolist() == [11, 0]
    assert states.slot_mapping.tolist() == [-1] * 9
    assert captions.seq_lens.tolist() == [6, 3]
    assert captions.slot_mapping.tolist() == [4, 5, 6]
    assert captions.encoder_starts is not None
    assert captions.encoder_starts.tolist() == [0, 0, 3]
    both = build_step_plan(tables, np.array([0, 1]), np.array([8, 1]), writes_encoder=np.array([True, True]))
    assert both.groups[1].encoder_starts is not None
    assert both.groups[1].encoder_starts.tolist() == [0, 6, 9]
    assert both.groups[1].slot_mapping.size == 9
    tables.request_table.num_tokens[1] = 21
    with pytest.raises(ValueError, match="row 1, group 0: expected the blocks of a state after 21 tokens, got 5"):
        build_step_plan(tables, np.array([1]), np.array([2]))


def test_the_step_builder_knows_no_kind_by_name() -> None:
    for path in Path(step_builder.__file__).parent.glob("*.py"):
        assert "kvjax.core.kinds" not in path.read_text(), path


def test_a_step_without_requests_is_empty() -> None:
    plan = build_step_plan(hybrid_manager(), np.array([], np.int64), np.array([], np.int64))
    assert (plan.num_requests, plan.num_tokens) == (0, 0)
    assert plan.query_start_loc.tolist() == [0]
    assert plan.distribution.tolist() == [0, 0, 0]


def plain_tables(request_ids: list[str | None]) -> SimpleNamespace:
    """Two rows of 8 and 20 tokens in blocks of 4."""
    entries = np.arange(1, 21, dtype=np.int32).reshape(1, 2, 10)
    return SimpleNamespace(
        kv_cache_config=KVCacheConfig.single_pool(50, FullAttentionSpec(block_size=4, **SIZES)),
        request_table=SimpleNamespace(
            token_ids=np.zeros((2, 40), np.int32),
            num_tokens=np.array([8, 20]),
            num_computed_tokens=np.array([0, 0]),
            request_ids=np.array(request_ids, np.object_),
        ),
        group_tables=lambda: [GroupTables((0,), 4, entries, np.array([2, 5]))],
    )


def test_a_sampled_token_may_lie_behind_the_last_column_of_the_token_table() -> None:
    """Its place in the table is made when the host has seen it."""
    tables = plain_tables(["a", "b"])
    tables.request_table.token_ids = np.full((2, 19), 7, np.int32)
    tables.request_table.num_tokens[:] = 19
    tables.request_table.num_computed_tokens[:] = 19
    plan = build_step_plan(
        tables, np.array([1]), np.array([1]), last_token_source=np.array([0]), page_copies=(), pages_to_zero=()
    )
    assert (plan.token_ids.tolist(), plan.positions.tolist(), plan.token_source.tolist()) == ([0], [19], [0])


def test_tokens_of_a_null_block_have_no_slot() -> None:
    tables = plain_tables(["a", "b"])
    entries = np.array([[[0, 1, 0], [2, 3, 4]]], np.int32)
    tables.group_tables = lambda: [GroupTables((0,), 4, entries, np.array([2, 3]))]
    plan = build_step_plan(tables, np.array([0]), np.array([8]), page_copies=(), pages_to_zero=())
    assert plan.groups[0].slot_mapping.tolist() == [-1] * 4 + [4, 5, 6, 7]


def test_refuses_a_row_without_a_request() -> None:
    with pytest.raises(ValueError, match=r"rows \[1\] hold no request"):
        build_step_plan(plain_tables(["a", None]), np.array([0, 1]), np.array([8, 20]))


@pytest.mark.parametrize(
    ("rows", "counts", "message"),
    [
        ([0], [1, 1], r"as many rows as numbers of tokens, got \(1,\) and \(2,\)"),
        ([0, 99], [1, 1], r"expected rows in \[0, 16\), got 0 to 99"),
        ([-1], [1], r"expected rows in \[0, 16\), got -1 to -1"),
        ([0, 0], [1, 1], r"expected distinct rows, got \[0, 0\]"),
        ([0], [0], "row 0: expected at least 1 new token, got 0"),
        ([0], [3], "row 0: a step up to token 11 needs tokens, the request has 10"),
        ([0], [2], "row 0, group 0: expected blocks for 10 tokens, got 2 blocks of 4; allocate them"),
        ([5], [1], "row 5: a step up to token 1 needs tokens, the request has 0"),
    ],
)
def test_refuses_steps_that_cannot_be(rows: list[int], counts: list[int], message: str) -> None:
    manager = hybrid_manager()
    request_row = start(manager, "a", 10, 8, 0)
    manager.request_table.num_computed_tokens[request_row] = 8
    with pytest.raises(ValueError, match=message):
        build_step_plan(manager, np.array(rows), np.array(counts))
