"""Recorded calls, made again, give the same answers and end in the same state."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path
from typing import Any

import cbor2
import numpy as np
import pytest

from kvjax.core import BlockHasher, CallRecorder, KVCacheManager, LoRARequest, MultiModalFeature, Request, replay_calls
from kvjax.core.pool.kv_cache_blocks import KVCacheBlocks
from kvjax.core.record.call_log import CallEncoding, CallLogWriter, read_call_log
from kvjax.core.record.recorded_request import decode_request, encode_request
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.step.step_builder import NO_UPDATE
from kvjax.core.step.step_plan import TableUpdate
from kvjax.errors import BlockStateError, CallLogError, UnknownRequestError
from tests.core.manager.manager_lockstep import FULL, SETUPS
from tests.core.manager.random_forks import RandomForks
from tests.core.manager.random_loads import RandomLoads
from tests.core.manager.random_lockstep import RandomLockstep
from tests.core.manager.test_invalidation import RandomInvalidation

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

from random_calls import DEPLOYMENTS, Deployment, RandomCalls, full, window

HASHER = BlockHasher(2, "xxhash_cbor", seed="0")


def request(name: str, num_tokens: int = 9, **options: Any) -> Request:
    return Request(name, list(range(num_tokens)), block_hasher=HASHER, **options)


def check_replay(path: Path, manager: KVCacheManager) -> dict[str, int]:
    num_checked = 0

    def check(replaying: KVCacheManager) -> None:
        nonlocal num_checked
        replaying.check_invariants()
        num_checked += 1

    replayed = replay_calls(path, on_call=check)
    assert num_checked == sum(replayed.num_calls.values())  # once for each call, and for nothing else
    assert replayed.manager.snapshot() == manager.snapshot()
    assert replayed.manager.take_events() == manager.take_events()
    return replayed.num_calls


@pytest.mark.parametrize("name", SETUPS)
def test_recorded_runs_replay_to_the_same_ids(name: str, tmp_path: Path) -> None:
    """Recording starts in the middle of a run, with requests running and others waiting."""
    calls = RandomLockstep(SETUPS[name], [3, *name.encode()], enable_kv_cache_events=True, log_stats=True)
    for _ in range(40):
        calls.call()
    manager = calls.both.manager
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        calls.both.manager = recorder.manager
        calls.actions += [recorder.take_events, recorder.make_prefix_cache_stats]
        for _ in range(200):
            calls.call()
    num_calls = check_replay(tmp_path / "calls", manager)
    assert {"allocate_slots", "free", "get_num_common_prefix_blocks"} <= num_calls.keys()


@pytest.mark.parametrize("policy", ["slru", "cost"])
def test_runs_under_other_policies_replay(policy: str, tmp_path: Path) -> None:
    """The naive model knows LRU only, so random calls of the script are recorded; from the middle of a run."""
    deployment = Deployment(((full(2), 0), (window(2, 5), 0)), {"eviction_policy": policy})
    calls = RandomCalls(deployment, np.random.default_rng(4))
    for _ in range(60):
        calls.call()
    manager = calls.manager
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        calls.manager = recorder.manager
        for _ in range(300):
            calls.call()
        calls.new_step()  # a call sees what happened before it
    assert manager.block_pool.num_evicted_blocks > 50
    assert check_replay(tmp_path / "calls", manager)["allocate_slots"] > 50


@pytest.mark.parametrize("name", [name for name in DEPLOYMENTS if "hits inside blocks" in name])
def test_hits_inside_blocks_replay_to_the_same_ids(name: str, tmp_path: Path) -> None:
    calls = RandomCalls(DEPLOYMENTS[name], np.random.default_rng(4))
    manager = calls.manager
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        calls.manager = recorder.manager
        for _ in range(300):
            calls.call()
        calls.new_step()  # a call after the last change of a request
    assert {"fork", "take_page_copies"} <= check_replay(tmp_path / "calls", manager).keys()


def test_invalidations_and_requests_of_every_sort_replay(tmp_path: Path) -> None:
    calls = RandomInvalidation(SETUPS["hybrid"], 1)
    manager = calls.both.manager
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        calls.both.manager = recorder.manager
        for _ in range(400):
            calls.call()
    num_calls = check_replay(tmp_path / "calls", manager)
    assert {"invalidate", "stop_registering", "plan_step", "reset_prefix_cache"} <= num_calls.keys()


def test_an_invalidation_of_what_nobody_runs_replays(tmp_path: Path) -> None:
    """A predicate is written as the origins that it holds for: those of cached blocks too, not of running requests."""
    manager = FULL.manager([30], track_origins=True)
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        gone = request("gone", cache_salt="a")
        assert recorder.manager.allocate_slots(gone, 9) is not None
        recorder.manager.free(gone)
        assert recorder.manager.invalidate(predicate=lambda origin: origin.cache_salt == "a") == 4
    check_replay(tmp_path / "calls", manager)


def test_forks_and_their_page_edits_replay(tmp_path: Path) -> None:
    forks = RandomForks(SETUPS["hybrid_sizes"], 11, options={"zero_new_pages": True})
    manager = forks.manager
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        forks.manager = forks.device.manager = recorder.manager
        for _ in range(30):
            forks.step()
    num_calls = check_replay(tmp_path / "calls", manager)
    assert {"fork", "take_page_copies", "take_pages_to_zero"} <= num_calls.keys()


def test_steps_that_are_taken_back_replay(tmp_path: Path) -> None:
    world = RandomLoads(SETUPS["hybrid_next_step_hits"], 3, sub_block_hits=True, forks=True, drops=True)
    manager = world.manager
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        world.manager = world.device.manager = recorder.manager
        for _ in range(20):
            world.step()
    assert check_replay(tmp_path / "calls", manager)["take_back_step"] > 5


def test_whatever_changes_a_request_between_calls_is_recorded(tmp_path: Path) -> None:
    manager = FULL.manager([60], log_stats=True)
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        ours = recorder.manager
        waiting = request("waiting", 3)
        assert ours.get_computed_blocks(waiting)[1] == 0
        waiting.append_output_token_ids([7, 8, 9])  # while it waits
        assert ours.allocate_slots(waiting, 6) is not None
        table = ours.request_table
        table.advance(np.array([waiting.row]), 6)
        table.append_tokens(np.array([waiting.row]), np.array([4]))
        table.append_run(waiting.row, [5])
        step = table.open_step(np.array([waiting.row]))  # its row is not issued again below
        assert ours.plan_step(rows=[waiting.row], num_new_tokens=2).num_planned == 1
        waiting.num_computed_tokens = 8
        ours.free(waiting)
        waiting.num_computed_tokens, waiting.num_preemptions = 0, 1
        other = request("other", skip_writing_prefix_cache=True)
        assert ours.allocate_slots(other, 9) is not None
        assert other.row == 1
        table.close_step(step)
        blocks, num_hit = ours.get_computed_blocks(waiting)
        assert ours.allocate_slots(waiting, 8 - num_hit, num_hit, blocks) is not None
        assert ours.plan_step(np.array([other.row, waiting.row]), np.array([3, 5])).num_planned == 2
        stats = ours.make_prefix_cache_stats()
        assert stats is not None
        assert stats.preempted_hits == 6
        assert ours.usage == manager.usage
    assert check_replay(tmp_path / "calls", manager)["plan_step"] == 2


def test_rows_differ_in_a_replay_and_nothing_else_does(tmp_path: Path) -> None:
    """A step that is not the manager's business keeps row 0 from being issued again; in the replay it is."""
    manager = FULL.manager([60])
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        ours, gone, first, other = recorder.manager, request("gone", 4), request("first"), request("other")
        assert ours.allocate_slots(gone, 4) is not None
        ours.request_table.open_step(np.array([gone.row]))
        ours.free(gone)
        for new in (first, other):
            assert ours.allocate_slots(new, 4) is not None
            new.num_computed_tokens = 4
        assert [first.row, other.row] == [1, 2]
        assert ours.plan_step(np.array([other.row, first.row]), np.array([2, 1])).num_planned == 2  # counts, not rows
        other.num_computed_tokens, first.num_computed_tokens = 6, 5
        assert ours.plan_step(rows=[first.row], num_new_tokens=4).num_planned == 1
        ours.evict_blocks([1, 2])  # ids of blocks, which are rows as well
    check_replay(tmp_path / "calls", manager)


