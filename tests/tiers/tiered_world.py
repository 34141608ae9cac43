"""A manager with tiers and a worker over pages that are values: what a request attends must be its own KV.

A page holds (group, all tokens up to its end), or a mark of whoever has half written it. The worker keeps what it was
told, and each step does a random part of it, in any order that a real one might; faults are planted on the way:

    load       a unit's bytes cannot be had, when other units of the load are written already
    store      pages come back damaged, or never
    event      a report is lost
    hang       a load never ends
    abort      a request ends while its load is in flight
    vanish     a unit is gone from the disk although the index says that it is there
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvjax.core import KVCacheManager, Request
from kvjax.tiers.connector import ConnectorOutput
from kvjax.tiers.host_store import HostStore
from kvjax.tiers.tier_scheduler import TierScheduler
from kvjax.tiers.units import LoadUnits, StoredUnits, StoreUnits, TierMeta, UnitKey, UnitSizes
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.toy_tier import HASHER

Content = tuple[int, tuple[Any, ...]]  # group, salt and all tokens up to the end of the page
FAULTS = ("load", "store", "event", "hang", "abort", "vanish")
TIMEOUT_S = 25.0


class ToyDisk:
    """Units that were written, of which the index may know too many."""

    def __init__(self) -> None:
        self.units: dict[UnitKey, Content] = {}
        self.index: set[UnitKey] = set()

    def has(self, key: UnitKey) -> bool:
        return key in self.index


@dataclass
class Piece:
    """One unit of a load on its way."""

    load_id: int
    key: UnitKey
    page: tuple[int, int]
    content: Content | None  # None: it will fail
    hangs: bool


class ToyWorker:
    """Gathers at once, as the device's order has it; the rest happens when chance says so."""

    def __init__(self, world: TieredWorld) -> None:
        self.world = world
        self.slots: dict[tuple[int, int], Content] = {}  # of the host, by pool and slot
        self.arriving: list[tuple[StoreUnits, list[Content]]] = []
        self.pieces: list[Piece] = []
        self.written: Counter[int] = Counter()
        self.failed: set[int] = set()

    def start_load_kv(self, meta: TierMeta) -> None:
        world = self.world
        pages, pools = world.pages, world.sizes.pool_of_group
        self.pieces = [piece for piece in self.pieces if piece.load_id not in meta.cancelled]
        copies = [
            (copy.load_id, pools[copy.group_id], destination, pages[pools[copy.group_id], source])
            for copy in meta.copies
            for source, destination in zip(copy.sources.tolist(), copy.destinations.tolist(), strict=True)
        ]
        for store in meta.stores:
            self.arriving.append((store, [pages[pools[store.group_id], i] for i in store.block_ids.tolist()]))
        for load_id, pool_id, destination, content in copies:
            pages[pool_id, destination] = content
            self.written[load_id] += 1
        for load in meta.loads:
            self.take(load)
        for piece in [piece for piece in self.pieces if not piece.hangs and world.rng.random() < 0.7]:
            self.pieces.remove(piece)
            if piece.content is None:
                self.failed.add(piece.load_id)
                pages[piece.page] = (-1, ("half written",))
            else:
                pages[piece.page] = piece.content
                self.written[piece.load_id] += 1

    def take(self, load: LoadUnits) -> None:
        world, pool_id = self.world, self.world.sizes.pool_of_group[load.group_id]
        for block_hash, slot, block_id in zip(
            load.block_hashes, load.slots.tolist(), load.destinations.tolist(), strict=True
        ):
            key = UnitKey(load.group_id, block_hash)
            content = self.slots[pool_id, slot] if slot >= 0 else world.disk.units.get(key)
            if slot < 0 and content is None:
                world.disk.index.discard(key)
            if world.plant("load"):
                content = None
            self.pieces.append(Piece(load.load_id, key, (pool_id, block_id), content, world.plant("hang")))

    def get_finished(self) -> ConnectorOutput:
        world, stored = self.world, []
        while self.arriving and world.rng.random() < 0.6:
            store, contents = self.arriving.pop(0)
            stored.append(self.store(store, contents))
        written, failed = dict(self.written), frozenset(self.failed)
        self.written, self.failed = Counter(), set()
        if written and world.plant("event"):
            written.popitem()
        if not self.arriving and len(stored) == 1 and world.plant("event"):
            stored.pop()
        return ConnectorOutput(
            finished_recving=written,
            failed_recving=failed,
            pending_recving=frozenset(piece.load_id for piece in self.pieces),
            finished_sending=tuple(stored),
            pending_sending=len(self.arriving),
        )

    def store(self, store: StoreUnits, contents: Sequence[Content]) -> StoredUnits:
        world, pool_id = self.world, self.world.sizes.pool_of_group[store.group_id]
        slots = np.full(len(contents), -1, np.int32)
        taken = world.host.take(store.group_id, len(contents))
        slots[: taken.size] = taken
        is_good = np.array([not world.plant("store") for _ in contents], bool)
        for slot, content, good, block_hash in zip(
            slots.tolist(), contents, is_good.tolist(), store.block_hashes, strict=True
        ):
            if slot >= 0:
                self.slots[pool_id, slot] = content if good else (-1, ("damaged",))
            if good and world.disk_share and world.rng.random() < world.disk_share:
                key = UnitKey(store.group_id, block_hash)
                world.disk.units[key] = content
                world.disk.index.add(key)
        return StoredUnits(store.group_id, store.block_hashes, slots, is_good & (slots >= 0))


