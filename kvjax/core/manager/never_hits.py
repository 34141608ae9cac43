"""Whether a deployment can hit at all: a prompt that is repeated alone in an empty cache.

Flow:    KVCacheManager(...) -> [warn_if_never_hit] -> NeverHitsWarning, once;   kvjax plan -> [why_never] -> a sentence

A prompt of n tokens is computed in steps as `limit_step` and `max_in_flight_tokens` let them, freed, and looked up
again. It hits L tokens if a lookup may answer L, all that a hit of L needs is registered, states exist at L, and the
pools hold the steps. If any length hits, one of a few does:

    n    the shortest that may hit the alignment, twice the alignment, or an interval; the longest
    L    the alignment, the interval, the request's own checkpoints, the ends of its steps
"""

from __future__ import annotations

import warnings
from itertools import pairwise

import numpy as np

from kvjax.core.kinds.group_managers import GroupManagers
from kvjax.core.manager.block_needs import BlockNeeds, sums
from kvjax.core.manager.step_limit import limit_step
from kvjax.core.misses.lookup_states import longest_hit
from kvjax.errors import NeverHitsWarning


def warn_if_never_hit(groups: GroupManagers) -> None:
    """Warns the caller of the manager that is being made of these groups, whose pools are unused."""
    reason = why_never(groups)
    if reason is not None:
        message = (
            f"prefix caching is on, and no prompt can ever hit: {reason}; or turn it off with enable_caching=False"
        )
        warnings.warn(message, NeverHitsWarning, stacklevel=5)


def why_never(groups: GroupManagers) -> str | None:
    """Why no prompt can hit, and what to do; None: some can, or caching is off."""
    settings, state_steps = groups.settings, groups.state_steps
    if not groups.options.enable_caching:
        return None
    if not groups.cacheable:
        return "no group has blocks that another request may use"
    for manager in groups.cacheable:
        if not manager.enable_caching:
            return f"groups {manager.group_ids} keep one state a request; expected mamba_cache_mode align, got none"
    if state_steps.block_size > settings.max_in_flight_tokens:
        return (
            f"a step has at most {settings.max_in_flight_tokens} tokens and never reaches the end of a block of "
            f"recurrent states; expected max_in_flight_tokens >= {state_steps.block_size}"
        )
    num_behind = max(groups.num_dropped_tokens + 1 - groups.may_drop_end, 1)  # tokens behind the longest hit, at least
    if groups.alignment + num_behind > settings.max_model_len:
        return (
            f"hits are multiples of {groups.alignment} tokens (the LCM of the block sizes), of prompts of at least "
            f"{num_behind} more; expected smaller blocks or a longer max_model_len, got {settings.max_model_len}"
        )
    hits_of = {n: _find_hits(groups, n) for n in _candidates(groups, num_behind)}
    if not any(hits_of.values()):
        return (
            f"no request of {settings.max_model_len} tokens leaves a checkpoint that a hit can end at; expected "
            "retention_interval='auto' and retention_ends='all', or None to keep every block"
        )
    reasons = (_why_too_large(groups, n, hit) for n, hits in hits_of.items() for hit in sorted(hits))
    first = next(reasons)
    return None if first is None or None in reasons else first


def _candidates(groups: GroupManagers, num_behind: int) -> list[int]:
    """Lengths of prompts to try, the shortest first; they exceed what they may hit by `num_behind` tokens."""
    interval = 0 if groups.retention is None else groups.retention.interval
    hits = (interval, groups.alignment, 2 * groups.alignment)
    longest = groups.settings.max_model_len
    return sorted({longest, *(hit + num_behind for hit in hits if 0 < hit <= longest - num_behind)})


def _step_ends(groups: GroupManagers, num_tokens: int) -> list[int]:
    """Where the steps of a prompt end."""
    most, lengths, ends = groups.settings.max_in_flight_tokens, _checkpoints(groups, num_tokens), [0]
    while ends[-1] < num_tokens:
        new = min(num_tokens - ends[-1], most)
        ends.append(ends[-1] + limit_step(groups, ends[-1], new, num_tokens, lengths))
    return ends[1:]


def _checkpoints(groups: GroupManagers, num_tokens: int) -> tuple[int, ...]:
    """A prompt's own, when it comes again: what groups that cache every token have of it is a shared prefix."""
    if groups.retention is None:
        return ()
    shared = num_tokens - 1
    lookups = [pair for pair in groups.cacheable_lookups if not pair[0].forgets]
    for manager, drops in lookups or groups.cacheable_lookups[:1]:
        if manager.checkpoints is not None or manager.state_blocks is not None:
            return groups.retention.lengths_for(num_tokens, 0)
        if drops:
            shared = groups.lookup_limit(manager, shared, num_tokens - 1, num_tokens) - manager.block_size
        shared -= shared % groups.alignment
    return groups.retention.lengths_for(num_tokens, max(shared, 0))


def _find_hits(groups: GroupManagers, num_tokens: int) -> set[int]:
    """Lengths of which a prompt registers all that a hit of the same prompt needs."""
    own, ends = _checkpoints(groups, num_tokens), _step_ends(groups, num_tokens)
    hits = {groups.alignment, *own, *ends} | (set() if groups.retention is None else {groups.retention.interval})
    most = longest_hit(groups, num_tokens)
    hits = {length for length in hits if 0 < length <= most and length % groups.alignment == 0}
    for manager in groups.cacheable:
        if manager.state_blocks is not None:
            hits &= set(ends)
        if manager.checkpoints is not None:
            hits = {length for length in hits if manager.checkpoints.keeps(length, np.array([own], np.int64))}
    return hits


def _why_too_large(groups: GroupManagers, num_tokens: int, hit: int) -> str | None:
    """Which pool does not hold the steps of a prompt, with what was released of what a hit needs; None: all do."""
    needs = BlockNeeds(groups)
    for start, end in pairwise([0, *_step_ends(groups, num_tokens)]):
        kept = [0] * len(groups.pools)
        for manager, drops in groups.cacheable_lookups:
            first, released = [manager.get_num_skipped_tokens(n) // manager.block_size for n in (hit, start)]
            column = hit // manager.block_size
            first = max(min(first, column - groups.needs_last_block), manager.num_kept_columns)
            num_kept = max(min(released, column + (drops and not manager.holds_states)) - first, 0)
            kept[groups.pools.index(manager.block_pool)] += manager.num_groups * num_kept
        of_step = sums(needs.of_new(end, groups.no_ids, start, capped=False), kept)
        for pool_id, (need, pool) in enumerate(zip(of_step, groups.pools, strict=True)):
            if need > pool.num_free_blocks:
                return (
                    f"pool {pool_id} has {pool.num_free_blocks} blocks, and the shortest prompt that may hit, of "
                    f"{num_tokens} tokens, takes {need}; expected more blocks"
                )
    return None


__all__ = ["warn_if_never_hit", "why_never"]
