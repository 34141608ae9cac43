"""The tiers of one engine: a host store, a disk store and a shared one where there are, and both sides of a connector.

Flow:    TierConfig, TierShare -> [Tiers] -> KVCacheManager(tier=), Scheduler, EngineCore
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvjax.core import BlockHasher
from kvjax.core.spec import KVCacheConfig
from kvjax.device import KVPages
from kvjax.device.pages.page_parts import PageParts, WholePages
from kvjax.tiers.config import TierConfig
from kvjax.tiers.connector import RankConnector, WeightsInUse
from kvjax.tiers.scheduler.rank_schedulers import RankTierSchedulers
from kvjax.tiers.scheduler.tier_scheduler import DiskIndex, TierScheduler
from kvjax.tiers.scheduler.transit import UnitsInTransit
from kvjax.tiers.shared.config import SharedTierConfig
from kvjax.tiers.shared.shared_store import SharedStore
from kvjax.tiers.stats import TierStats
from kvjax.tiers.stores.disk_store import DiskStore
from kvjax.tiers.stores.host_store import HostStore
from kvjax.tiers.units import UnitSizes
from kvjax.tiers.worker.pace import OwnPace, Pace
from kvjax.tiers.worker.tier_worker import TierWorker


@dataclass(frozen=True)
class RankTier:
    """A `RankConnector`: one scheduler is both."""

    scheduler: TierScheduler

    @property
    def tier(self) -> TierScheduler:
        """What the manager of the rank tells of blocks that it reuses."""
        return self.scheduler


@dataclass(frozen=True)
class TierShare:
    """What one set of tiers keeps, of whose pages, and when it counts as done."""

    ranks: tuple[int, ...]  # data ranks that share both tiers
    sizes: UnitSizes
    host_bytes: int
    disk: DiskStore | None
    index: DiskIndex | None  # what is looked up of the disk
    parts: PageParts
    pace: Pace
    load_timeout_s: float
    stats: TierStats
    shared: SharedStore | None = None

    @classmethod
    def whole(
        cls,
        config: TierConfig,
        kv_cache_config: KVCacheConfig,
        hasher: BlockHasher,
        *,
        model: Mapping[str, str] | None = None,
        num_context: int = 1,
        num_ranks: int = 1,
    ) -> TierShare:
        """The share of one process that has all pages of all ranks; `model` as of `identity_of`.

        Raises:
            ValueError: as `DiskStore` and `open_shared`. Nothing is allocated.
        """
        stats, disk, shared = TierStats(), None, None
        identity = identity_of(kv_cache_config, hasher, model or {"weights": config.weights or ""}, num_context)
        if config.disk_folder is not None and config.disk_bytes is not None:
            disk = DiskStore(config.disk_folder, config.disk_bytes, identity, stats)
        if config.shared is not None:
            shared = open_shared(config.shared, hasher, identity, stats)
        sizes = UnitSizes.of(kv_cache_config)
        return cls(
            ranks=tuple(range(num_ranks)),
            sizes=sizes,
            host_bytes=config.host_bytes,
            disk=disk,
            index=disk,
            parts=WholePages(),
            pace=OwnPace(),
            load_timeout_s=config.load_timeout_s,
            stats=stats,
            shared=shared,
        )


class Tiers:
    """A `KVConnector`. Owned by the engine's thread; `close` ends its threads."""

    def __init__(
        self,
        config: TierConfig,
        share: TierShare,
        *,
        memory_kind: str | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Empty host memory, and disk and shared store as they are."""
        self.ranks = share.ranks
        self.stats, self.disk, self.shared, sizes = share.stats, share.disk, share.shared, share.sizes
        self.host = HostStore(share.host_bytes, sizes, config.eviction_policy)
        transit = UnitsInTransit()
        self._by_rank = {
            rank: TierScheduler(
                self.host,
                share.index,
                sizes.pool_of_group,
                write_through=config.write_through,
                load_timeout_s=share.load_timeout_s,
                stats=self.stats,
                rank=rank,
                transit=transit,
                shared=self.shared,
                **({} if clock is None else {"clock": clock}),
            )
            for rank in share.ranks
        }
        schedulers = list(self._by_rank.values())
        self.scheduler = schedulers[0] if len(schedulers) == 1 else RankTierSchedulers(schedulers)
        self.worker = TierWorker(
            self.host,
            self.disk,
            sizes,
            num_threads=config.num_threads,
            max_bytes_in_flight=config.max_bytes_in_flight,
            memory_kind=memory_kind,
            stats=self.stats,
            parts=share.parts,
            pace=share.pace,
            shared=self.shared,
        )

    @classmethod
    def of_process(
        cls,
        config: TierConfig,
        kv_cache_config: KVCacheConfig,
        hasher: BlockHasher,
        *,
        model: Mapping[str, str] | None = None,
        num_context: int = 1,
        num_ranks: int = 1,
    ) -> Tiers:
        """The tiers of one process.

        `model` says what computes the pages (`identity_of`); None: the name in `config.weights` alone does.
        `num_context` devices share the tokens of every page; `num_ranks` data ranks, each of pools of its own, share
        both tiers.

        Raises:
            ValueError: the folder holds units of another layout, of tokens in another order, of other hashes, another
                model or other weights. Nothing is allocated.
        """
        ranks = {"num_context": num_context, "num_ranks": num_ranks}
        return cls(config, TierShare.whole(config, kv_cache_config, hasher, model=model, **ranks))

    def of_rank(self, rank: int) -> RankConnector:
        """The scheduler's side of one data rank."""
        return RankTier(self._by_rank[rank])

    def save_all(self, pages: KVPages) -> KVPages:
        """Brings all that the manager has cached to the host, as far as it has room, and to disk; the pages."""
        self.scheduler.queue_all()
        with self.worker.waiting_for_disk():
            pages = self.worker.start_load_kv(pages, self.scheduler.build_connector_meta())
            self.flush()
        return pages

    def use_weights(self, weights: WeightsInUse) -> None:
        """They compute from here on. A new engine finds nothing in memory that another has left there.

        Raises:
            ValueError: the disk knows the version as that of other weights. Nothing is changed.
        """
        if weights.version is None:
            self.reset()
            return
        if self.disk is not None:
            self.disk.name_weights(repr(weights.version), weights.digest())
        if self.shared is not None:
            self.flush()  # what is on its way is of the weights before
            self.shared.use_weights(weights.digest())

    def flush(self) -> None:
        """Waits until all that is on its way to host, disk and shared store is there, or has failed."""
        self.scheduler.end_stores(self.worker.flush())

    def reset(self, *, forget: bool = True) -> None:
        """Ends all that is in flight; with `forget` the host is empty then. The disk keeps what it has."""
        self.worker.reset()
        if forget:
            self.host.clear()

    def close(self) -> None:
        """Ends the threads, after what they are at."""
        self.worker.close()
        if self.shared is not None:
            self.shared.close()


def open_shared(
    config: SharedTierConfig, hasher: BlockHasher, identity: Mapping[str, str], stats: TierStats
) -> SharedStore:
    """The shared store of one engine.

    Raises:
        ValueError: hashes differ from process to process, or can be turned back where units are encrypted; or as
            `open_backend`.
        MissingExtraError: as `open_backend`.
    """
    if not hasher.has_seed:
        raise ValueError("expected a seed of block hashes, which replicas share, got none; set PYTHONHASHSEED")
    if config.secret_bytes and not hasher.algorithm.startswith("sha256"):
        raise ValueError(f"expected block hashes of sha256 with a secret, got {hasher.algorithm}")
    return SharedStore(config, identity, stats)


def identity_of(
    kv_cache_config: KVCacheConfig, hasher: BlockHasher, model: Mapping[str, str], num_context: int = 1
) -> dict[str, str]:
    """What units on disk and beyond are of: those of others are of no use, whatever their hashes.

    `model` says what beside tokens and pages decides K and V, and has a name or a hash of the "weights".
    How devices split the heads is no part of it: a unit has them all, in one order, but for parts of several processes.
    """
    layers = [(group.layer_names, group.kv_cache_spec, group.layer_specs) for group in kv_cache_config.kv_cache_groups]
    layout = [pool.columns for pool in kv_cache_config.pools]
    pools = [group.pool_id for group in kv_cache_config.kv_cache_groups]
    digest = hashlib.sha256(repr((layers, layout, pools)).encode()).hexdigest()[:32]
    none_hash = hashlib.sha256(hasher.none_hash).hexdigest()[:16]
    return {
        "format": "kvjax units 1",
        "layout": digest,
        "hashes": f"{hasher.algorithm}, blocks of {hasher.block_size}, seed {none_hash}",
        "tokens": "in order" if num_context == 1 else f"interleaved over {num_context} context ranks",
        **model,
    }


__all__ = ["TierShare", "Tiers", "identity_of", "open_shared"]