def test_calls_that_raise_raise_again(tmp_path: Path) -> None:
    manager = FULL.manager([30])
    with CallRecorder(manager, tmp_path / "calls") as recorder:
        ours = recorder.manager
        first = request("first")
        blocks = ours.create_kv_cache_blocks([[3]])
        with pytest.raises(BlockStateError, match="block 3 of the hit is no longer cached"):
            ours.allocate_slots(first, 3, 2, blocks)
        with pytest.raises(UnknownRequestError, match="freed already or never allocated"):
            ours.free(first)
        assert ours.allocate_slots(first, 3) is not None
        for rows in ([5], [0, 0], ["a"], [-1]):
            with pytest.raises(ValueError, match="expected"):
                ours.plan_step(rows, 1)
        with pytest.raises(UnknownRequestError, match="expected the id of a request in the table, got 'nobody'"):
            ours.get_block_ids("nobody")
        ours.free(first)
        with pytest.raises(UnknownRequestError, match="freed already or never allocated"):
            ours.free(first)
    assert check_replay(tmp_path / "calls", manager)["free"] == 3


def test_after_the_end_calls_are_made_and_not_recorded(tmp_path: Path) -> None:
    manager = FULL.manager([30])
    recorder = CallRecorder(manager, tmp_path / "calls")
    recorder.manager.new_step_starts()
    recorder.close()
    assert recorder.manager.allocate_slots(request("r"), 3) is not None
    assert replay_calls(tmp_path / "calls").num_calls == {"new_step_starts": 1}
    assert recorder.manager.block_pool is manager.block_pool


