"""What the tiers of one engine have done.

Flow:    TierScheduler, TierWorker, DiskStore, SharedStore -> [TierStats] -> LLMEngine.tier_stats
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class TierStats:
    """Counts since the start. Written by one thread, but for those of disk and shared tier, by their threads."""

    num_stored: int = 0  # units that came to the host
    num_store_failures: int = 0
    num_host_loads: int = 0  # units loaded from the host
    num_disk_loads: int = 0  # from disk
    num_copied: int = 0  # from other pages of the pool
    num_loaded_tokens: int = 0  # of loads that ended well
    num_load_failures: int = 0  # loads whose request computes its tokens instead
    num_disk_writes: int = 0
    num_disk_skips: int = 0  # units that a full queue or a full disk kept from it
    num_disk_errors: int = 0  # units on disk that could not be read, or were not what was written
    num_disk_outages: int = 0  # times that the disk ceased to keep units
    disk_problem: str = ""  # why it does not keep them now; empty: it does
    num_shared_lookups: int = 0  # calls that asked the shared tier for units
    num_shared_loads: int = 0  # units loaded from the shared tier, as planned
    num_shared_reads: int = 0  # units that came from there, and were what was written
    num_shared_writes: int = 0
    num_shared_skips: int = 0  # units that a full queue, or a store that does not work, kept from it
    num_shared_errors: int = 0  # units there that were not what was written
    num_shared_failures: int = 0  # calls that failed or were late
    shared_problem: str = ""  # why the store is left alone now; empty: it works


__all__ = ["TierStats"]
