"""A worker without pages: units travel in virtual time, over one channel to the host, one back, and one to the disk.

Flow:    TierMeta -> [SimulatedWorker] -> ConnectorOutput, when the clock says so -> kvjax.replay

A transfer begins when its channel is free, and takes a latency and its bytes over the bandwidth. What a step asks for
of one load travels together. A load fails that asks for a unit which is nowhere.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.tiers.connector import ConnectorOutput
from kvjax.tiers.stores.host_store import HostStore
from kvjax.tiers.units import LoadUnits, StoredUnits, StoreUnits, TierMeta, UnitKey, UnitSizes


@dataclass
class Channel:
    """One way that bytes take. Without limits all of it takes no time."""

    bytes_per_s: float = math.inf
    latency_s: float = 0.0
    free_s: float = 0.0  # when what was sent so far has arrived
    num_bytes: int = 0  # sent so far

    def send(self, now_s: float, num_bytes: int) -> float:
        """When so many bytes have arrived."""
        self.free_s = max(self.free_s, now_s) + self.latency_s + num_bytes / self.bytes_per_s
        self.num_bytes += num_bytes
        return self.free_s


class SimulatedDisk:
    """Which units a disk of so many bytes has, those used longest ago deleted first."""

    def __init__(self, max_bytes: int, sizes: UnitSizes) -> None:
        self._most_bytes = max_bytes
        self._sizes = sizes
        self._units: OrderedDict[UnitKey, int] = OrderedDict()
        self._num_bytes = 0

    def has(self, key: UnitKey) -> bool:
        """Whether the unit is there."""
        return key in self._units

    def use(self, key: UnitKey, *, on_probation: bool = False) -> None:
        """The unit is read, or written; a new one on probation is deleted first."""
        if key not in self._units:
            size = self._sizes.unit_bytes(key.group_id)
            self._units[key] = size
            self._num_bytes += size
            self._units.move_to_end(key, last=not on_probation)
            while self._num_bytes > self._most_bytes:
                self._num_bytes -= self._units.popitem(last=False)[1]
        elif not on_probation:
            self._units.move_to_end(key)


class SimulatedWorker:
    """A `WorkerConnector` over no pages. Owned by the replay's thread."""

    def __init__(
        self,
        host: HostStore,
        disk: SimulatedDisk | None,
        sizes: UnitSizes,
        now_s: Callable[[], float],
        *,
        down: Channel | None = None,
        up: Channel | None = None,
        from_disk: Channel | None = None,
    ) -> None:
        self._host = host
        self._disk = disk
        self._sizes = sizes
        self._now_s = now_s
        self._down = Channel() if down is None else down
        self._up = Channel() if up is None else up
        self._from_disk = Channel() if from_disk is None else from_disk
        self._stores: list[tuple[float, StoreUnits]] = []
        self._loads: list[tuple[float, int, int]] = []  # (when it is there, load, pages)
        self._failed: set[int] = set()  # loads, since the last report

    @property
    def has_work(self) -> bool:
        """Whether anything travels."""
        return bool(self._stores or self._loads or self._failed)

    @property
    def next_load_s(self) -> float:
        """When the next load arrives or fails, or the next store if loads wait for it; infinite: nothing travels."""
        if self._failed:
            return self._now_s()
        times = [load[0] for load in self._loads] + [store[0] for store in self._stores]
        return min(times, default=math.inf)

    def warmup(self, pages: Any) -> Any:
        """Nothing."""
        return pages

    def wait(self) -> None:
        """Nothing: time passes elsewhere."""

    def start_load_kv(self, pages: Any, metadata: TierMeta) -> Any:
        """Sends everything on its way."""
        now_s = self._now_s()
        self._loads = [load for load in self._loads if load[1] not in metadata.cancelled]
        for copy in metadata.copies:
            self._loads.append((now_s, copy.load_id, copy.destinations.size))
        for store in metadata.stores:
            num_bytes = self._sizes.unit_bytes(store.group_id) * len(store.block_hashes)
            self._stores.append((self._down.send(now_s, num_bytes), store))
        for load in metadata.loads:
            if self._is_there(load):
                self._loads.append((self._arrival_s(load, now_s), load.load_id, load.slots.size))
            else:
                self._failed.add(load.load_id)
        return pages

    def get_finished(self) -> ConnectorOutput:
        """What has arrived by now: loads first, so that the slots they leave are free for stores."""
        now_s = self._now_s()
        finished: dict[int, int] = {}
        for when, load_id, num_pages in self._loads:
            if when <= now_s:
                finished[load_id] = finished.get(load_id, 0) + num_pages
        self._loads = [load for load in self._loads if load[0] > now_s]
        stored: list[StoredUnits] = []
        if not finished:
            stored = [self._store(store) for when, store in self._stores if when <= now_s]
            self._stores = [store for store in self._stores if store[0] > now_s]
        failed, self._failed = frozenset(self._failed), set()
        return ConnectorOutput(
            finished_recving=finished,
            failed_recving=failed,
            pending_recving=frozenset(load_id for _, load_id, _ in self._loads),
            finished_sending=tuple(stored),
            pending_sending=len(self._stores),
        )

    def _is_there(self, load: LoadUnits) -> bool:
        """Whether all that the host lacks is on disk."""
        places = np.flatnonzero(load.slots < 0).tolist()
        keys = [UnitKey(load.group_id, load.block_hashes[place]) for place in places]
        return not keys or (self._disk is not None and all(map(self._disk.has, keys)))

    def _arrival_s(self, load: LoadUnits, now_s: float) -> float:
        num_on_disk = int(np.count_nonzero(load.slots < 0))
        size = self._sizes.unit_bytes(load.group_id)
        when = now_s
        if num_on_disk and self._disk is not None:
            when = self._from_disk.send(now_s, num_on_disk * size)
            for block_hash, slot in zip(load.block_hashes, load.slots.tolist(), strict=True):
                if slot < 0:
                    self._disk.use(UnitKey(load.group_id, block_hash))
        return max(when, self._up.send(when, load.slots.size * size))

    def _store(self, store: StoreUnits) -> StoredUnits:
        slots = np.full(len(store.block_hashes), -1, np.int32)
        taken = self._host.take(store.group_id, slots.size, on_probation=store.on_probation)
        slots[: taken.size] = taken
        if self._disk is not None:
            for block_hash in store.block_hashes:
                self._disk.use(UnitKey(store.group_id, block_hash), on_probation=store.on_probation)
        return StoredUnits(store.group_id, store.block_hashes, slots, (slots >= 0) | (self._disk is not None))


__all__ = ["Channel", "SimulatedDisk", "SimulatedWorker"]
