"""The tiers' schedulers of all data ranks as one: what an engine asks of them in a step.

Flow:    TierScheduler of each rank -> [RankTierSchedulers.build_connector_meta] -> TierMeta -> TierWorker
         TierWorker -> ConnectorOutput -> [RankTierSchedulers.update_connector_output] -> requests of all ranks

Host and disk are shared: a unit that one rank computed is loaded by any. Pools are not: pages of another rank are
loaded once they are on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvjax.tiers.connector import ConnectorOutput, LoadResults
from kvjax.tiers.scheduler.tier_scheduler import TierScheduler
from kvjax.tiers.units import NOTHING, StoredUnits, TierMeta


class RankTierSchedulers:
    """A `StepConnector` over several schedulers with one host, one disk and one transit."""

    def __init__(self, by_rank: Sequence[TierScheduler]) -> None:
        self.by_rank = tuple(by_rank)

    @property
    def num_loads(self) -> int:
        """Loads that have not ended."""
        return sum(one.num_loads for one in self.by_rank)

    def build_connector_meta(self) -> TierMeta:
        """What all ranks ask for; a unit that two of them evict is stored once."""
        metas = [one.build_connector_meta() for one in self.by_rank]
        if all(meta is NOTHING for meta in metas):
            return NOTHING
        return TierMeta(
            stores=tuple(store for meta in metas for store in meta.stores),
            copies=tuple(copy for meta in metas for copy in meta.copies),
            loads=tuple(load for meta in metas for load in meta.loads),
            cancelled=tuple(load_id for meta in metas for load_id in meta.cancelled),
        )

    def update_connector_output(self, output: ConnectorOutput) -> LoadResults:
        """Units that arrived can be found by all ranks; the requests of all whose loads have ended."""
        first, *others = self.by_rank
        rest = replace(output, finished_sending=())
        results = [first.update_connector_output(output), *(one.update_connector_output(rest) for one in others)]
        return LoadResults(
            tuple(name for result in results for name in result.loaded),
            tuple(name for result in results for name in result.failed),
        )

    def end_stores(self, stores: Iterable[StoredUnits]) -> None:
        """As of any of them: what is in transit is shared."""
        self.by_rank[0].end_stores(stores)

    def queue_all(self) -> None:
        """As of each."""
        for one in self.by_rank:
            one.queue_all()

    def check_invariants(self) -> None:
        """As of each.

        Raises:
            InvariantError: a law does not hold.
        """
        for one in self.by_rank:
            one.check_invariants()


__all__ = ["RankTierSchedulers"]
