"""Random histories of a block pool agree with the plain one after every call: state, answers and refusals."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvjax.core.eviction import FREE_ORDERS
from kvjax.core.pool.block_pool import FEW_BLOCKS, BlockPool
from kvjax.errors import BlockStateError, OutOfBlocksError

from .plain_pool import PlainPool

GROUPS = (2, 5)
HASHES = [bytes([i]) * 32 for i in range(6)]  # few, so that blocks often share one
Hashes = st.lists(st.sampled_from(HASHES), min_size=12, max_size=12)
Picks = st.lists(st.integers(0, 2**16), max_size=12)


class PoolMachine(RuleBasedStateMachine):
    """Blocks are picked by index into whatever fits, so that most calls are legal."""

    @initialize(num_blocks=st.integers(2, 12), free_order=st.sampled_from(FREE_ORDERS), groups=st.integers(1, 2))
    def start(self, num_blocks: int, free_order: str, groups: int) -> None:
        self.group_ids = GROUPS[:groups]
        self.pool = BlockPool(num_blocks, group_ids=self.group_ids, free_order=free_order)
        self.plain = PlainPool(num_blocks, self.group_ids, free_order)

    def references(self) -> list[int]:
        """Each held block once per reference."""
        return [b for b, count in enumerate(self.plain.ref_count) for _ in range(count)]

    @rule(count=st.integers(0, 12))
    def get(self, count: int) -> None:
        if count > len(self.plain.free):
            with pytest.raises(OutOfBlocksError, match=f"needs {count} blocks, {len(self.plain.free)} free"):
                self.pool.get_new_blocks(count)
        else:
            assert self.pool.get_new_blocks(count).tolist() == self.plain.get(count)

    @rule()
    def get_one(self) -> None:
        if self.plain.free:
            assert [self.pool.get_new_block()] == self.plain.get(1)
        else:
            with pytest.raises(OutOfBlocksError, match="needs 1 blocks, 0 free"):
                self.pool.get_new_block()

    @rule(picks=Picks)
    def free_held_references(self, picks: list[int]) -> None:
        """As `free_references`, few and without null blocks, unchecked."""
        left = self.references()
        given = [left.pop(pick % len(left)) for pick in picks[:FEW_BLOCKS] if left]
        self.pool.free_held(np.array(given, np.int64))
        self.plain.release(given)

    @rule(picks=Picks, nulls=st.integers(0, 2))
    def free_references(self, picks: list[int], nulls: int) -> None:
        """References given back in any order, a block as often as it is held, with null blocks between."""
        left = self.references()
        given = [left.pop(pick % len(left)) for pick in picks if left]
        given[len(given) // 2 : len(given) // 2] = [0] * nulls
        self.pool.free_blocks(np.array(given, np.int32))
        self.plain.release(given)

    @rule(picks=Picks)
    def free_held(self, picks: list[int]) -> None:
        """A reference of each of several blocks, as a row gives back what it holds."""
        given = list(dict.fromkeys(held[pick % len(held)] for pick in picks if (held := self.references())))
        self.pool.free_held(np.array(given, np.int64))
        self.plain.release(given)

    @rule(picks=Picks)
    def free_anything(self, picks: list[int]) -> None:
        given = [pick % self.plain.num_blocks for pick in picks]
        if self.plain.can_release(given):
            self.pool.free_blocks(given)
            self.plain.release(given)
        else:
            with pytest.raises(BlockStateError, match="free each reference once"):
                self.pool.free_blocks(given)

    @rule(picks=Picks)
    def touch(self, picks: list[int]) -> None:
        """Free and held blocks, null, and repeats."""
        given = [pick % self.plain.num_blocks for pick in picks]
        self.pool.touch(np.array(given, np.int32))
        self.plain.touch(given)

    def registrable(self, picks: list[int]) -> list[int]:
        """Distinct blocks that are held and not hashed."""
        unhashed = [b for b, count in enumerate(self.plain.ref_count) if count and b not in self.plain.hash_of]
        return [unhashed.pop(pick % len(unhashed)) for pick in picks if unhashed]

    @rule(picks=Picks, hashes=Hashes, group=st.integers(0, 1), one_by_one=st.booleans())
    def register(self, picks: list[int], hashes: list[bytes], group: int, one_by_one: bool) -> None:
        group_id = self.group_ids[group % len(self.group_ids)]
        ids = self.registrable(picks)
        if one_by_one:
            for block_id, block_hash in zip(ids, hashes, strict=False):
                self.pool.register_few([block_id], [block_hash], 0, group_id)
        else:
            self.pool.register_many(np.array(ids, np.int32), hashes[: len(ids)], group_id)
        self.plain.register(ids, hashes[: len(ids)], group_id)

    @rule(picks=Picks, hashes=Hashes)
    def register_in_all_groups(self, picks: list[int], hashes: list[bytes]) -> None:
        """The groups of one spec register blocks of their own under the same hashes."""
        ids = self.registrable(picks)
        count = len(ids) // len(self.group_ids)
        by_group = np.array(ids[: count * len(self.group_ids)], np.int32).reshape(len(self.group_ids), count)
        self.pool.register_rows(
            by_group, np.fromiter(hashes[:count], np.object_, count), np.arange(count), self.group_ids
        )
        for group_id, of_group in zip(self.group_ids, by_group.tolist(), strict=True):
            self.plain.register(of_group, hashes[:count], group_id)

    @rule(picks=Picks)
    def register_what_cannot_be(self, picks: list[int]) -> None:
        ids = [pick % self.plain.num_blocks for pick in picks]
        legal = len(set(ids)) == len(ids) and all(self.plain.ref_count[b] and b not in self.plain.hash_of for b in ids)
        if not legal:
            with pytest.raises(BlockStateError, match=r"hashed already|free or null|is given \d+ times"):
                self.pool.register_many(ids, [HASHES[0]] * len(ids), self.group_ids[0])

    @rule(picks=Picks)
    def evict(self, picks: list[int]) -> None:
        ids = [pick % self.plain.num_blocks for pick in picks]
        self.pool.evict_blocks(np.array(ids, np.int32))
        self.plain.evict(ids)

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == self.plain.reset()

    @rule(hashes=st.lists(st.sampled_from(HASHES), max_size=8))
    def look_up(self, hashes: list[bytes]) -> None:
        for group_id in self.group_ids:
            assert self.pool.find_run(hashes, group_id).tolist() == self.plain.find_run(hashes, group_id)
            each = [(self.plain.find_run([h], group_id) or [-1])[0] for h in hashes]
            assert self.pool.find_each(hashes, group_id).tolist() == each
        for block_hash in hashes[:1]:
            one_per_group = [self.plain.find_run([block_hash], group_id) for group_id in self.group_ids]
            expected = [run[0] for run in one_per_group] if all(one_per_group) else None
            assert self.pool.get_cached_block(block_hash, self.group_ids) == expected

    @invariant()
    def same_state(self) -> None:
        if hasattr(self, "pool"):
            self.pool.check_invariants()
            assert self.pool.snapshot() == self.plain.snapshot()
            num_usable = self.plain.num_blocks - 1
            assert self.pool.num_free_blocks == self.pool.get_num_free_blocks() == len(self.plain.free)
            assert self.pool.get_usage() == pytest.approx((num_usable - len(self.plain.free)) / num_usable)
            assert self.pool.num_hashed_blocks == len(self.plain.hash_of)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(deadline=None, stateful_step_count=60)
