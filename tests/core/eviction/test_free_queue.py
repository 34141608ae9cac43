"""The free queue against a plain list: order, removal from the middle, compaction, refusals."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvjax.core.eviction.free_queue import NOT_QUEUED, FreeKVCacheBlockQueue
from kvjax.errors import BlockStateError, InvariantError, OutOfBlocksError


def contents(queue: FreeKVCacheBlockQueue) -> list[int]:
    queue.check_invariants()
    assert queue.num_free_blocks == len(queue)
    return queue.get_all_free_blocks().tolist()


def test_starts_with_all_blocks_in_id_order() -> None:
    assert contents(FreeKVCacheBlockQueue(5)) == [0, 1, 2, 3, 4]


def test_ids_come_out_as_int32() -> None:
    queue = FreeKVCacheBlockQueue(4)
    assert queue.popleft_n(2).dtype == queue.get_all_free_blocks().dtype == np.int32
    assert type(queue.popleft()) is int


def test_append_joins_the_tail_and_prepend_the_head_in_the_order_given() -> None:
    queue = FreeKVCacheBlockQueue(6)
    assert queue.popleft_n(5).tolist() == [0, 1, 2, 3, 4]
    queue.append_n([3, 1])
    queue.prepend_n([4, 0])
    queue.append(2)
    assert contents(queue) == [4, 0, 5, 3, 1, 2]


def test_a_few_blocks_join_the_tail_as_many_do() -> None:
    """Over the end of the ring too, and where tombstones leave no room."""
    few, many = FreeKVCacheBlockQueue(4), FreeKVCacheBlockQueue(4)
    for round_number in range(9):
        for queue in (few, many):
            queue.remove_n([2, 1])
        few.append_few([1, 2] if round_number % 2 else (2, 1))
        many.append_n([1, 2] if round_number % 2 else [2, 1])
        assert contents(few) == contents(many)


def test_popping_all_and_refilling_starts_anew() -> None:
    queue = FreeKVCacheBlockQueue(4)
    assert queue.popleft_n(4).tolist() == [0, 1, 2, 3]
    assert contents(queue) == []
    queue.append_n([2, 0])
    assert contents(queue) == [2, 0]
    assert queue.popleft() == 2


def test_popping_nothing_changes_nothing() -> None:
    queue = FreeKVCacheBlockQueue(3)
    assert queue.popleft_n(0).tolist() == []
    queue.remove(0)
    assert queue.popleft_n(0).tolist() == []
    assert contents(queue) == [1, 2]


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 5, 8, 40])
@pytest.mark.parametrize("seed", range(12))
def test_agrees_with_a_list(num_blocks: int, seed: int) -> None:
    """Few pops and many removals on some seeds, so that tombstones pile up and the ring must compact."""
    rng = random.Random(f"{num_blocks}/{seed}")
    queue, model = FreeKVCacheBlockQueue(num_blocks), list(range(num_blocks))
    weights = [rng.random() ** 3 for _ in range(7)]
    for _ in range(600):
        absent = [b for b in range(num_blocks) if b not in model]
        rng.shuffle(absent)
        given = absent[: rng.randint(0, len(absent))]
        count = rng.randint(0, len(model))
        operation = rng.choices(
            ["popleft", "popleft_n", "remove", "remove_n", "append", "append_n", "prepend_n"], weights
        )[0]
        if operation == "popleft" and model:
            assert queue.popleft() == model.pop(0)
        elif operation == "popleft_n":
            assert queue.popleft_n(count).tolist() == model[:count]
            del model[:count]
        elif operation == "remove" and model:
            block_id = rng.choice(model)
            queue.remove(block_id)
            model.remove(block_id)
        elif operation == "remove_n":
            removed = rng.sample(model, count)
            queue.remove_n(removed)
            model = [b for b in model if b not in removed]
        elif operation == "append" and absent:
            queue.append(absent[0])
            model.append(absent[0])
        elif operation == "append_n":
            queue.append_n(np.array(given, np.int32))
            model += given
        elif operation == "prepend_n":
            queue.prepend_n(given)
            model = given + model
        assert contents(queue) == model
        assert queue.contains_n(np.arange(num_blocks)).tolist() == [b in model for b in range(num_blocks)]


@pytest.mark.parametrize("num_blocks", [2, 5, 16])
def test_young_blocks_are_counted_wherever_they_leave_from(num_blocks: int) -> None:
    """Old ones are popped, any are removed, young ones are appended, and age; over ends of the ring and compactions."""
    rng = random.Random(num_blocks)
    queue, old, young = FreeKVCacheBlockQueue(num_blocks), list(range(num_blocks)), list[int]()
    for _ in range(600):
        if rng.random() < 0.1:
            old, young, queue.num_young = old + young, [], 0
        count = rng.randint(0, len(old) // 2)
        assert queue.popleft_n(count).tolist() == old[:count]
        removed = [block for block in [*old[count:], *young] if rng.random() < 0.3]
        queue.remove_distinct(np.array(removed, np.int64))
        old, young = ([b for b in each if b not in removed] for each in (old[count:], young))
        given = [block for block in range(num_blocks) if block not in old + young and rng.random() < 0.5]
        if rng.random() < 0.5:
            queue.append_distinct(np.array(given, np.int64), are_young=True)
        else:
            queue.append_few(given, are_young=True)
        young += given
        assert contents(queue) == old + young
        assert (queue.num_old, queue.num_young) == (len(old), len(young))


@pytest.mark.parametrize("scalar", [True, False])
def test_compaction_keeps_order_and_size(scalar: bool) -> None:
    """Each round leaves a tombstone and never pops, so the two cells a block run out every few rounds."""
    queue, model = FreeKVCacheBlockQueue(5), list(range(5))
    for i in range(200):
        block_id = model.pop(i % 5)
        model.append(block_id)
        if scalar:
            queue.remove(block_id)
            queue.append(block_id)
        else:
            queue.remove_n([block_id])
            queue.append_n([block_id])
        assert contents(queue) == model
    assert queue.popleft_n(5).tolist() == model


def test_compaction_is_paid_for_by_removals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cells a block: the ring is full after as many removals as there are blocks, and not before."""
    queue, num_compactions = FreeKVCacheBlockQueue(50), 0
    compacted = FreeKVCacheBlockQueue._live

    def counted(self: FreeKVCacheBlockQueue) -> np.ndarray:
        nonlocal num_compactions
        num_compactions += 1
        return compacted(self)

    monkeypatch.setattr(FreeKVCacheBlockQueue, "_live", counted)
    for i in range(1_000):
        queue.remove(i % 50)
        queue.append(i % 50)
    assert 0 < num_compactions <= 1_000 / 50