def table_of_two() -> RequestTable:
    """Requests a and b in rows 0 and 1 of 4."""
    table = RequestTable(4)
    for name in "ab":
        table.add(request(name))
    return table


@pytest.mark.parametrize(
    ("rows", "names"), [([0], ["a"]), ([1], ["b"]), ([1, 0], ["b", "a"]), ([], []), ([0, 0], ["a", "a"])]
)
@pytest.mark.parametrize("kind", [list, tuple, np.int64, np.uint8])
def test_rows_are_written_by_the_requests_that_own_them(kind: Any, rows: list[int], names: list[str]) -> None:
    given = kind(rows) if kind in (list, tuple) else np.array(rows, kind)
    encoding = CallEncoding(table_of_two(), list)
    assert encoding.rows(given) == {"rows": names}
    decoded = encoding.decode({"rows": names}, {}, KVCacheBlocks((), ()))
    assert decoded.tolist() == rows


def test_an_update_of_tables_is_written_by_requests() -> None:
    encoding = CallEncoding(table_of_two(), list)
    update = TableUpdate(np.array([1, 0]), np.array([2, 3]), np.array([8, 9], np.int32))
    assert encoding.encode(update) == {"value": ["TableUpdate", {"rows": ["b", "a"]}, [2, 3], [8, 9]]}
    assert encoding.encode(NO_UPDATE) == {"value": ["TableUpdate"]}


@pytest.mark.parametrize(
    "rows", [[2], [0, 3], [4], [0, 99], [-1], [1, -2], [1, -3], [0.0], [True], ["a"], [[0]], 0, None]
)
def test_what_names_no_request_is_written_as_it_is(rows: Any) -> None:
    encoding = CallEncoding(table_of_two(), list)
    assert encoding.rows(rows) == encoding.encode(rows) == rows


def test_a_request_is_written_in_full() -> None:
    embeds = np.arange(12, dtype=np.float32).reshape(6, 2)
    whole = Request(
        "r",
        None,
        prompt_embeds=embeds,
        mm_features=[MultiModalFeature("image", 1, 3)],
        lora=LoRARequest("adapter", "/1", adapter_id=5),
        cache_salt="salt",
        weight_version=4,
        skip_reading_prefix_cache=True,
        skip_writing_prefix_cache=True,
        max_tokens=9,
        block_hasher=BlockHasher(2, "xxhash", extra_key_style="vllm-0.16"),
    )
    whole.append_output_token_ids([3, 4, 5])
    whole.num_computed_tokens, whole.num_preemptions = 7, 2
    again = decode_request("r", encode_request(whole))
    assert again.block_hasher == whole.block_hasher
    assert again.lora is not None
    assert again.lora.adapter_id == 5
    for name in Request.__slots__:
        ours, theirs = getattr(whole, name), getattr(again, name)
        if isinstance(ours, np.ndarray):
            assert ours[: whole.num_tokens].tolist() == theirs[: whole.num_tokens].tolist()
        elif name != "_extra_keys":
            assert ours == theirs, name
    assert decode_request("p", encode_request(Request("p", [1]))).block_hasher is None


# -- files that are refused -------------------------------------------------------------------------------------------


def items_of(path: Path) -> list[Any]:
    state, records = read_call_log(path)
    return [state, *records]


def write(path: Path, state: bytes, records: list[Any]) -> Path:
    log = CallLogWriter(path, state)
    for record in records:
        log.write(record)
    log.close()
    return path


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    manager = FULL.manager([30])
    with CallRecorder(manager, tmp_path / "recorded") as recorder:
        for name in "ab":
            assert recorder.manager.allocate_slots(request(name), 4) is not None
    return tmp_path / "recorded"


