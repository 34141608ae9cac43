"""The scheduler's side of the tiers: which units are kept, where each lies, and which loads are in flight.

Flow:    KVCacheManager -> [TierScheduler: before_reuse, holds] ; Scheduler -> [TierScheduler] -> TierMeta -> TierWorker

A unit on its way down:

    pool --evicted (write-back) or registered (write-through)--> queued --build_connector_meta--> in transit
         --the worker has its bytes--> host (and disk, and shared store) --evicted there--> disk, shared store

A load, from the moment a request has blocks for it:

    waiting for units in transit --> in flight --> loaded, failed or cancelled

With write-back a unit that was loaded leaves the host: it comes again when its block is evicted, so pool and host
together hold as many units as one pool of both sizes, in one order. With write-through the host keeps what it has.

Whatever a worker's report lacks counts as failed: a load that it neither reports nor has is lost. A request whose load
failed computes its tokens, and is not loaded again.

Invariants (`check_invariants`):

    T1  a slot of the host is held by loads in flight, and by stores that are being written
    T2  a load waits for units in transit only
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvjax.core import BlockHash, KVCacheBlocks, KVCacheManager, Request
from kvjax.core.kinds.probation import take_off_probation
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.cache_tier import TierLink
from kvjax.errors import InvariantError
from kvjax.tiers.connector import ConnectorOutput, LoadResults
from kvjax.tiers.scheduler.transit import UnitsInTransit
from kvjax.tiers.stats import TierStats
from kvjax.tiers.stores.host_store import HostStore
from kvjax.tiers.units import (
    LASTING,
    NOTHING,
    CopyUnits,
    LoadUnits,
    StoredUnits,
    StoreUnits,
    TierMeta,
    UnitKey,
    UnitWorth,
)


class DiskIndex(Protocol):
    """What of a disk tier the scheduler asks for."""

    def has(self, key: UnitKey) -> bool:
        """Whether the disk may have the unit; no disk is touched."""


class SharedIndex(Protocol):
    """What of a shared store the scheduler asks for. It waits for nothing."""

    def may_have(self, keys: Sequence[UnitKey]) -> list[bool]:
        """Which units may be there; the store is asked for those that nothing is known of."""

    def is_asked(self, keys: Sequence[UnitKey]) -> bool:
        """Whether the store has been asked for one of them, and may answer in time."""


@dataclass
class _Load:
    """One request's load."""

    request: Request
    started_s: float
    num_tokens: int
    held: dict[int, list[int]] = field(default_factory=dict)  # group -> slots of the host
    destinations: dict[int, np.ndarray] = field(default_factory=dict)  # group -> int32[n] blocks of the pool
    waits_for: dict[UnitKey, int] = field(default_factory=dict)  # units in transit -> their destination
    num_issued: int = 0  # units that the worker has been told of, or will be with the next metadata
    num_written: int = 0
    is_cancelled: bool = False


