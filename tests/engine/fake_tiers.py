"""A host tier under the fake device: units travel for as many steps as chance says, and pages really change.

What a load brings is written before a step, piece by piece, until the load is cancelled. So pages that somebody else
has by then hold other tokens, and the fake model says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvjax.core.spec import KVCacheConfig
from kvjax.tiers.connector import ConnectorOutput
from kvjax.tiers.scheduler.tier_scheduler import TierScheduler
from kvjax.tiers.stores.host_store import HostStore
from kvjax.tiers.units import LoadUnits, StoredUnits, StoreUnits, TierMeta, UnitSizes


@dataclass(eq=False)
class Piece:
    """One unit of a load on its way."""

    load_id: int
    pages: np.ndarray  # of its pool
    block_id: int
    content: np.ndarray
    due: int  # step in which it is written
    fails: bool


class FakeTiers:
    """Scheduler's and worker's side of a host with room for everything."""

    def __init__(self, config: KVCacheConfig, seed: int, max_steps: int, failure_rate: float = 0.0) -> None:
        sizes = replace(UnitSizes.of(config), bytes_of_group=(1,) * len(config.kv_cache_groups))
        self.host = HostStore(512 * len(config.pools), sizes, has_bytes=False)
        self.scheduler = TierScheduler(self.host, None, sizes.pool_of_group, clock=lambda: 0.0)
        self.num_cancelled = 0
        self.hold = False  # whether nothing arrives
        self._pool_of = sizes.pool_of_group
        self._rng = np.random.default_rng(seed)
        self._max_steps, self._failure_rate = max_steps, failure_rate
        self._slots: dict[tuple[int, int], np.ndarray] = {}  # of the host, by pool and slot
        self._pieces: list[Piece] = []
        self._stored: list[StoredUnits] = []
        self._written: Counter[int] = Counter()
        self._failed: set[int] = set()
        self._step = 0

    def start_load_kv(self, pools: Sequence[np.ndarray], meta: TierMeta) -> None:
        """Reads pages that are stored or copied, then writes what has arrived by this step."""
        self._step += 1
        self.num_cancelled += len(meta.cancelled)
        self._pieces = [piece for piece in self._pieces if piece.load_id not in meta.cancelled]
        copied = [pools[self._pool_of[copy.group_id]][copy.sources].copy() for copy in meta.copies]
        self._stored += [self._store(pools[self._pool_of[store.group_id]], store) for store in meta.stores]
        for copy, content in zip(meta.copies, copied, strict=True):
            pools[self._pool_of[copy.group_id]][copy.destinations] = content
            self._written[copy.load_id] += copy.destinations.size
        for load in meta.loads:
            self._send(pools, load)
        for piece in [piece for piece in self._pieces if piece.due <= self._step and not self.hold]:
            self._pieces.remove(piece)
            if piece.fails:
                self._failed.add(piece.load_id)
            else:
                piece.pages[piece.block_id] = piece.content
                self._written[piece.load_id] += 1

    def get_finished(self) -> ConnectorOutput:
        """What has happened since the last call."""
        output = ConnectorOutput(
            finished_recving=dict(self._written),
            failed_recving=frozenset(self._failed),
            pending_recving=frozenset(piece.load_id for piece in self._pieces),
            finished_sending=tuple(self._stored),
        )
        self._written, self._failed, self._stored = Counter(), set(), []
        return output

    def _store(self, pages: np.ndarray, store: StoreUnits) -> StoredUnits:
        slots = self.host.take(store.group_id, len(store.block_hashes))
        for slot, content in zip(slots.tolist(), pages[store.block_ids].copy(), strict=True):
            self._slots[self._pool_of[store.group_id], slot] = content
        return StoredUnits(store.group_id, store.block_hashes, slots, np.ones(slots.size, bool))

    def _send(self, pools: Sequence[np.ndarray], load: LoadUnits) -> None:
        pool_id = self._pool_of[load.group_id]
        for slot, block_id in zip(load.slots.tolist(), load.destinations.tolist(), strict=True):
            due = self._step + int(self._rng.integers(self._max_steps + 1))
            content, fails = self._slots[pool_id, slot].copy(), bool(self._rng.random() < self._failure_rate)
            self._pieces.append(Piece(load.load_id, pools[pool_id], block_id, content, due, fails))
