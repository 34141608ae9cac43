"""Tiers of a replay: the scheduler's side of kvjax.tiers, over units that travel in virtual time.

Flow:    ReplayConfig.tiers -> [ReplayTiers] -> KVCacheManager(tier=), replay_serial, BatchedReplay

A disk that several replicas share is one `ReplayDisk`: units that one replica brought there are hits of all, and all
read over one channel. The replicas' steps have to be taken in the order of their times then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvjax.core.spec import KVCacheConfig
from kvjax.tiers.connector import LoadResults
from kvjax.tiers.scheduler.tier_scheduler import TierScheduler
from kvjax.tiers.stats import TierStats
from kvjax.tiers.stores.host_store import HostStore
from kvjax.tiers.units import UnitSizes
from kvjax.tiers.worker.simulated_worker import Channel, SimulatedDisk, SimulatedWorker


@dataclass(frozen=True)
class ReplayTierConfig:
    """Sizes and speeds of what lies beyond the pools. The host's is in bytes, or as those of so many blocks."""

    host_bytes: int = 0
    host_blocks: int | None = None  # bytes of so many of each pool, in place of `host_bytes`
    disk_bytes: int = 0
    shares_disk: bool = False  # several replicas have one disk, of `disk_bytes` and one bandwidth
    write_through: bool = False
    host_bytes_per_s: float = 25e9  # of each direction: PCIe 4.0 x16
    host_latency_s: float = 20e-6
    disk_bytes_per_s: float = 5e9  # reading: one NVMe drive
    disk_latency_s: float = 200e-6

    def __post_init__(self) -> None:
        for name in ("host_bytes", "disk_bytes", "host_latency_s", "disk_latency_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"expected {name} >= 0, got {getattr(self, name)}")
        for name in ("host_bytes_per_s", "disk_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        if self.host_blocks is not None and self.host_blocks < 0:
            raise ValueError(f"expected host_blocks >= 0, got {self.host_blocks}")


class ReplayDisk:
    """A disk and the way from it, of one replica or of several."""

    def __init__(self, config: ReplayTierConfig, kv_cache_config: KVCacheConfig, *, takes_time: bool = True) -> None:
        self.units = SimulatedDisk(config.disk_bytes, UnitSizes.of(kv_cache_config))
        speed = (config.disk_bytes_per_s, config.disk_latency_s) if takes_time else ()
        self.channel = Channel(*speed)


class ReplayTiers:
    """The tiers of one replica. An `ExternalKV`."""

    def __init__(
        self,
        config: ReplayTierConfig,
        kv_cache_config: KVCacheConfig,
        now_s: Callable[[], float],
        *,
        takes_time: bool = True,
        disk: ReplayDisk | None = None,
    ) -> None:
        """Empty tiers; `disk`: one that others have too, in place of one of its own."""
        sizes = UnitSizes.of(kv_cache_config)
        host_bytes = config.host_bytes
        if config.host_blocks is not None:
            host_bytes = config.host_blocks * sum(map(sum, sizes.arrays_of_pool))
        self.host = HostStore(host_bytes, sizes, has_bytes=False)
        if disk is None and config.disk_bytes:
            disk = ReplayDisk(config, kv_cache_config, takes_time=takes_time)
        units_on_disk = None if disk is None else disk.units
        self.scheduler = TierScheduler(
            self.host,
            units_on_disk,
            sizes.pool_of_group,
            write_through=config.write_through,
            load_timeout_s=math.inf,
            clock=now_s,
        )
        speed = (config.host_bytes_per_s, config.host_latency_s) if takes_time else ()
        self.worker = SimulatedWorker(
            self.host,
            units_on_disk,
            sizes,
            now_s,
            down=Channel(*speed),
            up=Channel(*speed),
            from_disk=None if disk is None else disk.channel,
        )

    @property
    def connector(self) -> TierScheduler:
        """What a scheduler asks for what lies behind a hit."""
        return self.scheduler

    @property
    def stats(self) -> TierStats:
        """What the tiers have done."""
        return self.scheduler.stats

    @property
    def next_arrival_s(self) -> float:
        """When the next load arrives, or the next store if loads wait for it; infinite: nothing travels."""
        return self.worker.next_load_s

    def num_sent_tokens(self, request_id: str) -> int:
        """None: what comes out of tiers is a hit."""
        return 0

    def step_starts(self) -> LoadResults:
        """Loads that have arrived by now."""
        results = self.scheduler.update_connector_output(self.worker.get_finished())
        self.scheduler.update_connector_output(self.worker.get_finished())  # stores into the slots that these left
        return results

    def step_is_planned(self) -> None:
        """All that the step asks for begins to travel."""
        self.worker.start_load_kv(None, self.scheduler.build_connector_meta())


__all__ = ["ReplayDisk", "ReplayTierConfig", "ReplayTiers"]
