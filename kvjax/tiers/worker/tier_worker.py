"""The worker's side of the tiers: pages out of the device's arrays and into them, beside the steps.

Flow:    TierMeta + KVPages -> [TierWorker.start_load_kv] -> KVPages; bytes <-> HostStore, DiskStore and SharedStore

Down: pages are gathered before the next step writes them, and travel to the host while it runs; a thread writes them
into slots, to disk and to the shared store. Up: a thread brings units together and puts them on the device; once they
are there, they are scattered into their pages before the next step. Nothing waits, but for what is in flight to fall
below `max_bytes_in_flight`, and in `wait`.

Where the platform has host memory that the device copies to by itself ("pinned_host"), gathered pages go there.

A `Pace` says what of all this counts as done. Over several processes that is the same for all of them at every step,
and each moves its own parts of the pages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for_futures
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.device import KVPages
from kvjax.device.mesh.aligned import RecycledMemory
from kvjax.device.mesh.transfers import hands_over, reads_back
from kvjax.device.pages.kv_pages import Column
from kvjax.device.pages.page_ops import PAGE_COUNTS, SKIP, gather_pages_padded, pad_ids, scatter_pages_padded
from kvjax.device.pages.page_parts import PageParts, WholePages
from kvjax.device.pages.rank_pages import gather_for_ranks, scatter_rank_pages
from kvjax.errors import TierDataError
from kvjax.tiers.connector import ConnectorOutput
from kvjax.tiers.shared.shared_store import SharedStore
from kvjax.tiers.stats import TierStats
from kvjax.tiers.stores.disk_store import DiskStore
from kvjax.tiers.stores.host_store import HostStore
from kvjax.tiers.units import LoadUnits, StoredUnits, StoreUnits, TierMeta, UnitKey, UnitSizes
from kvjax.tiers.worker.pace import OwnPace, Pace, PieceState

PIECE_BYTES = 1 << 23  # of one gather or scatter, where that is not less than the shortest declared length
IDLE_BYTES = 1 << 26  # most memory of pieces on their way up that is kept for later ones
PINNED = "pinned_host"
LOOK_S = 1.0  # most that `wait` waits for threads, since a load may hang
PAUSE_S = 0.0005  # between looks at arrays that are on their way, in `wait`


class _Arriving(NamedTuple):
    """Pages on their way from the device."""

    turn: int
    units: StoreUnits
    arrays: tuple[jax.Array, ...]  # [padded count, ...]
    num_bytes: int


class _Writing(NamedTuple):
    """Pages that a thread brings to the host's slots."""

    turn: int
    units: StoreUnits
    slots: np.ndarray  # int32[n]
    is_good: Future[np.ndarray]  # bool[n]
    num_bytes: int


class _Staged(NamedTuple):
    """Pages that a thread brings to the device."""

    number: int  # as the pace has it
    load_id: int
    pool_id: int
    rank: int
    destinations: np.ndarray  # int32[n]
    values: Future[tuple[Column, ...]]


