"""Equal replicas behind one router, which knows their caches by KV events.

Flow:    Job, when it arrives -> [RoutedReplicas.submit]: PrefixIndex.match -> Router.pick -> Replica.submit

By the time a request is routed the index knows the events of all steps that have ended, and no others: a step that is
under way has told nothing. Of what tiers hold there are no events: the index asks them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvjax.core.requests.request import Request
from kvjax.replay.recorder import Recorder
from kvjax.replay.replicas.replica import Deployment, Replica
from kvjax.replay.requests.job import Job
from kvjax.routing import PrefixIndex, make_router
from kvjax.tiers.stats import TierStats


class RoutedReplicas:
    """One side of a deployment: all of it, or those that prefill, or those that decode."""

    def __init__(self, of: Deployment, replicas: Sequence[Replica], router: str) -> None:
        """Empty replicas of `of`.

        Raises:
            ValueError: no replica, or an unknown router.
        """
        self.replicas = tuple(replicas)
        self._router, self._prompts = make_router(router), of.prompts
        tiers = [replica.tiers.scheduler for replica in replicas if replica.tiers is not None]
        self._index = PrefixIndex(len(replicas), of.plan.config, of.longest, of.config.hash_block_size, tiers=tiers)

    @property
    def recorders(self) -> tuple[Recorder, ...]:
        """What each replica measured."""
        return tuple(replica.recorder for replica in self.replicas)

    @property
    def tier_stats(self) -> tuple[TierStats, ...]:
        """What each replica's tiers have done; none without tiers."""
        return tuple(replica.tiers.stats for replica in self.replicas if replica.tiers is not None)

    @property
    def ended_s(self) -> float:
        """When the last step ended."""
        return max(replica.simulation.clock.now_s for replica in self.replicas)

    def receive(self, job: Job) -> None:
        """A job comes from outside: its prompt is made, and it is submitted."""
        self.submit(job, self._prompts.make(str(job.index), job.source))

    def submit(self, job: Job, request: Request) -> int:
        """Gives a job that arrives at `job.arrives_s` to the replica that the router picks; its number."""
        for number, replica in enumerate(self.replicas):
            self._index.apply(number, replica.take_events(job.arrives_s))
        hits = self._index.match(request)
        states = [replica.state(hit) for replica, hit in zip(self.replicas, hits, strict=True)]
        chosen = self._router.pick(job.source.input_length, states)
        job.request, job.expected_tokens = request, job.source.input_length - hits[chosen]
        self.replicas[chosen].submit(job)
        return chosen


__all__ = ["RoutedReplicas"]
