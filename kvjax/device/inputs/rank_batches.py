"""The steps of several data ranks as one: their batches one after another, in the shapes of one bucket.

Flow:    StepPlan of each data rank + Buckets -> [batch_of_ranks] -> DeviceBatch -> jitted update step
Source:  metadata of tpu-inference, concatenated along the data axis

    leaf                                              of rank r of R
    token_ids, slot_mapping, block_tables, ...        rows r * n to (r + 1) * n of R * n
    query_start_loc, distribution, page ids, slots    the rank's own numbers, as if it were alone
    logits_indices, token_source                      rows of all tokens, since the model sees those of all ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np

from kvjax.core.step.step_plan import StepPlan
from kvjax.device.inputs.batch import DeviceBatch, DeviceGroup, longest_request, most_checkpoints, plan_sizes
from kvjax.device.inputs.buckets import Bucket, Buckets


def pick_bucket_of_ranks(plans: Sequence[StepPlan | None], buckets: Buckets) -> Bucket:
    """The smallest declared bucket that every rank's plan fits.

    Raises:
        ValueError: none fits; the message names the limits.
    """
    known = [plan for plan in plans if plan is not None]
    tokens, requests, columns, drafts = map(max, zip(*map(plan_sizes, known), strict=True))
    longest, checkpoints = max(map(longest_request, known)), max(map(most_checkpoints, known))
    return buckets.pick(tokens, requests, columns, drafts, longest, checkpoints)


def join_batches(batches: Sequence[DeviceBatch], num_previous: int) -> DeviceBatch:
    """One batch of those of all ranks, padded to one bucket; each rank sampled `num_previous` tokens a step before."""
    first, num_tokens = batches[0], batches[0].token_ids.shape[0]
    if len(batches) == 1:
        return first
    joined = jax.tree.map(lambda *leaves: np.concatenate(leaves), *batches)
    offsets = range(len(batches))
    source = [_moved(np.asarray(b.token_source), r * num_previous) for r, b in zip(offsets, batches, strict=True)]
    rows = [np.asarray(b.logits_indices) + r * num_tokens for r, b in zip(offsets, batches, strict=True)]
    groups = tuple(map(_with_reserved, joined.groups, first.groups))
    positions = np.concatenate([batch.positions for batch in batches], axis=-1)
    return replace(
        joined,
        positions=positions,
        token_source=np.concatenate(source),
        logits_indices=np.concatenate(rows).astype(np.int32),
        groups=groups,
    )


def _moved(places: np.ndarray, offset: int) -> np.ndarray:
    """int32 places moved by `offset`, -1 as it is."""
    return np.where(places >= 0, places + offset, places).astype(np.int32)


def _with_reserved(group: DeviceGroup, first: DeviceGroup) -> DeviceGroup:
    """Every rank's pages of learned sinks have the same ids."""
    return group if first.reserved_blocks is None else replace(group, reserved_blocks=first.reserved_blocks)


__all__ = ["join_batches", "pick_bucket_of_ranks"]