def test_taken_ids_are_the_callers_own() -> None:
    queue = FreeKVCacheBlockQueue(4)
    taken, popped = queue.take(2), queue.popleft_n(2)
    for _ in range(10):
        queue.append_n([3, 2, 1, 0])
        queue.remove_n([0, 1, 2, 3])
    assert (taken.tolist(), popped.tolist()) == ([0, 1], [2, 3])


def test_prepending_for_ever_wraps_the_ring() -> None:
    queue = FreeKVCacheBlockQueue(3)
    for i in range(50):
        taken = queue.popleft_n(2)
        queue.prepend_n(taken[::-1] if i % 2 else taken)
    assert sorted(contents(queue)) == [0, 1, 2]


def test_far_tombstones_are_passed_in_one_call() -> None:
    queue = FreeKVCacheBlockQueue(5_000)
    queue.remove_n(np.arange(4_900))
    assert queue.popleft_n(3).tolist() == [4_900, 4_901, 4_902]
    assert queue.popleft() == 4_903
    assert len(contents(queue)) == 96


@pytest.mark.parametrize("num_blocks", range(1, 6))
def test_running_out_changes_nothing(num_blocks: int) -> None:
    queue = FreeKVCacheBlockQueue(num_blocks)
    with pytest.raises(OutOfBlocksError, match=f"needs {num_blocks + 1} blocks, {num_blocks} free"):
        queue.popleft_n(num_blocks + 1)
    assert contents(queue) == list(range(num_blocks))
    queue.popleft_n(num_blocks)
    with pytest.raises(OutOfBlocksError, match="needs 1 blocks, 0 free"):
        queue.popleft()


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="expected num_blocks >= 0, got -1"):
        FreeKVCacheBlockQueue(2).popleft_n(-1)


def test_an_empty_queue_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="expected num_blocks >= 1, got 0"):
        FreeKVCacheBlockQueue(0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda q: q.remove(1), "got 1, which is not in the free queue"),
        (lambda q: q.remove(-1), "got -1, which is not in the free queue"),
        (lambda q: q.remove_n([2, 1]), "got 1, which is not in the free queue"),
        (lambda q: q.remove_n([2, 3, 2]), "expected distinct blocks, got 2 twice"),
        (lambda q: q.append(3), "got 3, which is in it"),
        (lambda q: q.append_n([1, 3]), "got 3, which is in it"),
        (lambda q: q.append_n([1, 0, 1]), "expected distinct blocks, got 1 twice"),
        (lambda q: q.prepend_n([0, 2]), "got 2, which is in it"),
        (lambda q: q.prepend_n([0, 0]), "expected distinct blocks, got 0 twice"),
    ],
)
def test_a_refused_call_changes_nothing(call, message: str) -> None:
    queue = FreeKVCacheBlockQueue(5)
    queue.popleft_n(2)
    with pytest.raises(BlockStateError, match=message):
        call(queue)
    assert contents(queue) == [2, 3, 4]
    queue.append_n([1, 0])
    assert contents(queue) == [2, 3, 4, 1, 0]


@pytest.mark.parametrize(
    ("corrupt", "law"),
    [
        (lambda q: q._position.__setitem__(2, NOT_QUEUED), "Q2"),
        (lambda q: q._position.__setitem__(2, 0), "Q1"),
        (lambda q: setattr(q, "num_free_blocks", 3), "Q2"),
        (lambda q: setattr(q, "_tail", q._tail + 20), "Q2"),
        (lambda q: setattr(q, "num_young", 2), "Q3"),
    ],
)
def test_the_checker_sees_a_broken_queue(corrupt, law: str) -> None:
    queue = FreeKVCacheBlockQueue(4)
    corrupt(queue)
    with pytest.raises(InvariantError, match=law):
        queue.check_invariants()