class TierWorker:
    """A `WorkerConnector`. Owned by the engine's thread; `close` ends its threads."""

    def __init__(
        self,
        host: HostStore,
        disk: DiskStore | None,
        sizes: UnitSizes,
        *,
        num_threads: int = 2,
        max_bytes_in_flight: int | None = None,  # None: as `TierConfig` says
        memory_kind: str | None = None,  # to gather into; None: "pinned_host" on accelerators that have it
        stats: TierStats | None = None,
        parts: PageParts | None = None,  # what of the pages this process keeps; None: all
        pace: Pace | None = None,  # None: that of one process
        shared: SharedStore | None = None,
    ) -> None:
        self.stats = TierStats() if stats is None else stats
        self._host = host
        self._disk = disk
        self._shared = shared
        self._sizes = sizes
        default = 1 << 23 if jax.default_backend() == "cpu" else 1 << 28
        self._most_bytes = default if max_bytes_in_flight is None else max_bytes_in_flight
        self._memory_kind = memory_kind
        self._threads = ThreadPoolExecutor(num_threads, "kvjax-tier")
        self._disk_threads = ThreadPoolExecutor(num_threads, "kvjax-disk")
        self._parts = WholePages() if parts is None else parts
        self._pace = OwnPace() if pace is None else pace
        self._memory = RecycledMemory(IDLE_BYTES)
        self._to_disk: deque[tuple[Future[Any], int]] = deque()  # writes in flight and their bytes; threads append
        self._waits_for_disk = False
        self._start()

    def _start(self) -> None:
        self._arriving: deque[_Arriving] = deque()
        self._writing: deque[_Writing] = deque()
        self._stored: list[StoredUnits] = []  # ended, not reported
        self._staged: deque[_Staged] = deque()
        self._cancelled: set[int] = set()
        self._written: dict[int, int] = {}  # load -> pages since the last report
        self._failed: set[int] = set()  # loads
        self._bytes_in_flight = 0
        self._turn = 0

    @property
    def has_work(self) -> bool:
        """Whether anything is in flight, or not reported."""
        return bool(self._arriving or self._writing or self._stored or self._staged or self._written or self._failed)

    @hands_over
    def warmup(self, pages: KVPages) -> KVPages:
        """Compiles gathers and scatters of all pools and declared lengths; the pages, unchanged."""
        for pool_id in range(len(pages.pools)):
            for count in PAGE_COUNTS:
                nothing = np.full(count * pages.num_ranks, SKIP, np.int32)
                values = gather_pages_padded(pages, pool_id, nothing)
                pages = scatter_pages_padded(pages, pool_id, nothing, values)
        return pages

    def start_load_kv(self, pages: KVPages, metadata: TierMeta) -> KVPages:
        """Gathers what is stored or copied, then scatters copies and what has arrived on the device."""
        self._cancelled.update(metadata.cancelled)
        copies = []
        for load_id, group_id, sources, destinations, rank in metadata.copies:
            pool_id = self._sizes.pool_of_group[group_id]
            for part in self._pieces(sources.size, group_id):
                values = gather_for_ranks(pages, pool_id, rank, sources[part])
                copies.append((load_id, pool_id, rank, destinations[part], values))
        for store in metadata.stores:
            self._gather(pages, store)
        for load_id, pool_id, rank, destinations, values in copies:
            pages = scatter_rank_pages(pages, pool_id, rank, destinations, values)
            self._written[load_id] = self._written.get(load_id, 0) + destinations.size
        for load in metadata.loads:
            self._stage(pages, load)
        return self._scatter(pages)

    def get_finished(self) -> ConnectorOutput:
        """What has happened since the last call."""
        pace, self._turn = self._pace, self._pace.begin_turn()
        while self._arriving and pace.has_arrived(self._arriving[0].turn, is_ready=are_ready(self._arriving[0].arrays)):
            self._write(self._arriving.popleft())
        finished, self._stored = self._stored, []
        while self._writing and pace.has_ended(self._writing[0].turn, is_done=self._writing[0].is_good.done()):
            finished.append(self._ended(self._writing.popleft()))
        pending = frozenset(staged.load_id for staged in self._staged)
        self._cancelled &= pending
        output = ConnectorOutput(
            finished_recving=self._written,
            failed_recving=frozenset(self._failed),
            pending_recving=pending,
            finished_sending=tuple(finished),
            pending_sending=len(self._arriving) + len(self._writing),
        )
        self._written, self._failed = {}, set()
        while self._to_disk and self._to_disk[0][0].done():
            self._to_disk.popleft()
        return output

    def wait(self) -> None:
        """Waits until a thread has ended something, or pages have arrived; not for units on their way to disk."""
        while not (self._written or self._failed or self._stored):
            futures: set[Future[Any]] = {writing.is_good for writing in self._writing}
            futures |= {staged.values for staged in self._staged}
            lookups = [] if self._shared is None else self._shared.lookups
            futures.update(lookups)
            if any(future.done() for future in futures):
                return
            if self._arriving:
                if are_ready(self._arriving[0].arrays):
                    return
                time.sleep(PAUSE_S)
            elif futures:
                timeout_s = self._shared.lookup_timeout_s if lookups and self._shared is not None else LOOK_S
                wait_for_futures(futures, min(timeout_s, LOOK_S), return_when=FIRST_COMPLETED)
                return
            else:
                return

    @contextmanager
    def waiting_for_disk(self) -> Iterator[None]:
        """Within, what is stored waits for disk and shared store where otherwise it would be passed over."""
        self._waits_for_disk = True
        try:
            yield
        finally:
            self._waits_for_disk = False

    def flush(self) -> list[StoredUnits]:
        """Brings all pages that were gathered to the host, disk and shared store; what `get_finished` says."""
        while self._arriving or self._writing:
            self._end_oldest()
        finished, self._stored = self._stored, []
        wait_for_futures([future for future, _ in list(self._to_disk)])
        if self._shared is not None:
            self._shared.flush()
        return finished

    def reset(self) -> None:
        """Forgets all that is in flight, once its threads have ended."""
        futures: list[Future[Any]] = [writing.is_good for writing in self._writing]
        wait_for_futures(futures + [staged.values for staged in self._staged])
        self._pace.reset()
        self._start()

    def close(self) -> None:
        """Ends the threads, after what they are at."""
        self._threads.shutdown()
        self._disk_threads.shutdown()

    # -- down -------------------------------------------------------------------------------------------------------

    def _gather(self, pages: KVPages, store: StoreUnits) -> None:
        pool_id = self._sizes.pool_of_group[store.group_id]
        num_arrays = self._sizes.num_arrays_of_group[store.group_id]
        for part in self._pieces(store.block_ids.size, store.group_id):
            units = store._replace(block_hashes=store.block_hashes[part], block_ids=store.block_ids[part])
            gathered = self._parts.gather(pages, pool_id, store.rank, units.block_ids)[:num_arrays]
            arrays = self._to_host(gathered)
            num_bytes = self._sizes.unit_bytes(store.group_id) * units.block_ids.size
            self._arriving.append(_Arriving(self._turn, units, arrays, num_bytes))
            self._bytes_in_flight += num_bytes
            while self._bytes_in_flight > self._most_bytes and (self._arriving or self._writing):
                self._end_oldest()

    def _to_host(self, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """Starts the copies to the host; a CPU's arrays are there."""
        if not arrays:
            return ()
        device = next(iter(arrays[0].devices()))
        if self._memory_kind is None:
            kinds = {memory.kind for memory in device.addressable_memories()}
            self._memory_kind = PINNED if device.platform != "cpu" and PINNED in kinds else ""
        if kind := self._memory_kind:
            return tuple(jax.device_put(array, array.sharding.with_memory_kind(kind)) for array in arrays)
        if device.platform != "cpu":
            for array in arrays:
                array.copy_to_host_async()
        return tuple(arrays)

    def _end_oldest(self) -> None:
        """Waits for the oldest store in flight; what no thread has begun is done here, since this one has to wait."""
        if not self._writing:
            self._write(self._arriving.popleft(), _run_here)
        self._stored.append(self._ended(self._writing.popleft()))

    def _pieces(self, count: int, group_id: int) -> Iterable[slice]:
        """Units of one group in pieces of a declared length: small ones overlap, and their memory is used again."""
        fit = PIECE_BYTES // max(self._sizes.unit_bytes(group_id), 1)
        most = max([length for length in PAGE_COUNTS if length <= fit], default=min(PAGE_COUNTS))
        return (slice(start, start + most) for start in range(0, count, most))

    def _write(self, arriving: _Arriving, submit: Callable[..., Future[np.ndarray]] | None = None) -> None:
        """Has a thread, or `submit`, write pages that are there, or will be, into slots of the host."""
        _, units, arrays, num_bytes = arriving
        slots = np.full(units.block_ids.size, -1, np.int32)
        taken = self._host.take(units.group_id, slots.size, on_probation=units.on_probation)
        slots[: taken.size] = np.sort(taken)  # any slot serves; neighbours are copied to at once
        submit = self._threads.submit if submit is None else submit
        is_good = submit(self._write_units, units, arrays, slots)
        self._writing.append(_Writing(self._turn, units, slots, is_good, num_bytes))

    @reads_back
    def _write_units(self, units: StoreUnits, arrays: Sequence[jax.Array], slots: np.ndarray) -> np.ndarray:  # bool[n]
        """By a thread: units into slots of the host, and on to the disk; which of them are somewhere."""
        if not arrays:  # this process has no part of them
            return np.ones(slots.size, bool)
        pages = [_as_bytes(np.asarray(array))[: slots.size] for array in arrays]
        on_host = slots >= 0
        all_on_host = bool(on_host.all())
        buffers = self._host.buffers[self._sizes.pool_of_group[units.group_id]]
        rows = _rows(slots[on_host])
        for buffer, page in zip(buffers, pages, strict=False):
            buffer[rows] = page if all_on_host else page[on_host]
        is_shared = self._shared is not None and self._shared.offer(_keys_of(units), pages, waits=self._waits_for_disk)
        if self._disk is None:
            return on_host | is_shared
        if all_on_host:
            self._queue_for_disk(units, pages)
            return on_host
        return on_host | self._write_to_disk(units, pages) | is_shared

    def _queue_for_disk(self, units: StoreUnits, pages: Sequence[np.ndarray]) -> None:
        """Has a thread write units to disk; where too many bytes wait for that, they stay on the host alone."""
        waiting = [(future, count) for future, count in list(self._to_disk) if not future.done()]
        if sum(count for _, count in waiting) > self._most_bytes:
            if not self._waits_for_disk:
                self.stats.num_disk_skips += units.block_ids.size
                self._pace.lose(_keys_of(units))
                return
            wait_for_futures([future for future, _ in waiting])
        num_bytes = sum(page.nbytes for page in pages)
        self._to_disk.append((self._disk_threads.submit(self._write_to_disk, units, pages), num_bytes))

    def _write_to_disk(self, units: StoreUnits, pages: Sequence[np.ndarray]) -> np.ndarray:  # bool[n]
        assert self._disk is not None
        self._disk.refresh(max_age_s=1.0)
        is_there, keys = np.zeros(units.block_ids.size, bool), _keys_of(units)
        for i, key in enumerate(keys):
            data = np.concatenate([page[i] for page in pages])
            is_there[i] = self._disk.put(key, data, on_probation=units.on_probation)
        self._pace.lose([keys[i] for i in np.flatnonzero(~is_there).tolist()])
        return is_there

    def _ended(self, writing: _Writing) -> StoredUnits:
        self._bytes_in_flight -= writing.num_bytes
        try:
            is_good = writing.is_good.result()
        except Exception:  # the step that computed the pages failed, or there is no memory
            is_good = np.zeros(writing.slots.size, bool)
        units = writing.units
        is_good = self._pace.end_store(_keys_of(units), writing.slots, is_good, on_probation=units.on_probation)
        return StoredUnits(units.group_id, units.block_hashes, writing.slots, is_good)

    # -- up ---------------------------------------------------------------------------------------------------------

    def _stage(self, pages: KVPages, load: LoadUnits) -> None:
        pool_id = self._sizes.pool_of_group[load.group_id]
        shapes = pages.page_shapes(pool_id)
        for part in self._pieces(load.slots.size, load.group_id):
            units = load._replace(
                block_hashes=load.block_hashes[part], slots=load.slots[part], destinations=load.destinations[part]
            )
            values = self._readers_of(units).submit(self._read_units, units, shapes, pages.shardings[pool_id])
            number = self._pace.watch(values, _keys_of(units, units.slots < 0))
            self._staged.append(_Staged(number, load.load_id, pool_id, load.rank, units.destinations, values))

    def _readers_of(self, units: LoadUnits) -> ThreadPoolExecutor:
        """Threads that may wait for the shared store, where a unit lies there; it holds no others up."""
        if self._shared is None:
            return self._threads
        far = [key for key in _keys_of(units, units.slots < 0) if self._disk is None or not self._disk.has(key)]
        return self._shared.readers if far else self._threads

    def _read_units(self, units: LoadUnits, shapes: Any, shardings: Any) -> tuple[Column, ...]:
        """By a thread: units from the host and the disk, on the devices as `scatter_rank_pages` takes them.

        Raises:
            TierDataError: one is not there, or damaged.
        """
        count = pad_ids(units.destinations).size
        num_arrays = self._sizes.num_arrays_of_group[units.group_id]
        pool_id = self._sizes.pool_of_group[units.group_id]
        is_on_host = units.slots >= 0
        num_units, places = units.slots.size, np.flatnonzero(is_on_host).tolist()
        self._pace.check_readable(_keys_of(units, is_on_host))
        staged = []
        for i, size in enumerate(self._sizes.arrays_of_pool[pool_id]):
            staged.append(self._memory.empty((count, size)))
            staged[i][num_units if i < num_arrays else 0 :] = 0
            for place in places if i < num_arrays else ():  # one by one: an index of many copies twice
                staged[i][place] = self._host.buffers[pool_id][i][units.slots.item(place)]
        if num_arrays and not is_on_host.all():
            self._read_from_below(units, np.flatnonzero(~is_on_host), staged[:num_arrays])
        return self._parts.put(staged, count, shapes, shardings, units.rank)

    def _read_from_below(self, units: LoadUnits, places: np.ndarray, staged: Sequence[np.ndarray]) -> None:
        """From the disk where it has them, and all others from the shared store at once."""
        unit = np.empty(sum(page.shape[1] for page in staged), np.uint8)
        far = []
        for place in places.tolist():
            key = UnitKey(units.group_id, units.block_hashes[place])
            if self._disk is not None and (self._shared is None or self._disk.has(key)):
                self._disk.get(key, unit)
                _spread(unit, staged, place)
            else:
                far.append((place, key))
        if far and self._shared is None:
            raise TierDataError(f"unit {far[0][1]} is on the host no more")
        if far and self._shared is not None:
            found = self._shared.read([key for _, key in far], unit.nbytes)
            for (place, _), data in zip(far, found, strict=True):
                _spread(data, staged, place)

    def _scatter(self, pages: KVPages) -> KVPages:
        """Writes what is on the device by now, and forgets what failed or was cancelled."""
        left: deque[_Staged] = deque()
        for staged in self._staged:
            state, load_id = self._pace.state_of(staged.number, staged.values), staged.load_id
            if state in (PieceState.ON_ITS_WAY, PieceState.LATE):
                left.append(staged)
            if state is PieceState.ON_ITS_WAY or load_id in self._cancelled:
                continue
            if state is not PieceState.THERE:
                self._failed.add(load_id)
                continue
            values = staged.values.result()
            pages = scatter_rank_pages(pages, staged.pool_id, staged.rank, staged.destinations, values)
            self._written[load_id] = self._written.get(load_id, 0) + staged.destinations.size
        self._staged = left
        return pages


def _spread(unit: np.ndarray, staged: Sequence[np.ndarray], place: int) -> None:  # uint8[n], uint8[count, n] each
    """Writes the parts of a unit into the rows at `place`."""
    start = 0
    for page in staged:
        page[place] = unit[start : start + page.shape[1]]
        start += page.shape[1]


def _keys_of(units: StoreUnits | LoadUnits, chosen: np.ndarray | None = None) -> list[UnitKey]:  # bool[n]
    """The units that are chosen; None: all."""
    keys = [UnitKey(units.group_id, block_hash) for block_hash in units.block_hashes]
    return keys if chosen is None else [keys[i] for i in np.flatnonzero(chosen).tolist()]


def _run_here(function: Callable[..., np.ndarray], *args: Any) -> Future[np.ndarray]:
    """What a thread would do, done now."""
    future: Future[np.ndarray] = Future()
    try:
        future.set_result(function(*args))
    except Exception as error:
        future.set_exception(error)
    return future


def are_ready(arrays: Sequence[Any]) -> bool:
    """Whether the device, or the copy to the host, is done with all of them."""
    return all(array.is_ready() for array in arrays)


def _rows(slots: np.ndarray) -> np.ndarray | slice:  # int32[n]
    """An index of these rows, which ascend; a slice, which numpy copies faster, where they follow one another."""
    if slots.size and slots[-1] - slots[0] == slots.size - 1:
        return slice(int(slots[0]), int(slots[-1]) + 1)
    return slots


def _as_bytes(array: np.ndarray) -> np.ndarray:  # uint8[n, bytes of a page]
    return array.reshape(array.shape[0], -1).view(np.uint8)


__all__ = ["TierWorker"]
