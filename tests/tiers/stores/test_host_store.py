"""The host's units in lock step with lists, and its memory: what one kind gives up another can have."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kvjax.core import BlockHash
from kvjax.tiers.stores.host_rows import HostRows
from kvjax.tiers.stores.host_store import HostStore
from kvjax.tiers.units import UnitKey, UnitSizes, UnitWorth

STATM = Path("/proc/self/statm")
PAGE = 4096


def sizes_of(unit_bytes: Iterable[int], pools: Iterable[int] | None = None) -> UnitSizes:
    """Groups with units of so many bytes, each in a pool of its own, or in those named."""
    own = tuple(unit_bytes)
    pool_of_group = tuple(range(len(own))) if pools is None else tuple(pools)
    arrays = [max(size for size, of in zip(own, pool_of_group, strict=True) if of == i) for i in set(pool_of_group)]
    return UnitSizes(pool_of_group, tuple((size,) for size in arrays), (1,) * len(own), own)


def hash_of(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


@dataclass
class NaiveHost:
    """The definition: one unit after another goes until there is room.

    Those on probation go first, in the order in which they came, then those whose last use is longest ago.
    """

    max_bytes: int
    sizes: UnitSizes
    used: dict[UnitKey, int] = field(default_factory=dict)  # holds of each unit
    probation: list[UnitKey] = field(default_factory=list)
    lasting: list[UnitKey] = field(default_factory=list)
    last_used: dict[UnitKey, int] = field(default_factory=dict)
    clock: int = 0
    written: list[int] = field(default_factory=list)  # groups of slots without a unit

    def free_bytes(self) -> int:
        groups = [key.group_id for key in self.used] + self.written
        return self.max_bytes - sum(self.sizes.unit_bytes(group_id) for group_id in groups)

    def take(self, group_id: int, count: int, on_probation: bool) -> int:
        size = self.sizes.unit_bytes(group_id)
        if size > self.max_bytes:
            return 0
        while self.free_bytes() < count * size and (self.probation or (self.lasting and not on_probation)):
            del self.used[(self.probation or self.lasting).pop(0)]
        taken = min(count, self.free_bytes() // size)
        self.written += [group_id] * taken
        return taken

    def put(self, keys: list[UnitKey], worths: list[UnitWorth]) -> None:
        for key, worth in zip(keys, worths, strict=True):
            self.written.remove(key.group_id)
            self.used[key], self.last_used[key] = 0, worth.last_used
            if worth.on_probation:
                self.probation.append(key)
            else:
                self.keep(key)

    def keep(self, key: UnitKey) -> None:
        """Behind all that were used before it, or as late and came first."""
        self.lasting.append(key)
        self.lasting.sort(key=lambda one: self.last_used[one])  # stable

    def hold(self, keys: list[UnitKey]) -> None:
        for key in keys:
            self.used[key] += 1
            self.last_used[key] = self.clock
            for order in (self.probation, self.lasting):
                if key in order:
                    order.remove(key)

    def let_go(self, keys: list[UnitKey], forget: bool) -> None:
        for key in reversed(keys):
            self.used[key] -= 1
            if not self.used[key] and not forget:
                self.keep(key)
        for key in keys:
            if forget and not self.used[key]:
                del self.used[key]


class Both:
    """A store and the lists. Every call goes to both, and their answers are compared."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        pools = (0, 0, 1, 2) if seed % 2 else None
        self.sizes = sizes_of(self.rng.integers(1, 9, 4).tolist(), pools)
        self.host = HostStore(int(self.rng.integers(1, 120)), self.sizes, has_bytes=seed % 3 == 0)
        self.naive = NaiveHost(self.host.max_bytes, self.sizes)
        self.num_made = 0
        self.held: list[tuple[int, list[UnitKey], np.ndarray]] = []
        self.writing: list[tuple[int, np.ndarray, bool]] = []

    def take(self) -> None:
        group_id, count, flag = int(self.rng.integers(4)), int(self.rng.integers(1, 9)), bool(self.rng.random() < 0.4)
        slots = self.host.take(group_id, count, on_probation=flag)
        assert slots.size == self.naive.take(group_id, count, flag)
        assert np.unique(slots).size == slots.size
        assert (slots > 0).all()
        self.writing.append((group_id, slots, flag))

    def put(self) -> None:
        if not self.writing:
            return
        group_id, slots, flag = self.writing.pop(int(self.rng.integers(len(self.writing))))
        if self.rng.random() < 0.2:
            self.host.let_go(group_id, slots)
            for _ in slots:
                self.naive.written.remove(group_id)
            return
        keys = [UnitKey(group_id, hash_of(self.num_made + i)) for i in range(slots.size)]
        self.num_made += slots.size
        last_used = self.rng.integers(0, self.host.clock + 1, slots.size).tolist()
        worths = [UnitWorth(flag, one) for one in last_used]
        self.host.put(group_id, slots, [key.block_hash for key in keys], worths)
        self.naive.put(keys, worths)

    def hold(self) -> None:
        group_id = int(self.rng.integers(4))
        keys = [key for key in self.naive.used if key.group_id == group_id and self.rng.random() < 0.4]
        slots = self.host.find([key.block_hash for key in keys], group_id)
        self.host.hold(group_id, slots)
        self.naive.hold(keys)
        self.held.append((group_id, keys, slots))

    def let_go(self) -> None:
        if self.held:
            forget = bool(self.rng.random() < 0.5)
            group_id, keys, slots = self.held.pop(int(self.rng.integers(len(self.held))))
            self.host.let_go(group_id, slots, forget=forget)
            self.naive.let_go(keys, forget)

    def lose_holds(self) -> None:
        """Some are over and nothing is written any more, and who had them cannot tell."""
        gone = [self.held.pop() for _ in self.held[1:]]
        self.writing, self.naive.written = [], []
        self.host.let_go_others((group_id, slots.tolist()) for group_id, _, slots in self.held)
        over = [key for _, keys, _ in gone for key in keys]
        still = [key for _, keys, _ in self.held for key in keys]
        order = self.host.keys()  # of those that end at once any serves
        for key in order:
            if key in over and key not in still:
                self.naive.keep(key)
        self.naive.used |= {key: still.count(key) for key in over}

    def check(self) -> None:
        self.host.check_invariants()
        order = [*self.naive.probation, *self.naive.lasting]
        keys = self.host.keys()
        assert keys[: len(order)] == order
        assert set(keys) == set(self.naive.used)
        assert self.host.num_held == len(self.naive.used) - len(order) + len(self.naive.written)
        for group_id in range(4):
            known = [hash_of(number) for number in range(self.num_made)]
            found = self.host.find(known, group_id)
            assert [UnitKey(group_id, one) in self.naive.used for one in known] == (found >= 0).tolist()


