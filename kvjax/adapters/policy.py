"""Whose rules say what an adapter's caches keep and evict: the stack's, or kvjax's own.

Flow:    install(policy=...), $KVJAX_POLICY -> [policy_options] -> options of kvjax's managers beside the stack's

How blocks are hashed, which steps compute a prompt and when a fresh state may be hit is the stack's in any case. What
each stack's scheduler allows of kvjax's rules: docs/adapters.md, "kvjax's policy".
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvjax.core.eviction import DEFAULT_POLICY
from kvjax.core.kinds.retention import AUTO

VARIABLE = "KVJAX_POLICY"
STACK, KVJAX = "stack", "kvjax"

# Defaults of `kvjax.core.KVCacheManager`.
OPTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        STACK: MappingProxyType({}),
        KVJAX: MappingProxyType(
            {
                "eviction_policy": DEFAULT_POLICY,
                "free_order": "uncached_first",
                "retention_interval": AUTO,
                "retention_ends": "all",
            }
        ),
    }
)


def policy_options(policy: str | None) -> dict[str, Any]:
    """Options of `kvjax.core.KVCacheManager` that the policy sets; None: that of $KVJAX_POLICY, or else "stack".

    Raises:
        ValueError: the policy is neither "stack" nor "kvjax".
    """
    chosen = (os.environ.get(VARIABLE) or STACK) if policy is None else policy
    if chosen not in OPTIONS:
        where = f"environment variable {VARIABLE}" if policy is None else "policy"
        raise ValueError(
            f"expected {where} of {STACK!r} (the rules of the stack) or {KVJAX!r} (those of kvjax), got {chosen!r}; "
            f"correct it, or leave it out for {STACK!r}"
        )
    return dict(OPTIONS[chosen])


__all__ = ["policy_options"]