class TieredWorld:
    """Requests that come and go, a step at a time. `check` after each."""

    def __init__(
        self,
        groups: Sequence[NaiveGroup],
        seed: int,
        *,
        num_blocks: int = 60,
        num_units: int = 80,
        fault_rate: float = 0.0,
        disk_share: float = 0.5,
        write_through: bool = False,
        **options: Any,
    ) -> None:
        self.groups, self.rng = groups, np.random.default_rng(seed)
        num_pools = 1 + max(group.pool for group in groups)
        config = config_of(list(groups), [num_blocks] * num_pools)
        self.sizes = UnitSizes.of(config)
        self.host = HostStore([num_units] * num_pools, self.sizes, has_bytes=False)
        self.disk, self.disk_share = ToyDisk(), disk_share
        self.now_s = 0.0
        self.tiers = TierScheduler(
            self.host,
            self.disk,
            self.sizes.pool_of_group,
            write_through=write_through,
            load_timeout_s=TIMEOUT_S,
            clock=lambda: self.now_s,
        )
        self.manager = KVCacheManager(config, 48, 2, tier=self.tiers, **options)
        self.tiers.bind_kv_cache_manager(self.manager)
        self.worker = ToyWorker(self)
        self.pages: dict[tuple[int, int], Content] = {}
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.fault_rate = fault_rate
        self.faults: Counter[str] = Counter()
        self.num_made = self.num_loaded = self.num_failed = 0

    @property
    def num_faults(self) -> int:
        return sum(self.faults.values())

    def plant(self, fault: str) -> bool:
        """Whether to do wrong here."""
        is_planted = bool(self.rng.random() < self.fault_rate)
        self.faults[fault] += is_planted
        return is_planted

    def step(self) -> None:
        """Loads end, requests end and start, pages are computed."""
        self.now_s += 1.0
        while self.running and self.rng.random() < 0.6:
            self.end(self.running.pop(int(self.rng.integers(len(self.running)))))
        for request in list(self.loading.values()):
            if self.plant("abort"):
                self.end(self.loading.pop(request.request_id))
        self.manager.new_step_starts()
        if self.disk.units and self.plant("vanish"):
            self.disk.units.pop(next(iter(self.disk.units)))  # the index does not know
        results = self.tiers.update_connector_output(self.worker.get_finished())
        for request_id in results.loaded:
            request = self.loading.pop(request_id)
            self.manager.cache_blocks(request, request.num_computed_tokens)
            self.num_loaded += 1
            self.run(request)
        for request_id in results.failed:
            request = self.loading.pop(request_id)
            self.manager.free(request)
            request.num_computed_tokens = 0
            self.num_failed += 1
            self.start(request)
        self.start(self.request())
        self.worker.start_load_kv(self.tiers.build_connector_meta())
        for request in self.running:
            self.compute(request)
        for request in self.running:
            self.check(request)

    def request(self, salt: str | None = None) -> Request:
        self.num_made += 1
        tokens = self.rng.integers(0, 2, int(self.rng.integers(1, 30)))
        tokens[:12] = 0  # prompts begin alike
        salt = ("a", "b", None)[int(self.rng.integers(3))] if salt is None else salt
        return Request(f"r{self.num_made}", tokens, cache_salt=salt, block_hasher=HASHER)

    def start(self, request: Request) -> None:
        """Loads or runs a request, if it fits."""
        hit, num_hit = self.manager.get_computed_blocks(request)
        external, _ = self.tiers.get_num_new_matched_tokens(request, hit, num_hit)
        if external is None:
            return
        new = 0 if external else request.num_tokens - num_hit
        allocated = self.manager.allocate_slots(
            request, new, num_hit, hit, num_external_computed_tokens=external, delay_cache_blocks=external > 0
        )
        if allocated is None:
            self.tiers.request_finished(request)
        elif external:
            request.num_computed_tokens = num_hit + external
            self.tiers.update_state_after_alloc(request, hit, external)
            self.loading[request.request_id] = request
        else:
            request.num_computed_tokens = num_hit
            self.running.append(request)

    def run(self, request: Request) -> None:
        """What is loaded is there; the rest is computed in this step."""
        if self.manager.allocate_slots(request, request.num_tokens - request.num_computed_tokens) is None:
            self.end(request)
        else:
            self.running.append(request)

    def end(self, request: Request) -> None:
        self.tiers.request_finished(request)
        self.manager.free(request)

    def compute(self, request: Request) -> None:
        """Writes the pages of tokens that are new."""
        for place, column, content in self.own_pages(request):
            if (column + 1) * self.groups[content[0]].block_size > request.num_computed_tokens:
                self.pages[place] = content
        request.num_computed_tokens = request.num_tokens

    def check(self, request: Request) -> None:
        """Every page that the request holds is its own: nothing else is attended."""
        for place, column, content in self.own_pages(request):
            assert self.pages[place] == content, f"{request.request_id} reads other KV in column {column}"

    def own_pages(self, request: Request) -> list[tuple[tuple[int, int], int, Content]]:
        """(pool, block), column and right content of every page that the request holds."""
        tokens, ids = request.token_ids.tolist(), self.manager.get_block_ids(request.request_id)
        return [
            (
                (group.pool, block_id),
                column,
                (group_id, (request.cache_salt, *tokens[: (column + 1) * group.block_size])),
            )
            for group_id, group in enumerate(self.groups)
            for column, block_id in enumerate(ids[group_id])
            if block_id
        ]

    def check_invariants(self) -> None:
        self.manager.check_invariants()
        self.tiers.check_invariants()

    def drain(self) -> None:
        """Ends all requests and transfers: then no block and no slot is held."""
        self.fault_rate = 0.0
        for request in [*self.running, *self.loading.values()]:
            self.end(request)
        self.running, self.loading = [], {}
        self.worker.pieces.clear()
        for _ in range(40):
            self.now_s += 1.0
            self.tiers.update_connector_output(self.worker.get_finished())
            self.worker.start_load_kv(self.tiers.build_connector_meta())
        self.check_invariants()
        assert self.manager.usage == 0
        assert self.tiers.num_loads == 0
        assert self.host.num_held == 0
