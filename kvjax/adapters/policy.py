"""Whose rules say what an adapter's caches keep and evict: the stack's, or kvjax's own.

Flow:    install(policy=...), $KVJAX_POLICY -> [chosen_policy] -> [with_policy] -> options of kvjax's managers

How blocks are hashed, which steps compute a prompt and when a fresh state may be hit is the stack's in any case. What
each stack's scheduler allows of kvjax's rules: docs/adapters.md, "kvjax's policy".
"""

from __future__ import annotations

import os
from dataclasses import replace

from kvjax.core.options.manager_options import ManagerOptions

VARIABLE = "KVJAX_POLICY"
STACK, KVJAX = "stack", "kvjax"


def chosen_policy(policy: str | None) -> str:
    """The policy, "stack" or "kvjax"; None: that of $KVJAX_POLICY, or else "stack".

    Raises:
        ValueError: the policy is neither.
    """
    chosen = (os.environ.get(VARIABLE) or STACK) if policy is None else policy
    if chosen not in (STACK, KVJAX):
        where = f"environment variable {VARIABLE}" if policy is None else "policy"
        raise ValueError(
            f"expected {where} of {STACK!r} (the rules of the stack) or {KVJAX!r} (those of kvjax), got {chosen!r}; "
            f"correct it, or leave it out for {STACK!r}"
        )
    return chosen


def with_policy(policy: str, options: ManagerOptions) -> ManagerOptions:
    """The stack's options, or with "kvjax" kvjax's defaults of what is kept and evicted in their place."""
    if policy == STACK:
        return options
    ours = ManagerOptions()
    rules = replace(
        options.rules,
        free_order=ours.rules.free_order,
        retention_ends=ours.rules.retention_ends,
        inner_hits=ours.rules.inner_hits,
        rswa_as_vllm=ours.rules.rswa_as_vllm,
    )
    return replace(
        options, eviction_policy=ours.eviction_policy, retention_interval=ours.retention_interval, rules=rules
    )


__all__ = ["KVJAX", "STACK", "chosen_policy", "with_policy"]
