"""Which replica gets a request: an index of their prefix caches, made of KV events, and rules that go by it.

Flow:    KV events of each replica -> [PrefixIndex.match] -> Router.pick -> a replica
"""

from kvjax.routing.prefix_index import PrefixIndex
from kvjax.routing.routers import (
    ROUTERS,
    LeastLoadedRouter,
    PrefixAwareRouter,
    ReplicaState,
    RoundRobinRouter,
    Router,
    make_router,
)

__all__ = [
    "ROUTERS",
    "LeastLoadedRouter",
    "PrefixAwareRouter",
    "PrefixIndex",
    "ReplicaState",
    "RoundRobinRouter",
    "Router",
    "make_router",
]
