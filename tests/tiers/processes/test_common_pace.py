"""Processes whose threads take other times see the same loads, stores and units at the same turns."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHash
from kvjax.errors import TierDataError
from kvjax.tiers.processes.common_index import CommonIndex, in_all, number_of, short_name
from kvjax.tiers.processes.common_pace import STORE_TURNS, CommonPace
from kvjax.tiers.processes.reports import TURNS_OF_LOSSES, Reports
from kvjax.tiers.stores.disk_store import name_of
from kvjax.tiers.units import UnitKey
from kvjax.tiers.worker.pace import PieceState
from tests.tiers.processes.fake_board import FakeBoard

ENDED = (PieceState.THERE, PieceState.FAILED)


class Array:
    def __init__(self) -> None:
        self.is_there = False

    def is_ready(self) -> bool:
        return self.is_there


class Process:
    """Pieces of loads, each of which ends here when the test says so."""

    def __init__(self, board: FakeBoard, **settings: Any) -> None:
        self.now_s = 0.0
        self.reports = Reports(board, clock=lambda: self.now_s, **settings)
        self.index = CommonIndex(1 << 20, (1000,))
        self.pace = CommonPace(self.reports, self.index)
        self.pieces: dict[int, Future[Any]] = {}
        self.log: list[tuple[int, int, PieceState]] = []  # turn, piece, state

    def watch(self, *keys: UnitKey) -> int:
        future: Future[Any] = Future()
        number = self.pace.watch(future, keys)
        self.pieces[number] = future
        return number

    def end(self, number: int, *, is_good: bool = True) -> None:
        if is_good:
            array = Array()
            array.is_there = True
            self.pieces[number].set_result(((array,),))
        else:
            self.pieces[number].set_exception(OSError("planted"))

    def turn(self) -> None:
        self.reports.begin_turn()
        turn = self.pace.begin_turn()
        for number, future in list(self.pieces.items()):
            state = self.pace.state_of(number, future)
            if state is not PieceState.ON_ITS_WAY:
                self.log.append((turn, number, state))
            if state in ENDED:
                del self.pieces[number]


def processes(count: int, **settings: Any) -> list[Process]:
    return [Process(board, **settings) for board in FakeBoard.of(count)]


def key_of(i: int, group_id: int = 0) -> UnitKey:
    return UnitKey(group_id, BlockHash(i.to_bytes(32, "big")))


@pytest.mark.parametrize("seed", range(5))
def test_pieces_end_at_the_same_turn_everywhere(seed: int) -> None:
    """There once they are there everywhere, failed where one has failed; nothing else decides."""
    rng, num_processes = np.random.default_rng(seed), 3
    world = processes(num_processes)
    ends: dict[int, list[bool]] = {}
    open_pieces: list[tuple[int, int]] = []  # (process, piece) not ended there
    for turn in range(60):
        if turn < 40 and rng.random() < 0.5:
            numbers = {process.watch() for process in world}
            assert len(numbers) == 1
            open_pieces += [(i, number) for number in numbers for i in range(num_processes)]
            ends |= {number: [] for number in numbers}
        for place in [place for place in open_pieces if turn >= 50 or rng.random() < 0.3]:
            is_good = bool(rng.random() < 0.8)
            open_pieces.remove(place)
            world[place[0]].end(place[1], is_good=is_good)
            ends[place[1]].append(is_good)
        for process in world:
            process.turn()
    assert world[0].log == world[1].log == world[2].log
    found = {number: state for _, number, state in world[0].log if state in ENDED}
    assert found == {number: PieceState.THERE if all(good) else PieceState.FAILED for number, good in ends.items()}


def test_a_piece_is_on_its_way_while_one_process_is_at_it_and_late_where_it_takes_too_long() -> None:
    first, second = world = processes(2, timeout_s=10.0)
    (number,) = {process.watch() for process in world}
    first.end(number)
    for now_s in (1.0, 2.0):
        for process in world:
            process.now_s = now_s
            process.turn()
    assert first.log == second.log == []
    second.now_s = 11.0  # the clocks of processes need not agree
    for _ in range(2):
        for process in world:
            process.turn()
    assert first.log[-1][2] is second.log[-1][2] is PieceState.LATE
    second.end(number)
    for _ in range(3):
        for process in world:
            process.turn()
    assert first.log == second.log
    assert first.log[-1][2] is PieceState.FAILED, "what was given up is not written"


def test_stores_take_a_fixed_number_of_turns() -> None:
    (process,) = processes(1)
    for turn in range(6):
        assert process.pace.has_arrived(0, is_ready=turn > 3) is (turn >= STORE_TURNS)
        assert process.pace.has_ended(0, is_done=turn > 3) is (turn >= STORE_TURNS)
        process.turn()


def test_a_unit_that_failed_to_come_to_one_host_counts_as_stored_and_cannot_be_read_there() -> None:
    first, second = processes(2)
    keys, slots = [key_of(0), key_of(1)], np.array([3, 4])
    stored = [
        process.pace.end_store(keys, slots, np.array([True, process is first])).tolist() for process in (first, second)
    ]
    assert stored == [[True, True]] * 2
    first.pace.check_readable(keys)
    second.pace.check_readable(keys[:1])
    with pytest.raises(TierDataError, match="1 units did not come to this process's host"):
        second.pace.check_readable(keys)
    second.pace.end_store(keys[1:], slots[1:], np.array([True]))
    second.pace.check_readable(keys)


def test_what_one_process_did_not_write_to_disk_is_forgotten_by_all() -> None:
    world = processes(2, tells_losses=True)
    keys = [key_of(i) for i in range(3)]
    for process in world:
        process.pace.end_store(keys, np.full(3, -1), np.ones(3, bool))
    world[1].pace.lose(keys[:1])
    for _ in range(TURNS_OF_LOSSES + 1):
        assert [process.index.has(keys[0]) for process in world] in ([True, True], [False, False])
        for process in world:
            process.turn()
    assert [[process.index.has(key) for key in keys] for process in world] == [[False, True, True]] * 2


def test_a_failed_load_from_disk_forgets_its_units() -> None:
    world = processes(2)
    key = key_of(7)
    for process in world:
        process.index.use([key])
        process.end(process.watch(key), is_good=process is world[0])
        process.turn()
    for process in world:
        process.turn()
    assert [process.index.has(key) for process in world] == [False, False]


def test_the_index_forgets_what_was_used_longest_ago() -> None:
    index = CommonIndex(10_000, (744,))  # 1,000 with a header; of 10,000 it counts 9,000
    keys = [key_of(i) for i in range(10)]
    index.use(keys[:9])
    assert len(index) == 9
    index.use(keys[:1])
    index.use(keys[9:])
    assert [index.has(key) for key in keys] == [True, False, *[True] * 8]
    index.forget(keys[2:4])
    index.use(keys[1:2])
    assert len(index) == 8


def test_the_index_forgets_what_is_on_probation_first() -> None:
    index = CommonIndex(10_000, (744,))  # 1,000 with a header; of 10,000 it counts 9,000
    keys = [key_of(i) for i in range(11)]
    index.use(keys[:2])
    index.use(keys[2:9], on_probation=True)
    index.use(keys[0:1], on_probation=True)
    index.use(keys[8:9])
    index.use(keys[9:])
    assert [i for i, key in enumerate(keys) if not index.has(key)] == [6, 7]


def test_a_disk_is_opened_with_the_units_that_all_have() -> None:
    keys = [key_of(i, group_id=i % 2) for i in range(6)]
    numbers = [number_of(name_of(key)) for key in keys]
    assert numbers == [short_name(key) for key in keys]
    first, second = np.array(numbers[:5], "<u8"), np.array(numbers[:0:-1], "<u8")
    assert in_all([first, second]).tolist() == numbers[1:5]
    index = CommonIndex(1 << 20, (100, 200))
    index.start(in_all([first, second]).tolist())
    assert [index.has(key) for key in keys] == [False, True, True, True, True, False]