def run(seed: int, num_calls: int) -> None:
    both = Both(seed)
    calls = (both.take, both.put, both.hold, both.let_go, both.lose_holds)
    for _ in range(num_calls):
        both.host.clock = both.naive.clock = both.naive.clock + int(both.rng.integers(2))
        calls[int(both.rng.choice(5, p=(0.3, 0.3, 0.2, 0.19, 0.01)))]()
        both.check()


@pytest.mark.parametrize("seed", range(12))
def test_agrees_with_lists(seed: int) -> None:
    """Who goes for whom, what is found, what is held, at any size; the bytes are never more than there are."""
    run(seed, 60)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(12, 412))
def test_agrees_with_lists_for_long(seed: int) -> None:
    run(seed, 150)


def test_kinds_share_the_bytes_by_what_comes() -> None:
    """A tier split in proportion to its pools had 0 of 8 hits here (SGLang 39436): 8 prompts, each of 16 blocks of one
    byte and a state of 40, in the room that they need.
    """
    host = HostStore(8 * (16 + 40), sizes_of((1, 40)), has_bytes=False)
    for prompt in range(8):
        for group_id, count in ((0, 16), (1, 1)):
            hashes = [hash_of(100 * prompt + i) for i in range(count)]
            host.put(group_id, host.take(group_id, count), hashes, [UnitWorth()] * count)
    for prompt in range(8):
        assert (host.find([hash_of(100 * prompt + i) for i in range(16)], 0) >= 0).all()
        assert (host.find([hash_of(100 * prompt)], 1) >= 0).all()


def test_without_room_for_one_unit_nothing_is_kept() -> None:
    host = HostStore(10, sizes_of((11, 4)), has_bytes=False)
    assert host.take(0, 3).size == 0
    assert host.take(1, 3).size == 2
    assert HostStore(0, sizes_of((11, 4))).take(1, 1).size == 0


def test_clear_forgets_units_and_holds() -> None:
    host = HostStore(100, sizes_of((10, 20)))
    host.put(0, host.take(0, 4), [hash_of(i) for i in range(4)], [UnitWorth()] * 4)
    host.take(1, 2)
    host.clear()
    assert (host.num_stored, host.num_held, host.keys()) == (0, 0, [])
    assert host.take(1, 9).size == 5
    host.check_invariants()


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * PAGE


@pytest.mark.skipif(not STATM.exists(), reason="the system does not say what is resident")
def test_memory_moves_from_kind_to_kind() -> None:
    """One kind fills the host, then the other does: what is resident stays within the bytes, and so do their values."""
    max_bytes, small, large = 1 << 25, 1 << 16, 1 << 20
    host, before = HostStore(max_bytes, sizes_of((small, large))), resident_bytes()
    for turn in range(4):
        group_id = turn % 2
        slots = host.take(group_id, max_bytes)
        assert slots.size == max_bytes // (small, large)[group_id]
        host.buffers[group_id][0][slots] = np.arange(slots.size, dtype=np.uint8)[:, None]
        hashes = [hash_of(turn << 20 | i) for i in range(slots.size)]
        host.put(group_id, slots, hashes, [UnitWorth()] * slots.size)
        host.check_invariants()
        values = host.buffers[group_id][0][host.find(hashes, group_id)]
        assert (values == np.arange(slots.size, dtype=np.uint8)[:, None]).all()
        del values
        assert resident_bytes() - before < 1.25 * max_bytes


@pytest.mark.parametrize("seed", range(8))
def test_rows_are_somebodys_or_nobodys(seed: int) -> None:
    """No row is given out twice, and none beyond the last; what is written to a used row stays there."""
    rng, rows = np.random.default_rng(seed), HostRows(20, (3, 5), has_bytes=seed % 2 == 0)
    used: set[int] = set()
    for _ in range(200):
        taken = rows.take(int(rng.integers(0, 6))).tolist()
        assert not used.intersection(taken)
        used.update(taken)
        for array in rows.arrays:
            array[taken] = np.array(taken, np.uint8)[:, None]
        back = [row for row in used if rng.random() < 0.2]
        used.difference_update(back)
        rows.give(back)
        if rng.random() < 0.2:
            rows.cool()
            assert rows.warm_bytes == 0
        assert rows.num_used == len(used)
        assert all((array[row] == row).all() for array in rows.arrays for row in used)
        assert used <= set(range(1, 21))
    assert rows.take(30).size == 20 - len(used)