def test_an_answer_that_differs_is_told(recorded: Path, tmp_path: Path) -> None:
    state, *records = items_of(recorded)
    records[-1][-1]["blocks"] = [np.array([9], "<i4").tobytes()]
    with pytest.raises(CallLogError, match=r"changed, call 2: expected allocate_slots to answer as recorded"):
        replay_calls(write(tmp_path / "changed", state, records))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (["call", "allocate_slots", [{"request": "nobody"}, 1], {}, None], "expected a record that can be played, got"),
        (["sync", ["nobody"], [[1]], [], []], "expected a record that can be played, got"),
        (["request", "r", {}], "expected a record that can be played, got"),
        (["call", "unknown_method", [], {}, None], "expected a record that can be played, got"),
        (["call", "new_step_starts", [{"code": "1"}], {}, None], "expected an argument of a known kind, got 'code'"),
        (["call", "new_step_starts", [{"value": ["Other", 1, 2, []]}], {}, None], "of a known kind, got 'value'"),
        (["call", "__init__", [], {}, None], "expected a call that is recorded, got '__init__'"),
        (["call", "restore", [], {}, None], "expected a call that is recorded, got 'restore'"),
    ],
)
def test_records_that_make_no_sense_are_refused(
    recorded: Path, tmp_path: Path, record: list[Any], message: str
) -> None:
    state, *_ = items_of(recorded)
    with pytest.raises(CallLogError, match=message):
        replay_calls(write(tmp_path / "forged", state, [record]))


def test_foreign_and_damaged_files_are_refused(recorded: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_text('{"timestamp": 0}\n')
    with pytest.raises(CallLogError, match="foreign: expected a file of recorded calls, got another"):
        replay_calls(foreign)
    (tmp_path / "empty").touch()
    with pytest.raises(CallLogError, match="empty: expected a file of recorded calls, got another"):
        replay_calls(tmp_path / "empty")
    damaged = tmp_path / "damaged"
    damaged.write_bytes(recorded.read_bytes()[:-40])
    with pytest.raises(CallLogError, match=r"damaged: expected a whole file, got one damaged at item \d"):
        replay_calls(damaged)
    with pytest.raises(ValueError, match="expected a state that save_state made, got 3 bytes that are none"):
        replay_calls(write(tmp_path / "no state", b"abc", []))
    with pytest.raises(FileNotFoundError, match="missing"):
        replay_calls(tmp_path / "missing")


@pytest.mark.parametrize("head", [{"format": "another"}, {"format": "zip"}, {}, ["format"], "kvjax-calls"])
def test_a_file_of_another_format_is_refused(tmp_path: Path, head: Any) -> None:
    item = cbor2.dumps(head)
    with gzip.open(tmp_path / "foreign", "wb") as file:
        file.write(len(item).to_bytes(4, "big") + item)
    with pytest.raises(CallLogError, match=r"foreign: expected a file of recorded calls, got another$"):
        read_call_log(tmp_path / "foreign")


@pytest.mark.parametrize("num_whole", [0, 1, 3])
def test_the_item_that_is_damaged_is_told(tmp_path: Path, num_whole: int) -> None:
    items = [cbor2.dumps(item) for item in ({"format": "kvjax-calls", "version": 1, "state": b""}, ["sync"], ["sync"])]
    with gzip.open(tmp_path / "calls", "wb") as file:
        for item in items[:num_whole]:
            file.write(len(item).to_bytes(4, "big") + item)
        file.write((9).to_bytes(4, "big") + b"\x82")  # a list of two without them
    with pytest.raises(CallLogError, match=f"calls: expected a whole file, got one damaged at item {num_whole}$"):
        list(read_call_log(tmp_path / "calls")[1])


def test_a_file_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvjax.core.record.call_log.VERSION", 2)
    write(tmp_path / "newer", b"", [])
    monkeypatch.undo()
    with pytest.raises(CallLogError, match="newer: expected calls of version 1, got version 2"):
        replay_calls(tmp_path / "newer")


def test_arguments_of_no_known_class_are_not_recorded(tmp_path: Path) -> None:
    with (
        CallRecorder(FULL.manager([30]), tmp_path / "calls") as recorder,
        pytest.raises(NotImplementedError, match="a object cannot be recorded as part of a call"),
    ):
        recorder.manager.evict_blocks(object())  # type: ignore[arg-type]
