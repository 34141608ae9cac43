"""One step's inputs in the shapes of a bucket: the StepPlan padded, as the compiled step takes it.

Flow:    StepPlan + Bucket -> [DeviceBatch.from_plan] -> numpy leaves -> jitted update step
Source:  ARCHITECTURE.md, "The step plan"

A dispatched step may read its numpy arguments later, and on CPU a device array may be a view of them. So every call
pads into arrays of its own, which nobody writes again; the plan and the manager may change at once. Block tables that
the plan made in the bucket's shape are read-only, and passed on as they are.

Padding: tokens 0 at position 0, slot -1 (not written), table columns 0 (the null page), requests of length 0 after
the last real one, logits of token 0 (ignored).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TypeAlias

import jax
import numpy as np

from kvjax.core.step.step_plan import GroupPlan, StepPlan
from kvjax.device.inputs.buckets import Bucket, Buckets
from pallas_kernels.compressor_update import max_new_entries

Array: TypeAlias = np.ndarray | jax.Array
NO_SLOTS = np.zeros(0, np.int32)
NO_SLOTS.flags.writeable = False
_NONE: Mapping[int, int] = MappingProxyType({})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceStates:
    """Pages of a recurrent group's states, padded with requests that neither read nor write."""

    read: Array  # int32[S]
    write: Array  # int32[S], or int32[S, 1 + drafts]
    has_initial: Array  # bool[S]
    checkpoint_ends: Array | None = None  # int32[S, k]; None: no step leaves a state on its way
    checkpoint_pages: Array | None = None  # int32[S, k]

    @classmethod
    def empty(cls, num_requests: int, num_drafts: int, num_checkpoints: int = 0) -> DeviceStates:
        """States without any request."""
        shape = (num_requests, 1 + num_drafts) if num_drafts else (num_requests,)
        none = np.zeros((num_requests, num_checkpoints), np.int32) if num_checkpoints else None
        return cls(
            np.zeros(num_requests, np.int32), np.zeros(shape, np.int32), np.zeros(num_requests, bool), none, none
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceCompressed:
    """Entries of several tokens that a group's layers keep."""

    seq_lens: Array  # int32[S] tokens, not entries
    slot_mappings: dict[int, Array]  # tokens of an entry -> int32[N] slots of those that the step completes, then -1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceGroup:
    """One group's part of a step, padded."""

    block_tables: Array  # int32[S, P]
    seq_lens: Array  # int32[S]
    slot_mapping: Array  # int32[T]; [0] where layers read an encoder, whose tokens a program of its own writes
    states: DeviceStates | None = None  # of recurrent groups only
    compressed: DeviceCompressed | None = None  # of groups with entries of several tokens only
    reserved_blocks: Array | None = None  # int32[k] before every request's own, of groups with learned sinks only
    prompt_tokens: Array | None = None  # int32[S] that every query of the request sees, of groups of R-SWA only


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DeviceBatch:
    """One step, padded to a bucket. Leaves are numpy on the host side and jax arrays inside the step."""

    token_ids: Array  # int32[T]
    positions: Array  # int32[T], or [3, T] for M-RoPE
    token_source: Array  # int32[T] -1, or an index into the tokens sampled one step before
    query_start_loc: Array  # int32[S + 1], constant after the last real request
    distribution: Array  # int32[3]
    logits_indices: Array  # int32[N], as many rows of logits as requests, or 1 + drafts for each
    groups: tuple[DeviceGroup, ...]
    embed_index: Array | None = None  # int32[T] -1: a token, else a row of vectors; None: the model takes none
    given: Array | None = None  # int32[T] the token behind each that is scored, -1: none; None: the step scores none
    logits_starts: Array | None = None  # int32[S + 1] rows of logits of each sampling request; None: each has one
    is_decode: bool = field(default=False, metadata={"static": True})  # every request has at most T / S tokens

    @classmethod
    def from_plan(
        cls,
        plan: StepPlan,
        bucket: Bucket,
        embed_index: np.ndarray | None = None,
        given: np.ndarray | None = None,
    ) -> DeviceBatch:
        """`plan` padded to `bucket`, in fresh arrays.

        `embed_index` is int[plan tokens], for models with embeddings, and `given` likewise, for steps that score.

        Raises:
            ValueError: the plan does not fit the bucket, or `embed_index` or `given` are not of its tokens.
        """
        sizes, longest = plan_sizes(plan), longest_request(plan)
        if not bucket.fits(*sizes, longest, most_checkpoints(plan)):
            what = f"{sizes} (tokens, requests, columns, drafts) and {longest} tokens of a request"
            raise ValueError(f"a step of {what} does not fit {bucket}")
        for name, values in (("embed_index", embed_index), ("given", given)):
            if values is not None and values.shape != (plan.num_tokens,):
                raise ValueError(f"expected {name} [{plan.num_tokens}], got {list(values.shape)}")
        tokens, requests = bucket.num_tokens, bucket.num_requests
        return cls(
            token_ids=padded(plan.token_ids, tokens),
            positions=padded(plan.positions, tokens),
            token_source=padded(plan.token_source, tokens, -1),
            query_start_loc=padded(plan.query_start_loc, requests + 1, plan.num_tokens),
            distribution=np.array(plan.distribution, np.int32),
            logits_indices=padded(plan.logits_indices, bucket.num_logits),
            groups=_groups(plan, bucket),
            embed_index=None if embed_index is None else padded(embed_index, tokens, -1),
            given=None if given is None else padded(given, tokens, -1),
            logits_starts=_logits_starts(plan, bucket),
            is_decode=not bucket.is_mixed,
        )

    @classmethod
    def empty(
        cls,
        bucket: Bucket,
        num_groups: int,
        *,
        mrope: bool = False,
        embeds: bool = False,
        scores: bool = False,
        recurrent: Mapping[int, int] = _NONE,
        compressed: Mapping[int, Collection[int]] = MappingProxyType({}),
        encoder: Collection[int] = (),
        reserved: Mapping[int, int] = _NONE,
        prompts: Collection[int] = (),
    ) -> DeviceBatch:
        """A batch without requests: writes nothing and attends to nothing. For warm-up.

        With `mrope` positions have three axes, with `embeds` there is an index of vectors, with `scores`
        there are tokens to score. `recurrent`: groups whose
        pages are states -> drafts with pages. `compressed`: groups with entries of several tokens -> each number of
        tokens. `encoder`: groups that read an encoder. `reserved`: groups with blocks of learned sinks -> how many.
        `prompts`: groups of R-SWA.
        """
        tokens, requests = bucket.num_tokens, bucket.num_requests
        group = DeviceGroup(
            np.zeros((requests, bucket.num_columns), np.int32),
            np.zeros(requests, np.int32),
            np.full(tokens, -1, np.int32),
        )

        def entries(ratios: Collection[int]) -> DeviceCompressed:
            slots: dict[int, Array] = {ratio: np.full(_most_entries(bucket, ratio), -1, np.int32) for ratio in ratios}
            return DeviceCompressed(np.zeros(requests, np.int32), slots)

        groups = [group] * num_groups
        for i, count in reserved.items():
            groups[i] = replace(groups[i], reserved_blocks=np.zeros(count, np.int32))
        for i, num_drafts in recurrent.items():
            groups[i] = replace(groups[i], states=DeviceStates.empty(requests, num_drafts, bucket.num_checkpoints))
        for i, ratios in compressed.items():
            groups[i] = replace(groups[i], compressed=entries(ratios))
        for i in prompts:
            groups[i] = replace(groups[i], prompt_tokens=np.zeros(requests, np.int32))
        for i in encoder:
            groups[i] = replace(groups[i], slot_mapping=NO_SLOTS)
        return cls(
            token_ids=np.zeros(tokens, np.int32),
            positions=np.zeros((3, tokens) if mrope else tokens, np.int32),
            token_source=np.full(tokens, -1, np.int32),
            query_start_loc=np.zeros(requests + 1, np.int32),
            distribution=np.zeros(3, np.int32),
            logits_indices=np.zeros(bucket.num_logits, np.int32),
            groups=tuple(groups),
            embed_index=np.full(tokens, -1, np.int32) if embeds else None,
            given=np.full(tokens, -1, np.int32) if scores else None,
            logits_starts=np.zeros(requests + 1, np.int32) if bucket.num_drafts else None,
            is_decode=not bucket.is_mixed,
        )


def plan_sizes(plan: StepPlan) -> tuple[int, int, int, int]:
    """(tokens, requests or rows of logits without drafts, table columns, most drafts) that a bucket must hold."""
    columns = max((group.block_tables.shape[1] for group in plan.groups), default=1)
    drafts = plan.most_drafts
    requests = plan.num_requests if drafts else max(plan.num_requests, int(plan.logits_indices.size))
    return plan.num_tokens, requests, max(columns, 1), drafts


def longest_request(plan: StepPlan) -> int:
    """Tokens of the request that has the most."""
    return 1 if plan.num_tokens == plan.num_requests else int(plan.num_new_tokens.max(initial=0))


def pick_bucket(plan: StepPlan, buckets: Buckets) -> Bucket:
    """The smallest declared bucket that `plan` fits.

    Raises:
        ValueError: none fits; the message names the limits.
    """
    return buckets.pick(*plan_sizes(plan), longest_request(plan), most_checkpoints(plan))


def most_checkpoints(plan: StepPlan) -> int:
    """States that the request leaves on its way which leaves the most."""
    pages = [group.checkpoint_pages for group in plan.groups if group.checkpoint_pages is not None]
    return max([int(np.count_nonzero(of_group, axis=1).max(initial=0)) for of_group in pages], default=0)


def padded(values: np.ndarray, length: int, fill: int = 0) -> np.ndarray:
    """A fresh copy of `values` with its last axis filled up to `length`, int64 narrowed to int32."""
    dtype = np.int32 if values.dtype.kind == "i" else values.dtype
    end = values.shape[-1]
    if end == length:
        return values.astype(dtype)
    out = np.empty((*values.shape[:-1], length), dtype)
    out[..., :end] = values
    out[..., end:] = fill
    return out


def _groups(plan: StepPlan, bucket: Bucket) -> tuple[DeviceGroup, ...]:
    """Every group padded; groups with the same lengths share them."""
    seq_lens: dict[int, np.ndarray] = {}
    groups = []
    for group in plan.groups:
        key = id(group.seq_lens)
        if key not in seq_lens:
            seq_lens[key] = padded(group.seq_lens, bucket.num_requests)
        groups.append(
            DeviceGroup(
                block_tables=_block_tables(group, bucket),
                seq_lens=seq_lens[key],
                slot_mapping=_slot_mapping(group, bucket),
                states=_states(group, bucket),
                compressed=_compressed(plan, group, bucket),
                reserved_blocks=None if group.reserved_blocks is None else group.reserved_blocks.copy(),
                prompt_tokens=None if group.prompt_tokens is None else padded(group.prompt_tokens, bucket.num_requests),
            )
        )
    return tuple(groups)


def _logits_starts(plan: StepPlan, bucket: Bucket) -> np.ndarray | None:
    """int32[bucket requests + 1], constant after the last request that samples; None: each has one row of logits."""
    if not bucket.num_drafts:
        return None
    return padded(plan.logits_starts, bucket.num_requests + 1, plan.logits_indices.size)


def _slot_mapping(group: GroupPlan, bucket: Bucket) -> np.ndarray:
    """int32[bucket tokens], or none."""
    return NO_SLOTS if group.encoder_starts is not None else padded(group.slot_mapping, bucket.num_tokens, -1)


def _block_tables(group: GroupPlan, bucket: Bucket) -> np.ndarray:
    """int32[bucket requests, bucket columns], 0 beyond the plan's."""
    shape = (bucket.num_requests, bucket.num_columns)
    made = group.padded_tables
    if made is not None and made.shape == shape and not made.flags.writeable:
        return made
    num_requests, num_columns = group.block_tables.shape
    block_tables = np.zeros(shape, np.int32)
    block_tables[:num_requests, :num_columns] = group.block_tables
    block_tables.flags.writeable = False
    return block_tables


def _states(group: GroupPlan, bucket: Bucket) -> DeviceStates | None:
    if group.state_read is None or group.state_write is None or group.has_initial_state is None:
        return None
    return DeviceStates(
        read=padded(group.state_read, bucket.num_requests),
        write=padded(group.state_write.T, bucket.num_requests).T,
        has_initial=padded(group.has_initial_state, bucket.num_requests),
        checkpoint_ends=_on_the_way(group.checkpoint_ends, bucket),
        checkpoint_pages=_on_the_way(group.checkpoint_pages, bucket),
    )


def _on_the_way(values: np.ndarray | None, bucket: Bucket) -> np.ndarray | None:
    """int32[bucket requests, bucket checkpoints], 0 where the plan has none; None: the bucket has none."""
    if not bucket.num_checkpoints:
        return None
    out = np.zeros((bucket.num_requests, bucket.num_checkpoints), np.int32)
    if values is not None:
        width = min(values.shape[1], bucket.num_checkpoints)
        out[: len(values), :width] = values[:, :width]
    return out


def _compressed(plan: StepPlan, group: GroupPlan, bucket: Bucket) -> DeviceCompressed | None:
    if not group.compressed:
        return None
    slots: dict[int, Array] = {
        entries.tokens_per_state: padded(entries.slot_mapping, _most_entries(bucket, entries.tokens_per_state), -1)
        for entries in group.compressed
    }
    return DeviceCompressed(padded(plan.num_computed_tokens + plan.num_new_tokens, bucket.num_requests), slots)


def _most_entries(bucket: Bucket, tokens_per_state: int) -> int:
    """N, the most entries that a step of the bucket completes, as `compressor_update` returns them."""
    return max_new_entries(bucket.num_tokens, bucket.num_requests, tokens_per_state)
