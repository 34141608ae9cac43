"""A manager with tiers and a worker over pages that are values: what a request attends must be its own KV.

A page holds (group, all tokens up to its end), or a mark of whoever has half written it. The worker keeps what it was
told, and each step does a random part of it, in any order that a real one might; faults are planted on the way:

    load       a unit's bytes cannot be had, when other units of the load are written already
    store      pages come back damaged, or never
    event      a report is lost
    hang       a load never ends
    abort      a request ends while its load is in flight
    vanish     a unit is gone from the disk although the index says that it is there

With `drops` a planned step is sometimes not dispatched but taken back, before its metadata are built or after it.
Worlds of several data ranks share host, disk, worker and chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kvjax.core import KVCacheManager, Request
from kvjax.core.eviction.probation_policy import ProbationPolicy
from kvjax.core.spec import SlabSpec
from kvjax.tiers.connector import ConnectorOutput, LoadResults
from kvjax.tiers.scheduler.rank_schedulers import RankTierSchedulers
from kvjax.tiers.scheduler.tier_scheduler import TierScheduler
from kvjax.tiers.scheduler.transit import UnitsInTransit
from kvjax.tiers.stores.host_store import HostStore
from kvjax.tiers.units import LoadUnits, StoredUnits, StoreUnits, TierMeta, UnitKey, UnitSizes
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.page_contents import Pages
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
    pages: dict[tuple[int, int], Content]  # of its rank
    page: tuple[int, int]
    content: Content | None  # None: it will fail
    hangs: bool


class ToyWorker:
    """Gathers at once, as the device's order has it; the rest happens when chance says so."""

    def __init__(self, world: TieredWorld) -> None:
        self.world = world  # of rank 0
        self.worlds = [world]
        self.slots: dict[tuple[int, int], Content] = {}  # of the host, by pool and slot
        self.arriving: list[tuple[StoreUnits, list[Content]]] = []
        self.pieces: list[Piece] = []
        self.written: Counter[int] = Counter()
        self.failed: set[int] = set()

    def start_load_kv(self, meta: TierMeta) -> None:
        world = self.world
        pools = world.sizes.pool_of_group
        self.pieces = [piece for piece in self.pieces if piece.load_id not in meta.cancelled]
        copies = [
            (copy, destination, self.worlds[copy.rank].pages[pools[copy.group_id], source])
            for copy in meta.copies
            for source, destination in zip(copy.sources.tolist(), copy.destinations.tolist(), strict=True)
        ]
        for store in meta.stores:
            pages = self.worlds[store.rank].pages
            self.arriving.append((store, [pages[pools[store.group_id], i] for i in store.block_ids.tolist()]))
        for copy, destination, content in copies:
            self.worlds[copy.rank].pages[pools[copy.group_id], destination] = content
            self.written[copy.load_id] += 1
        for load in meta.loads:
            self.take(load)
        for piece in [piece for piece in self.pieces if not piece.hangs and world.rng.random() < 0.7]:
            self.pieces.remove(piece)
            if piece.content is None:
                self.failed.add(piece.load_id)
                piece.pages[piece.page] = (-1, ("half written",))
            else:
                piece.pages[piece.page] = piece.content
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
            place, pages = (pool_id, block_id), self.worlds[load.rank].pages
            self.pieces.append(Piece(load.load_id, key, pages, place, content, world.plant("hang")))

    def get_finished(self) -> ConnectorOutput:
        world, stored = self.world, []
        while self.arriving and world.rng.random() < 1 - 0.4 / len(self.worlds):
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
        taken = world.host.take(store.group_id, len(contents), on_probation=store.on_probation)
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
        host_bytes: int = 160,
        fault_rate: float = 0.0,
        disk_share: float = 0.5,
        write_through: bool = False,
        drops: bool = False,
        first: TieredWorld | None = None,  # of rank 0, whose host and disk this one shares
        blocks_per_slab: tuple[int, ...] = (),  # per pool, where they share slabs
        **options: Any,
    ) -> None:
        first = self if first is None else first
        self.first, self.groups, self.drops = first, groups, drops
        num_pools = 1 + max(group.pool for group in groups)
        sizes_of_pools, slabs = [num_blocks] * num_pools, None
        if blocks_per_slab:
            slabs = SlabSpec(1 + num_blocks // max(blocks_per_slab), blocks_per_slab)
            sizes_of_pools = [slabs.num_slabs * count for count in blocks_per_slab]
        config = config_of(list(groups), sizes_of_pools, slabs=slabs)
        sizes = tuple(1 + 2 * (group_id % 2) for group_id in range(len(groups)))  # units of one and of three bytes
        self.sizes = replace(UnitSizes.of(config), bytes_of_group=sizes)
        self.disk_share, self.fault_rate = disk_share, fault_rate
        if first is self:
            self.rng = np.random.default_rng(seed)
            self.host = HostStore(host_bytes, self.sizes, has_bytes=False)
            self.disk, self.transit = ToyDisk(), UnitsInTransit()
            self.worker = ToyWorker(self)
            self.faults: Counter[str] = Counter()
        else:
            self.rng, self.host, self.disk, self.transit = first.rng, first.host, first.disk, first.transit
            self.worker, self.faults = first.worker, first.faults
            self.worker.worlds.append(self)
        self.rank = self.worker.worlds.index(self)
        self.now_s = 0.0
        self.tiers = TierScheduler(
            self.host,
            self.disk,
            self.sizes.pool_of_group,
            write_through=write_through,
            load_timeout_s=TIMEOUT_S,
            clock=lambda: first.now_s,
            rank=self.rank,
            transit=self.transit,
        )
        self.manager = KVCacheManager(config, 48, 2, tier=self.tiers, **options)
        self.tiers.bind_kv_cache_manager(self.manager)
        self.pages: dict[tuple[int, int], Content] = Pages(slabs)
        self.running: list[Request] = []
        self.loading: dict[str, Request] = {}
        self.newest: list[str] = []  # requests whose load began in this step
        self.to_load: dict[str, list[tuple[int, list[int]]]] = {}  # by request, of each group: pool, blocks
        self.loaded: list[tuple[int, list[int]]] = []  # likewise, in this step
        self.looked_up: dict[str, int] = {}  # the host's clock
        self.computed: set[Content] = set()
        self.num_made = self.num_loaded = self.num_failed = 0
        self.num_foreign = 0  # pages that were loaded and never computed here

    @property
    def num_faults(self) -> int:
        return sum(self.faults.values())

    def plant(self, fault: str) -> bool:
        """Whether to do wrong here."""
        is_planted = bool(self.rng.random() < self.fault_rate)
        self.faults[fault] += is_planted
        return is_planted

    @property
    def schedulers(self) -> TierScheduler | RankTierSchedulers:
        """Of all ranks."""
        worlds = self.worker.worlds
        return self.tiers if len(worlds) == 1 else RankTierSchedulers([world.tiers for world in worlds])

    def step(self) -> None:
        """Of all ranks: loads end, requests end and start, pages are computed."""
        worlds = self.worker.worlds
        self.now_s += 1.0
        for world in worlds:
            world.end_some()
        if self.disk.units and self.plant("vanish"):
            self.disk.units.pop(next(iter(self.disk.units)))  # the index does not know
        results = self.schedulers.update_connector_output(self.worker.get_finished())
        for world in worlds:
            world.start_some(results)
        is_dropped = self.drops and self.rng.random() < 0.2
        if is_dropped and self.rng.random() < 0.5:
            self.drop()
        self.worker.start_load_kv(self.schedulers.build_connector_meta())
        if is_dropped:
            self.drop()
        for world in worlds:
            for request in world.running:
                world.compute(request)
        for world in worlds:
            for request in world.running:
                world.check(request)

    def drop(self) -> None:
        """Of all ranks: what was to be computed is not, and ends; so does a load of this step, which may rest on it."""
        for world in self.worker.worlds:
            for request_id in filter(world.loading.__contains__, world.newest):
                world.end(world.loading.pop(request_id))
            dropped = [request for request in world.running if request.num_computed_tokens < request.num_tokens]
            freed = world.manager.take_back_step([request.row for request in dropped])
            for request in dropped:
                world.running.remove(request)
                world.tiers.request_finished(request)
                if request not in freed:
                    world.manager.free(request)

    def end_some(self) -> None:
        """Requests end, and some are aborted while they load."""
        while self.running and self.rng.random() < 0.6:
            self.end(self.running.pop(int(self.rng.integers(len(self.running)))))
        for request in list(self.loading.values()):
            if self.plant("abort"):
                self.end(self.loading.pop(request.request_id))
        self.manager.new_step_starts()

    def start_some(self, results: LoadResults) -> None:
        """What is loaded runs, what is not is computed, and another request comes."""
        self.newest, self.loaded = [], []
        for request_id in filter(self.loading.__contains__, results.loaded):
            request = self.loading.pop(request_id)
            self.manager.cache_blocks(request, request.num_computed_tokens)
            self.num_loaded += 1
            self.loaded += self.to_load[request_id]
            self.num_foreign += sum(content not in self.computed for _, _, content in self.own_pages(request))
            self.run(request)
        for request_id in filter(self.loading.__contains__, results.failed):
            request = self.loading.pop(request_id)
            self.manager.free(request)
            request.num_computed_tokens = 0
            self.num_failed += 1
            self.start(request)
        self.start(self.request())

    def request(self, salt: str | None = None) -> Request:
        self.num_made += 1
        tokens = self.rng.integers(0, 2, int(self.rng.integers(1, 30)))
        tokens[:12] = 0  # prompts begin alike
        salt = ("a", "b", None)[int(self.rng.integers(3))] if salt is None else salt
        return Request(f"{self.rank}-{self.num_made}", tokens, cache_salt=salt, block_hasher=HASHER)

    def start(self, request: Request) -> None:
        """Loads or runs a request, if it fits."""
        hit, num_hit = self.manager.get_computed_blocks(request)
        external, _ = self.tiers.get_num_new_matched_tokens(request, hit, num_hit)
        self.looked_up[request.request_id] = self.host.clock
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
            self.newest.append(request.request_id)
            assert hit.elsewhere is not None
            tables = self.manager.get_block_ids(request.request_id)
            self.to_load[request.request_id] = [
                (self.groups[group_id].pool, tables[group_id][first : first + len(block_hashes)])
                for group_id, (first, block_hashes, _) in enumerate(hit.elsewhere.blocks)
            ]
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
                self.computed.add(content)
        request.num_computed_tokens = request.num_tokens

    def check(self, request: Request) -> None:
        """Every page that the request holds is its own: nothing else is attended."""
        for place, column, content in self.own_pages(request):
            assert self.pages[place] == content, f"{request.request_id} reads other KV in column {column}"

    def check_worth(self) -> None:
        """A link tells of blocks what their policy knows, no load is on probation, and what runs is in use."""
        for pool in self.manager.block_pools:
            link, policy = pool.tier_link, pool.eviction_policy
            assert link is not None
            assert isinstance(policy, ProbationPolicy)
            on_probation = np.zeros(pool.num_blocks, bool)
            on_probation[list(policy.state()[1])] = True
            assert (link.on_probation == on_probation)[pool.is_hashed].all()
        for pool_id, ids in self.loaded:
            pool = self.manager.block_pools[pool_id]
            assert not pool.tier_link.on_probation[[i for i in ids if pool.is_hashed[i]]].any()
        for request in self.running:
            for (pool_id, block_id), _, _ in self.own_pages(request):
                pool = self.manager.block_pools[pool_id]
                is_new = not pool.is_hashed[block_id]
                assert is_new or pool.tier_link.last_used[block_id] >= self.looked_up[request.request_id]

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
        for world in self.worker.worlds:
            world.manager.check_invariants()
        self.schedulers.check_invariants()

    def drain(self) -> None:
        """Ends all requests and transfers: then no block and no slot is held."""
        for world in self.worker.worlds:
            world.fault_rate = 0.0
            for request in [*world.running, *world.loading.values()]:
                world.end(request)
            world.running, world.loading = [], {}
        self.worker.pieces.clear()
        for _ in range(40):
            self.now_s += 1.0
            self.schedulers.update_connector_output(self.worker.get_finished())
            self.worker.start_load_kv(self.schedulers.build_connector_meta())
        self.check_invariants()
        assert all(world.manager.usage == 0 for world in self.worker.worlds)
        assert self.schedulers.num_loads == 0
        assert self.host.num_held == 0
