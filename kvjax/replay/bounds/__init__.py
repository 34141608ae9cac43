"""What a trace would hit beside what a replay got: bytes exchanged freely under LRU, and with the future known.

Flow:    trace -> PromptTree, KVCachePlan -> CacheCosts -> [free_exchange, clairvoyant] -> Bounds -> `kvjax replay`
"""

from kvjax.replay.bounds.clairvoyant import clairvoyant
from kvjax.replay.bounds.costs import CacheCosts, CheckpointBytes, ForgetfulCache
from kvjax.replay.bounds.found import Bounds, bounds_json, bounds_text, find_bounds
from kvjax.replay.bounds.free_exchange import free_exchange
from kvjax.replay.bounds.pieces import PromptTree

__all__ = [
    "Bounds",
    "CacheCosts",
    "CheckpointBytes",
    "ForgetfulCache",
    "PromptTree",
    "bounds_json",
    "bounds_text",
    "clairvoyant",
    "find_bounds",
    "free_exchange",
]
