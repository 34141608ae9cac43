"""kvjax's cache manager under EasyDeL's scheduler, in place of its own.

from kvjax.adapters import easydel
easydel.install()         # before the engine is made
easydel.uninstall()
"""

from __future__ import annotations

from typing import Any

from kvjax.adapters.easydel.manager import CacheManager
from kvjax.adapters.easydel.metadata import EASYDEL
from kvjax.adapters.policy import STACK, chosen_policy
from kvjax.adapters.stack import require_stack

_SCHEDULER = "easydel.inference.esurge.scheduler.scheduler"
_replaced: list[tuple[Any, Any]] = []


def install(*, policy: str | None = None) -> None:
    """Has the scheduler make kvjax's manager. Again: with another policy.

    Args:
        policy: "stack" caches and evicts as EasyDeL does, "kvjax" by kvjax's defaults; None: as the environment
            variable KVJAX_POLICY says, or else "stack".

    Raises:
        MissingStackError: EasyDeL cannot be imported.
        UnknownStackError: its manager is none of the recorded versions'. Nothing is changed.
        ValueError: the policy is another one. Nothing is changed.
    """
    chosen = chosen_policy(policy)
    EASYDEL.load("CachePages")
    theirs = EASYDEL.load("CacheManager")
    module: Any = require_stack(_SCHEDULER, EASYDEL.package, EASYDEL.versions)
    uninstall()
    _replaced.append((module, theirs))
    module.CacheManager = CacheManager if chosen == STACK else type("CacheManager", (CacheManager,), {"policy": chosen})


def uninstall() -> None:
    """Has the scheduler make EasyDeL's own manager again."""
    while _replaced:
        module, theirs = _replaced.pop()
        module.CacheManager = theirs
