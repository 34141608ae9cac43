"""Settings of the tiers of an engine.

Flow:    caller or command line -> [TierConfig] -> EngineConfig.tiers -> Tiers
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core.eviction import EVICTION_POLICIES
from kvjax.tiers.shared.config import SharedTierConfig


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """What lies beyond the pools.

    `host_bytes` of memory keep what the pools evict. With `disk_folder` every unit that comes to the host goes to disk
    too, up to `disk_bytes`; processes of one machine may share a folder. A folder is of one cache: one layout, one
    configuration of a model and its weights. `weights` is a name for the weights, such as a revision; None: a hash of
    them all, which is computed once when an engine is made. The name is taken at its word.

    With `shared` every unit that comes to the host goes to a store that replicas share, too, and what another replica
    has put there is loaded. Units there are of one cache likewise; those of others are never found.

    With `write_through` a block goes to the host once it is computed, and stays there when it is loaded; else it goes
    when its pool needs the block (write-back), and what is loaded leaves the host. Write-back holds more, write-through
    has what a pool held when that is given up.

    `host_bytes` are of all kinds together: nothing is split. `eviction_policy` is the host's, for units that are not on
    probation: "lru" (the default, by last use wherever that was), "slru" or "cost". `num_threads` copy bytes and as
    many read and write files. At most `max_bytes_in_flight` are on their way to the host, and as many on their way to
    disk: beyond that steps wait for the host, and the disk is passed over. None: 256 MiB, or 8 on a CPU, whose device
    memory is the host's. A load that takes longer than `load_timeout_s` is given up: its tokens are computed.

    Raises:
        ValueError: a value is outside its range, a folder comes without `disk_bytes`, there is no tier, or the name is
            empty.
    """

    host_bytes: int = 0
    disk_folder: str | None = None
    disk_bytes: int | None = None
    shared: SharedTierConfig | None = None
    weights: str | None = None
    write_through: bool = False
    eviction_policy: str = "lru"
    num_threads: int = 2
    max_bytes_in_flight: int | None = None
    load_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.host_bytes < 0:
            raise ValueError(f"expected host_bytes >= 0, got {self.host_bytes}")
        for name in ("num_threads", "max_bytes_in_flight", "load_timeout_s"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"expected {name} > 0, got {getattr(self, name)}")
        if self.eviction_policy not in EVICTION_POLICIES:
            raise ValueError(
                f"expected eviction_policy of {', '.join(EVICTION_POLICIES)}, got {self.eviction_policy!r}"
            )
        if self.disk_folder is None and self.shared is None and not self.host_bytes:
            raise ValueError("expected host_bytes > 0, a disk_folder or a shared tier, got none")
        if self.disk_folder is not None and (self.disk_bytes is None or self.disk_bytes < 1):
            raise ValueError(f"expected disk_bytes >= 1 with a disk_folder, got {self.disk_bytes}")
        if self.weights is not None and not self.weights:
            raise ValueError("expected weights as a name that is not empty, or None for a hash of them, got ''")

    @property
    def outlives_engine(self) -> bool:
        """Whether units are kept where other engines find them: who computed them has to be known."""
        return self.disk_folder is not None or self.shared is not None


__all__ = ["TierConfig"]
