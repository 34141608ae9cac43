"""Tiers of an engine on a mesh of several processes: each keeps its own parts of every unit, and all decide alike.

Flow:    TierConfig, KVCacheConfig, Placement -> [ProcessTiers] -> KVCacheManager(tier=), Scheduler, EngineCore
Source:  docs/tiers.md, "Several processes"

Every process runs the whole bookkeeping: which unit is in which slot of every host, what is in flight, what the disks
have. Bytes it has of its own parts alone. Data ranks whose pages lie alike over the processes share tiers (`ranks`);
others have tiers of their own, since no process has both sides' parts.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.core import BlockHasher
from kvjax.core.spec import KVCacheConfig
from kvjax.device import KVPages, Placement
from kvjax.device.page_parts import OwnParts, alike_ranks, parts_of
from kvjax.device.pages import page_shapes
from kvjax.device.processes import ProcessBoard, spans_processes
from kvjax.tiers.common_index import CommonIndex, in_all, number_of
from kvjax.tiers.common_pace import CommonPace
from kvjax.tiers.config import TierConfig
from kvjax.tiers.connector import ConnectorOutput, KVConnector, LoadResults, RankConnector
from kvjax.tiers.disk_store import DiskStore
from kvjax.tiers.reports import Board, Reports
from kvjax.tiers.stats import TierStats
from kvjax.tiers.tiers import Tiers, TierShare, identity_of
from kvjax.tiers.units import TierMeta, UnitSizes

BOARD_TIMEOUT_S = 600.0  # for the slowest process
TEXT_BYTES = 1 << 20  # of one text on the board


def make_tiers(
    config: TierConfig, kv_cache_config: KVCacheConfig, hasher: BlockHasher, placement: Placement
) -> KVConnector:
    """The tiers of an engine on a placement.

    Raises:
        ValueError: as `Tiers.of_process`.
    """
    if spans_processes(placement.mesh):
        return ProcessTiers(config, kv_cache_config, hasher, placement, ProcessBoard(BOARD_TIMEOUT_S))
    num_context, num_ranks = placement.num_context, placement.num_data
    return Tiers.of_process(config, kv_cache_config, hasher, num_context=num_context, num_ranks=num_ranks)


@dataclass(frozen=True)
class Home:
    """Data ranks that share tiers, and what each process has of one of their units."""

    ranks: tuple[int, ...]
    processes: tuple[int, ...]  # that have parts
    sizes: dict[int, UnitSizes]  # of each of them
    places: dict[int, str]  # likewise: which parts, as text

    @classmethod
    def of(cls, ranks: tuple[int, ...], kv_cache_config: KVCacheConfig, placement: Placement) -> Home:
        """The home of some ranks, whose pages lie alike."""
        pools = page_shapes(kv_cache_config, placement).pools
        sizes, places = {}, {}
        for process in sorted({device.process_index for device in placement.mesh.devices.flat}):
            found = [
                [[parts_of(x.sharding, x.shape[1:], ranks[0], process) for x in column] for column in columns]
                for columns in pools
            ]

            def part_bytes(pool_id: int, column: int, array: int, found: Any = found) -> list[int]:
                itemsize = pools[pool_id][column][array].dtype.itemsize
                return [math.prod(part.shape) * itemsize for part in found[pool_id][column][array]]

            of_process = UnitSizes.of_parts(kv_cache_config, part_bytes)
            if any(map(len, of_process.arrays_of_pool)):
                sizes[process] = of_process
                places[process] = repr(jax.tree.map(lambda part: part.bounds, found, is_leaf=_is_part))
        return cls(ranks, tuple(sizes), sizes, places)

    @property
    def bytes_of_group(self) -> tuple[int, ...]:
        """Of one unit, in the process that has most of it."""
        return tuple(map(max, zip(*(sizes.bytes_of_group for sizes in self.sizes.values()), strict=True)))

    def sizes_in(self, process: int) -> UnitSizes:
        """Own parts' sizes, counted as those of the process that has most; without parts where a process has none."""
        any_sizes = next(iter(self.sizes.values()))
        nothing = UnitSizes(
            pool_of_group=any_sizes.pool_of_group,
            arrays_of_pool=tuple(() for _ in any_sizes.arrays_of_pool),
            num_arrays_of_group=(0,) * len(any_sizes.pool_of_group),
            blocks_of_pool=any_sizes.blocks_of_pool,
            bytes_of_group=self.bytes_of_group,
        )
        own = self.sizes.get(process, nothing)
        return UnitSizes(
            own.pool_of_group, own.arrays_of_pool, own.num_arrays_of_group, own.blocks_of_pool, self.bytes_of_group
        )

    def units_in(self, num_bytes: int, homes_of: Counter[int]) -> tuple[int, ...]:
        """Units of each pool for which all processes have room in so many bytes of host, divided over their homes."""
        by_process = [sizes.units_in(num_bytes // homes_of[process]) for process, sizes in self.sizes.items()]
        return tuple(map(min, zip(*by_process, strict=True)))


class ProcessTiers:
    """A `KVConnector` of one process among several. Owned by the engine's thread; `close` ends its threads."""

    def __init__(
        self,
        config: TierConfig,
        kv_cache_config: KVCacheConfig,
        hasher: BlockHasher,
        placement: Placement,
        board: Board,
    ) -> None:
        """Empty host memory; of the disks what all of them have.

        Raises:
            ValueError: as `Tiers.of_process`, or the folder has parts of another mesh. Nothing is allocated.
        """
        self.stats = TierStats()
        homes = [Home.of(ranks, kv_cache_config, placement) for ranks in alike_ranks(placement)]
        homes_of = Counter(process for home in homes for process in home.processes)
        has_disk = config.disk_folder is not None
        self.reports = Reports(board, timeout_s=config.load_timeout_s, tells_losses=has_disk)
        self.by_home: list[Tiers] = []
        for home in homes:
            disk = index = None
            if config.disk_folder is not None and config.disk_bytes is not None:
                max_bytes = config.disk_bytes // max(homes_of.values())
                identity = identity_of(kv_cache_config, hasher, config.weights or "", placement.num_context)
                if board.index in home.processes:
                    disk = open_disk(home, board.index, config.disk_folder, max_bytes, identity, self.stats)
                index = CommonIndex(max_bytes, home.bytes_of_group)
                index.start(common_names(board, home, disk))
            share = TierShare(
                ranks=home.ranks,
                sizes=home.sizes_in(board.index),
                num_units=home.units_in(config.host_bytes, homes_of),
                disk=disk,
                index=index,
                parts=OwnParts(),
                pace=CommonPace(self.reports, index),
                load_timeout_s=math.inf,  # `Reports` says what is late, to all
                stats=self.stats,
            )
            self.by_home.append(Tiers(config, share))
        self.worker = HomeWorkers(self.by_home, self.reports)
        self.scheduler = HomeSchedulers(self.by_home)

    def of_rank(self, rank: int) -> RankConnector:
        """The scheduler's side of one data rank."""
        return next(tiers for tiers in self.by_home if rank in tiers.ranks).of_rank(rank)

    def save_all(self, pages: KVPages) -> KVPages:
        """As `Tiers.save_all`."""
        for tiers in self.by_home:
            pages = tiers.save_all(pages)
        return pages

    def flush(self) -> None:
        """As `Tiers.flush`."""
        for tiers in self.by_home:
            tiers.flush()

    def reset(self, *, forget: bool = True) -> None:
        """As `Tiers.reset`."""
        for tiers in self.by_home:
            tiers.reset(forget=forget)

    def close(self) -> None:
        """As `Tiers.close`."""
        for tiers in self.by_home:
            tiers.close()


class HomeWorkers:
    """A `WorkerConnector`: the workers of all homes, whose loads are reported together."""

    def __init__(self, by_home: Sequence[Tiers], reports: Reports) -> None:
        self._workers = [tiers.worker for tiers in by_home]
        self._reports = reports

    @property
    def has_work(self) -> bool:
        """Whether any has."""
        return any(worker.has_work for worker in self._workers)

    def warmup(self, pages: KVPages) -> KVPages:
        """As of one: all run the same programs."""
        return self._workers[0].warmup(pages)

    def start_load_kv(self, pages: KVPages, metadata: Sequence[TierMeta]) -> KVPages:
        """As of each."""
        for worker, own in zip(self._workers, metadata, strict=True):
            pages = worker.start_load_kv(pages, own)
        return pages

    def get_finished(self) -> list[ConnectorOutput]:
        """Of each, in a turn that begins now."""
        self._reports.begin_turn()
        return [worker.get_finished() for worker in self._workers]

    def wait(self) -> None:
        """Waits until one that has work has something to report here; the other processes may take longer."""
        for worker in self._workers:
            if worker.has_work:
                worker.wait()
                return


class HomeSchedulers:
    """A `StepConnector`: the schedulers of all homes."""

    def __init__(self, by_home: Sequence[Tiers]) -> None:
        self._schedulers = [tiers.scheduler for tiers in by_home]

    def build_connector_meta(self) -> list[TierMeta]:
        """Of each."""
        return [one.build_connector_meta() for one in self._schedulers]

    def update_connector_output(self, output: Sequence[ConnectorOutput]) -> LoadResults:
        """The requests of all homes whose loads have ended."""
        results = [one.update_connector_output(own) for one, own in zip(self._schedulers, output, strict=True)]
        return LoadResults(
            tuple(name for result in results for name in result.loaded),
            tuple(name for result in results for name in result.failed),
        )

    def check_invariants(self) -> None:
        """As of each.

        Raises:
            InvariantError: a law does not hold.
        """
        for one in self._schedulers:
            one.check_invariants()


def open_disk(
    home: Home, process: int, folder: str, max_bytes: int, identity: dict[str, str], stats: TierStats
) -> DiskStore:
    """The folder of a process's parts of a home's units: one of several in the folder that all are given."""
    part = home.processes.index(process)
    digest = hashlib.sha256(home.places[process].encode()).hexdigest()[:16]
    share = f"part {part} of {len(home.processes)}, {digest}"
    own = Path(folder) / f"ranks-{home.ranks[0]}-part-{part}"
    return DiskStore(own, max_bytes, identity | {"share": share}, stats)


def common_names(board: Board, home: Home, disk: DiskStore | None) -> list[int]:
    """Numbers of the units that the disks of all processes of a home have, those used longest ago first."""
    own = [] if disk is None else [number_of(name) for name in disk.names_by_age()]
    text = base64.b64encode(np.array(own, "<u8").tobytes()).decode()
    topic = f"units of ranks {home.ranks}"
    most = max(map(int, board.exchange(f"{topic}, length", str(len(text)))))
    texts = [""] * len(home.processes)
    for start in range(0, most, TEXT_BYTES):
        parts = board.exchange(f"{topic}, from {start}", text[start : start + TEXT_BYTES])
        texts = [so_far + parts[process] for so_far, process in zip(texts, home.processes, strict=True)]
    return in_all([np.frombuffer(base64.b64decode(text), "<u8") for text in texts]).tolist()


def _is_part(value: Any) -> bool:
    return hasattr(value, "bounds")


__all__ = ["Home", "ProcessTiers", "common_names", "make_tiers"]
