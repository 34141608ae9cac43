"""Puts kvjax's manager under vLLM's scheduler, and takes it out again.

Flow:    install() -> vLLM's modules name [KVCacheManager] -> Scheduler makes it; uninstall() -> vLLM's own

    import kvjax.adapters.vllm
    kvjax.adapters.vllm.install()      # before the engine is made, in the process that schedules
"""

from __future__ import annotations

from typing import Any

from kvjax.adapters.policy import STACK, chosen_policy
from kvjax.adapters.vllm.description import vllm_module
from kvjax.adapters.vllm.manager import KVCacheManager
from kvjax.adapters.vllm.release import installed_release

MODULES = ("vllm.v1.core.kv_cache_manager", "vllm.v1.core.sched.scheduler")

_replaced: list[tuple[Any, Any]] = []  # modules and their own class, while installed


def install(*, policy: str | None = None, **core_options: Any) -> type[KVCacheManager]:
    """Makes vLLM's schedulers use kvjax; those that exist keep what they have. Again: with other options.

    Args:
        policy: "stack" caches and evicts as the installed release does, "kvjax" by kvjax's defaults; None: as the
            environment variable KVJAX_POLICY says, or else "stack".
        core_options: options of `kvjax.core.KVCacheManager` beside vLLM's, `eviction_policy="slru"` for example.

    Returns:
        The class that schedulers make.

    Raises:
        MissingStackError: vLLM is not installed.
        UnknownStackError: its version is unknown or differs from what was recorded. Nothing has changed.
        ValueError: the policy is another one. Nothing has changed.
    """
    installed_release()
    chosen = chosen_policy(policy)
    modules = [vllm_module(name) for name in MODULES]
    is_plain = chosen == STACK and not core_options
    changed = {"policy": chosen, "core_options": core_options}
    cls = KVCacheManager if is_plain else type("KVCacheManager", (KVCacheManager,), changed)
    uninstall()
    for module in modules:
        _replaced.append((module, module.KVCacheManager))
        module.KVCacheManager = cls
    return cls


def uninstall() -> None:
    """Makes vLLM's schedulers use vLLM's own manager again; without `install` nothing changes."""
    while _replaced:
        module, own = _replaced.pop()
        module.KVCacheManager = own


__all__ = ["install", "uninstall"]
