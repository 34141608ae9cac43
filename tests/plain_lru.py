"""Options of a manager that evicts in the order of releases and registers every block, as vLLM 0.16 does.

Tests that state where a block stands in that order take them; what holds for every policy is tested with defaults.
"""

from types import MappingProxyType
from typing import Any

from kvjax.core import ReleaseRules

PLAIN_LRU: MappingProxyType[str, Any] = MappingProxyType(
    {"eviction_policy": "lru", "retention_interval": None, "rules": ReleaseRules(free_order="append")}
)
