"""Tiers of an engine on a mesh of several processes: each keeps its own parts of every unit, and all decide alike.

Flow:    TierConfig, KVCacheConfig, Placement -> [ProcessTiers] -> KVCacheManager(tier=), Scheduler, EngineCore
Source:  docs/tiers.md, "Several processes"

Every process runs the whole bookkeeping: which unit is in which slot of every host, what is in flight, what the disks
have. Bytes it has of its own parts alone. Data ranks whose pages lie alike over the processes share tiers (`ranks`);
others have tiers of their own, since no process has both sides' parts.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from kvjax.core import BlockHasher
from kvjax.core.spec import KVCacheConfig
from kvjax.device import KVPages, Placement
from kvjax.device.mesh.processes import ProcessBoard, spans_processes
from kvjax.device.pages.page_parts import OwnParts
from kvjax.tiers.config import TierConfig
from kvjax.tiers.connector import ConnectorOutput, KVConnector, LoadResults, RankConnector, WeightsInUse
from kvjax.tiers.processes.common_pace import CommonPace
from kvjax.tiers.processes.homes import homes_of
from kvjax.tiers.processes.process_disks import OpenDisk, open_disks
from kvjax.tiers.processes.reports import Board, Reports
from kvjax.tiers.stats import TierStats
from kvjax.tiers.tiers import Tiers, TierShare, identity_of
from kvjax.tiers.units import TierMeta


def make_tiers(
    config: TierConfig,
    kv_cache_config: KVCacheConfig,
    hasher: BlockHasher,
    placement: Placement,
    model: Mapping[str, str],
    timeout_s: float,
) -> KVConnector:
    """The tiers of an engine on a placement; `model` as of `identity_of`. Processes wait so long for each other.

    Raises:
        ValueError: as `Tiers.of_process`.
    """
    if spans_processes(placement.mesh):
        return ProcessTiers(config, kv_cache_config, hasher, placement, ProcessBoard(timeout_s), model)
    num_context, num_ranks = placement.num_context, placement.num_data
    return Tiers.of_process(config, kv_cache_config, hasher, model=model, num_context=num_context, num_ranks=num_ranks)


class ProcessTiers:
    """A `KVConnector` of one process among several. Owned by the engine's thread; `close` ends its threads."""

    def __init__(
        self,
        config: TierConfig,
        kv_cache_config: KVCacheConfig,
        hasher: BlockHasher,
        placement: Placement,
        board: Board,
        model: Mapping[str, str],
    ) -> None:
        """Empty host memory; of the disks what all of them have.

        Raises:
            NotImplementedError: there is a shared tier, whose answers come to each process in their own time.
            ValueError: as `Tiers.of_process`, or the folder has parts of another mesh. Nothing is allocated.
        """
        if config.shared is not None:
            raise NotImplementedError(
                "a shared tier does not work on a mesh of several processes; use host memory and a disk, or one process"
            )
        self.stats = TierStats()
        homes = homes_of(kv_cache_config, placement)
        counts = Counter(process for home in homes for process in home.processes)
        has_disk = config.disk_folder is not None
        self.reports = Reports(board, timeout_s=config.load_timeout_s, tells_losses=has_disk)
        disks: list[OpenDisk | None] = [None] * len(homes)
        if config.disk_folder is not None and config.disk_bytes is not None:
            identity = identity_of(kv_cache_config, hasher, model, placement.num_context)
            max_bytes = config.disk_bytes // max(counts.values())
            disks = [*open_disks(board, homes, config.disk_folder, max_bytes, identity, self.stats)]
        self.by_home: list[Tiers] = []
        for home, disk in zip(homes, disks, strict=True):
            index = None if disk is None else disk.index
            share = TierShare(
                ranks=home.ranks,
                sizes=home.sizes_in(board.index),
                host_bytes=home.share_of(config.host_bytes, counts),
                disk=None if disk is None else disk.own,
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

    def use_weights(self, weights: WeightsInUse) -> None:
        """As `Tiers.use_weights`."""
        for tiers in self.by_home:
            tiers.use_weights(weights)

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
        """What each worker has finished, in a turn that begins now."""
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
        """The metadata of each scheduler."""
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


__all__ = ["ProcessTiers", "make_tiers"]
