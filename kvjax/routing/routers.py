"""Rules that pick a replica for a request.

Flow:    hits and load of each replica -> [Router.pick] -> a replica
Source:  the cost of Dynamo's KV router: weight * prefill that a replica would then have + tokens that it would hold

    round_robin    one after the other, whatever they have
    least_loaded   the replica with the fewest tokens to prefill and hold
    prefix         the least cost where hits need no prefill

Ties go to the replica that got a request longest ago, so that idle replicas take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """One replica, as a router sees it when a request comes."""

    hit_tokens: int  # of the request's prompt that it has
    prefill_tokens: int  # of its requests, that are not computed yet
    held_tokens: int  # of its requests, computed or not


class Router(Protocol):
    """Picks replicas for the requests of one deployment, in order."""

    def pick(self, num_prompt_tokens: int, replicas: Sequence[ReplicaState]) -> int:
        """The replica that gets a request of so many prompt tokens."""


class RoundRobinRouter:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def pick(self, num_prompt_tokens: int, replicas: Sequence[ReplicaState]) -> int:
        """The next one."""
        chosen = self._next % len(replicas)
        self._next = chosen + 1
        return chosen


class PrefixAwareRouter:
    """The least of prefill and held tokens, where what a replica has cached is not computed again."""

    def __init__(self, prefill_weight: float = 1.0) -> None:
        """A router; a token to prefill costs `prefill_weight` of a token held.

        Raises:
            ValueError: a weight that is not above 0.
        """
        if not prefill_weight > 0:
            raise ValueError(f"expected prefill_weight > 0, got {prefill_weight}")
        self._weight = prefill_weight
        self._picked_at: dict[int, int] = {}
        self._num_picked = 0

    def pick(self, num_prompt_tokens: int, replicas: Sequence[ReplicaState]) -> int:
        """The replica of the least cost; of several the one picked longest ago."""

        def cost(place: int) -> tuple[float, int]:
            state = replicas[place]
            prefill = state.prefill_tokens + num_prompt_tokens - self._hits(state)
            return self._weight * prefill + state.held_tokens, self._picked_at.get(place, -1)

        chosen = min(range(len(replicas)), key=cost)
        self._picked_at[chosen] = self._num_picked
        self._num_picked += 1
        return chosen

    def _hits(self, state: ReplicaState) -> int:
        return state.hit_tokens


class LeastLoadedRouter(PrefixAwareRouter):
    """The same, blind to what is cached."""

    def _hits(self, state: ReplicaState) -> int:
        return 0


ROUTERS: Mapping[str, Callable[[], Router]] = MappingProxyType(
    {"round_robin": RoundRobinRouter, "least_loaded": LeastLoadedRouter, "prefix": PrefixAwareRouter}
)


def make_router(name: str) -> Router:
    """A router of `ROUTERS` by its name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in ROUTERS:
        raise ValueError(f"expected a router of {', '.join(ROUTERS)}, got {name!r}")
    return ROUTERS[name]()


__all__ = [
    "ROUTERS",
    "LeastLoadedRouter",
    "PrefixAwareRouter",
    "ReplicaState",
    "RoundRobinRouter",
    "Router",
    "make_router",
]