class TierScheduler:
    """A `CacheTier` and a `SchedulerConnector`. Owned by the scheduler's thread; costs about a microsecond a unit."""

    def __init__(
        self,
        host: HostStore,
        disk: DiskIndex | None,
        pool_of_group: Sequence[int],
        *,
        write_through: bool = False,
        load_timeout_s: float = 60.0,
        stats: TierStats | None = None,
        clock: Callable[[], float] = time.monotonic,
        rank: int = 0,  # data rank whose manager it knows
        transit: UnitsInTransit | None = None,  # that of all ranks with this host; None: there is one rank
        shared: SharedIndex | None = None,
    ) -> None:
        self.stats = TierStats() if stats is None else stats
        self._host = host
        self._disk = disk
        self._shared = shared
        self._pool_of_group = tuple(pool_of_group)
        self._write_through = write_through
        self._timeout_s = load_timeout_s
        self._clock = clock
        self._rank = rank
        self._transit = UnitsInTransit() if transit is None else transit
        self._transit.schedulers.append(self)
        self._manager: KVCacheManager | None = None
        self._start()

    def _start(self) -> None:
        self._evicted: dict[UnitKey, int] = {}  # block of the pool, since the last metadata
        self._worth: dict[UnitKey, UnitWorth] = {}  # of these
        self._registered: dict[UnitKey, int] = {}  # likewise; computed by the step that the next metadata belongs to
        self._to_store: dict[UnitKey, int] = {}  # registered before, to be stored with the next metadata
        self._transit.keys.clear()
        self._loads: dict[int, _Load] = {}
        self._load_of: dict[str, int] = {}  # request -> its load, until it has ended
        self._ready: list[LoadUnits] = []
        self._copies: list[CopyUnits] = []
        self._cancelled: list[int] = []
        self._not_again: dict[str, Request] = {}  # requests whose load failed
        self._loaded: list[_Load] = []  # since the last metadata

    # -- what the manager says and asks -----------------------------------------------------------------------------

    def before_reuse(
        self, pool_id: int, block_ids: np.ndarray, block_hashes: Sequence[BlockHash], group_ids: np.ndarray
    ) -> None:
        """`CacheTier.before_reuse`: the blocks are read before the next step."""
        link = self._link_of(pool_id)
        worths = map(UnitWorth, link.on_probation[block_ids].tolist(), link.last_used[block_ids].tolist())
        units = zip(block_ids.tolist(), block_hashes, group_ids.tolist(), worths, strict=True)
        for block_id, block_hash, group_id, worth in units:
            key = UnitKey(group_id, block_hash)
            if self._registered.get(key) == block_id:
                del self._registered[key]  # its page is not computed yet, and never will be
            else:
                self._evicted[key] = block_id
                self._worth[key] = worth

    def after_register(
        self, pool_id: int, block_ids: np.ndarray, block_hashes: Sequence[BlockHash], group_id: int
    ) -> None:
        """`CacheTier.after_register`: no page is read before the step that is planned has computed it."""
        for block_id, block_hash in zip(block_ids.tolist(), block_hashes, strict=True):
            if block_id:
                key = UnitKey(group_id, block_hash)
                self._registered[key] = block_id
                if self._to_store.get(key) == block_id:
                    del self._to_store[key]  # the step that would have computed it was taken back

    def holds(self, block_hashes: Sequence[BlockHash], group_id: int) -> np.ndarray:  # bool[n]
        """`CacheTier.holds`: on the host, on disk, on the way there, or, as far as is known, in the shared store."""
        found = self._host.find(block_hashes, group_id) >= 0
        disk = self._disk
        in_transit = self._transit.keys
        if self._evicted or in_transit or disk is not None:
            for place in np.flatnonzero(~found).tolist():
                key = UnitKey(group_id, block_hashes[place])
                found[place] = key in self._evicted or key in in_transit or (disk is not None and disk.has(key))
        if self._shared is not None and not found.all():
            places = np.flatnonzero(~found)
            found[places] = self._shared.may_have([UnitKey(group_id, block_hashes[i]) for i in places.tolist()])
        return found

    # -- SchedulerConnector -----------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Forgets what is in flight, of whatever manager; the host's units stay."""
        self._start()
        self._manager = manager

    def get_num_new_matched_tokens(
        self, request: Request, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """What the lookup says that the tiers hold; None while one of its blocks is being computed, or asked for."""
        self._host.clock += 1
        for pool_id in range(1 + max(self._pool_of_group)):
            self._link_of(pool_id).clock = self._host.clock
        elsewhere = blocks.elsewhere
        if elsewhere is None or request.request_id in self._not_again:
            return 0, False
        for group_id, part in enumerate(elsewhere.blocks):
            for block_hash, block_id in zip(part.block_hashes, part.block_ids.tolist(), strict=True):
                if block_id >= 0 and self._registered.get(UnitKey(group_id, block_hash)) == block_id:
                    return None, False
            if self._shared is not None:
                hashes = [hash_ for hash_, place in zip(part.block_hashes, part.block_ids, strict=True) if place < 0]
                if self._shared.is_asked([UnitKey(group_id, block_hash) for block_hash in hashes]):
                    return None, False
        return elsewhere.num_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Finds each unit of the load and keeps it where it is."""
        elsewhere, manager = blocks.elsewhere, self._manager
        if not num_external_tokens or elsewhere is None or manager is None:
            return
        load_id = self._transit.next_load()
        load = self._loads[load_id] = _Load(request, self._clock(), num_external_tokens)
        self._load_of[request.request_id] = load_id
        tables = manager.get_block_ids(request.request_id)
        for group_id, (first, block_hashes, block_ids) in enumerate(elsewhere.blocks):
            if not block_hashes:
                continue
            destinations = np.array(tables[group_id][first : first + len(block_hashes)], np.int32)
            load.destinations[group_id] = destinations
            self._find_units(load_id, load, group_id, block_hashes, block_ids, destinations)

    def build_connector_meta(self) -> TierMeta:
        """Stores of what was evicted or registered, and loads whose units are all there."""
        self._keep_loaded()
        stores = self._take_stores()
        if not (stores or self._ready or self._copies or self._cancelled):
            return NOTHING
        meta = TierMeta(stores, tuple(self._copies), tuple(self._ready), tuple(self._cancelled))
        self._copies, self._ready, self._cancelled = [], [], []
        return meta

    def request_finished(self, request: Request) -> None:
        """Its load, if any, may write no more; a request whose load failed may load again under its id."""
        if self._not_again.get(request.request_id) is request:
            del self._not_again[request.request_id]
        load_id = self._load_of.pop(request.request_id, None)
        if load_id is not None:
            self._cancel(load_id)

    def update_connector_output(self, output: ConnectorOutput) -> LoadResults:
        """Units that arrived can be found, and loads that waited for them go on; whose loads have ended."""
        self._settle_registered()
        self.end_stores(output.finished_sending)
        in_transit = self._transit.keys
        if not output.pending_sending and in_transit:  # reports were lost
            lost = list(in_transit)
            in_transit.clear()
            self._host.let_go_others(self._transit.held_slots)
            self._transit.issue_waiting(lost)
        for load_id, num_pages in output.finished_recving.items():
            if load_id in self._loads:
                self._loads[load_id].num_written += num_pages
        loaded: list[str] = []
        failed: list[str] = []
        now, unsent = self._clock(), self._unsent()
        for load_id, load in list(self._loads.items()):
            is_whole = not load.waits_for and load.num_written == load.num_issued
            is_over = load_id not in output.pending_recving and load_id not in unsent and not load.waits_for
            is_bad = load_id in output.failed_recving or now - load.started_s > self._timeout_s
            if not load.is_cancelled and (is_bad or is_over):
                request_id = load.request.request_id
                del self._load_of[request_id]
                if is_whole and not is_bad:
                    loaded.append(request_id)
                    self._loaded.append(load)
                    self.stats.num_loaded_tokens += load.num_tokens
                    self._end_load(load_id, forget=not self._write_through)
                    continue
                self._not_again[request_id] = load.request
                failed.append(request_id)
                self.stats.num_load_failures += 1
                self._cancel(load_id)
            if is_over:
                self._end_load(load_id, forget=False)
        return LoadResults(tuple(loaded), tuple(failed))

    def end_stores(self, stores: Iterable[StoredUnits]) -> None:
        """Units have arrived, or could not: loads that wait for them go on."""
        for store in stores:
            self._end_store(store)

    def queue_all(self) -> None:
        """Stores all that the manager has cached with the next metadata, what is evicted first first. Nothing runs."""
        for pool_id, pool in enumerate(() if self._manager is None else self._manager.block_pools):
            ids = pool.eviction_policy.order()
            ids = ids[pool.is_hashed[ids]]
            self._registered.clear()
            self.before_reuse(pool_id, ids, *pool.prefix_index.contents_of(ids))

    # -- for people and tests ---------------------------------------------------------------------------------------

    @property
    def num_loads(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    @property
    def held_slots(self) -> list[tuple[int, list[int]]]:
        """Per load and group the slots of the host that it holds."""
        return [held for load in self._loads.values() for held in load.held.items()]

    def check_invariants(self) -> None:
        """Checks T1 and T2, and the host's laws.

        Raises:
            InvariantError: one does not hold.
        """
        self._host.check_invariants()
        in_transit = self._transit.keys
        if not self._transit.num_loads and not in_transit and self._host.num_held:
            raise InvariantError(f"T1: {self._host.num_held} slots are held, by no load and no store")
        for load_id, load in self._loads.items():
            if not load.waits_for.keys() <= in_transit.keys():
                raise InvariantError(f"T2: load {load_id} waits for {load.waits_for}, in transit {in_transit}")

    # -- stores -----------------------------------------------------------------------------------------------------

    def _settle_registered(self) -> None:
        """What was registered so far is computed by steps that are dispatched, or will be before the next metadata."""
        if self._write_through:
            self._to_store |= self._registered
        self._registered = {}

    def _take_stores(self) -> tuple[StoreUnits, ...]:
        kept = {key: block_id for key, block_id in self._to_store.items() if self._is_registered(key, block_id)}
        wanted = {**kept, **self._evicted} if kept else self._evicted
        worths = {key: self._worth_of(key, block_id) for key, block_id in kept.items()} | self._worth
        self._to_store, self._evicted, self._worth = {}, {}, {}
        self._settle_registered()
        by_kind: dict[tuple[int, bool], list[UnitKey]] = {}
        for key in wanted:
            if key not in self._transit.keys:
                by_kind.setdefault((key.group_id, worths[key].on_probation), []).append(key)
        stores = []
        for (group_id, flag), keys in by_kind.items():
            slots = self._host.find([key.block_hash for key in keys], group_id)
            new = [key for key, slot in zip(keys, slots.tolist(), strict=True) if slot < 0]
            if not flag and len(new) < len(keys):
                self._host.use(group_id, slots[slots >= 0])
            if new and (self._goes_on or self._host.takes(group_id, on_probation=flag)):
                hashes, ids = tuple([key.block_hash for key in new]), np.array([wanted[key] for key in new], np.int32)
                stores.append(StoreUnits(group_id, hashes, ids, self._rank, flag))
                self._transit.keys.update((key, worths[key]) for key in new)
        return tuple(stores)

    @property
    def _goes_on(self) -> bool:
        """Whether units go further than the host."""
        return self._disk is not None or self._shared is not None

    def _worth_of(self, key: UnitKey, block_id: int) -> UnitWorth:
        link = self._link_of(self._pool_of_group[key.group_id])
        return UnitWorth(link.on_probation.item(block_id), link.last_used.item(block_id))

    def _link_of(self, pool_id: int) -> TierLink:
        assert self._manager is not None  # it asks, or registered blocks
        link = self._manager.block_pools[pool_id].tier_link
        assert link is not None  # the manager was made with this tier
        return link

    def _is_registered(self, key: UnitKey, block_id: int) -> bool:
        """Whether the block is still registered, and not forgotten since, as where a planned step was taken back."""
        pool = self._pool_of(key.group_id)
        return pool.block_hash_of(block_id) == key.block_hash and pool.group_of(block_id) == key.group_id

    def _pool_of(self, group_id: int) -> BlockPool:
        assert self._manager is not None  # who asks has its blocks
        return self._manager.block_pools[self._pool_of_group[group_id]]

    def _end_store(self, store: StoredUnits) -> None:
        """The worker has brought units to the host, or could not."""
        keys = [UnitKey(store.group_id, block_hash) for block_hash in store.block_hashes]
        worths = [self._transit.keys.pop(key, LASTING) for key in keys]
        has_slot = store.slots >= 0
        good = np.flatnonzero(store.is_good & has_slot)
        if good.size:
            hashes = [store.block_hashes[i] for i in good.tolist()]
            self._host.put(store.group_id, store.slots[good], hashes, [worths[i] for i in good.tolist()])
        self._host.let_go(store.group_id, store.slots[~store.is_good & has_slot])
        self.stats.num_stored += good.size
        is_refused = ~has_slot & [worth.on_probation for worth in worths]  # there is no room for them
        self.stats.num_store_failures += int(np.count_nonzero(~store.is_good & ~is_refused))
        self._transit.issue_waiting(keys)

    # -- loads ------------------------------------------------------------------------------------------------------

    def _find_units(
        self,
        load_id: int,
        load: _Load,
        group_id: int,
        block_hashes: Sequence[BlockHash],
        block_ids: np.ndarray,
        destinations: np.ndarray,
    ) -> None:
        """Says of each unit where it is read: in the pool as it is now, on the host, or on disk."""
        sources = block_ids.copy()
        slots = self._host.find(block_hashes, group_id)
        others = []
        for place, block_hash in enumerate(block_hashes):
            key = UnitKey(group_id, block_hash)
            if sources[place] < 0:
                sources[place] = self._evicted.get(key, -1)
            if sources[place] < 0:
                if slots[place] < 0 and key in self._transit.keys:
                    load.waits_for[key] = int(destinations[place])
                else:
                    others.append(place)
        in_pool = np.flatnonzero(sources >= 0)
        if in_pool.size:
            self._copies.append(CopyUnits(load_id, group_id, sources[in_pool], destinations[in_pool], self._rank))
            load.num_issued += in_pool.size
            self.stats.num_copied += in_pool.size
        self._issue(load_id, load, group_id, [block_hashes[i] for i in others], destinations[others])

    def _issue(
        self, load_id: int, load: _Load, group_id: int, block_hashes: Sequence[BlockHash], destinations: np.ndarray
    ) -> None:
        """Gives units that lie on the host or on disk to the worker."""
        if not block_hashes:
            return
        slots = self._host.find(block_hashes, group_id)
        on_host = slots[slots >= 0]
        self._host.hold(group_id, on_host)
        load.held.setdefault(group_id, []).extend(on_host.tolist())
        self._ready.append(LoadUnits(load_id, group_id, tuple(block_hashes), slots, destinations, self._rank))
        load.num_issued += slots.size
        self.stats.num_host_loads += on_host.size
        others = [UnitKey(group_id, block_hashes[i]) for i in np.flatnonzero(slots < 0).tolist()]
        num_shared = 0
        if self._shared is not None:
            num_shared = sum(self._disk is None or not self._disk.has(key) for key in others)
        self.stats.num_disk_loads += len(others) - num_shared
        self.stats.num_shared_loads += num_shared

    def issue_waiting(self, keys: Sequence[UnitKey]) -> None:
        """Units have left transit: loads of this rank that wait for them go on, from where they are now.

        A unit that is nowhere fails when the worker looks for it.
        """
        for load_id, load in self._loads.items():
            for key in keys if load.waits_for else ():
                destination = load.waits_for.pop(key, None)
                if destination is not None:
                    self._issue(load_id, load, key.group_id, [key.block_hash], np.array([destination], np.int32))

    def _end_load(self, load_id: int, *, forget: bool) -> None:
        """The worker is at the load no more."""
        for group_id, slots in self._loads.pop(load_id).held.items():
            self._host.let_go(group_id, np.array(slots, np.int32), forget=forget)

    def _keep_loaded(self) -> None:
        """A hit has used what was loaded: where it is registered by now, it is not on probation."""
        for load in self._loaded:
            for group_id, ids in load.destinations.items():
                pool = self._pool_of(group_id)
                take_off_probation(pool, ids[pool.is_hashed[ids]].astype(np.int64))
        self._loaded.clear()

    def _unsent(self) -> set[int]:
        """Loads of which the worker has not been told yet."""
        return {unit.load_id for unit in self._ready} | {unit.load_id for unit in self._copies}

    def _cancel(self, load_id: int) -> None:
        """The load may write no more. It ends, and lets go of the host's slots, when the worker is at it no more."""
        load = self._loads[load_id]
        load.is_cancelled = True
        load.waits_for.clear()
        self._ready = [units for units in self._ready if units.load_id != load_id]
        self._copies = [units for units in self._copies if units.load_id != load_id]
        self._cancelled.append(load_id)


__all__ = ["DiskIndex", "SharedIndex", "TierScheduler"]
