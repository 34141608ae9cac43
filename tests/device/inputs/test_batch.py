"""A batch is its plan, padded so that the padding does nothing, in arrays that nobody else has."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from kvjax.core import KVCacheManager, Request, StepDrafts
from kvjax.core.kinds.mla import MLAAttentionSpec
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec
from kvjax.core.step.step_builder import build_step_plan
from kvjax.core.step.step_plan import StepPlan
from kvjax.device import Bucket, Buckets, DeviceBatch
from kvjax.device.inputs.batch import padded, plan_sizes
from pallas_kernels.compressor_update import max_new_entries
from tests.device.toy import ToyHost, toy_config

BUCKET = Bucket(16, 4, 6)


def mixed_plan() -> StepPlan:
    host = ToyHost(toy_config())
    for row, length in enumerate([9, 5]):
        host.add(row, np.arange(1, length + 1))
    host.request_table.num_computed_tokens[1] = 4
    return host.plan([0, 1], [9, 1])


def test_padding_does_nothing() -> None:
    plan = mixed_plan()
    batch = DeviceBatch.from_plan(plan, BUCKET)
    assert batch.token_ids.tolist() == [5, *range(1, 10), *[0] * 6]
    assert batch.positions.tolist() == [4, *range(9), *[0] * 6]
    assert batch.token_source.tolist() == [-1] * 16
    assert batch.query_start_loc.tolist() == [0, 1, 10, 10, 10]
    assert batch.distribution.tolist() == [1, 1, 2]
    assert batch.logits_indices.tolist() == [0, 9, 0, 0]
    for group, planned in zip(batch.groups, plan.groups, strict=True):
        assert group.seq_lens.tolist() == [5, 9, 0, 0]
        assert group.slot_mapping.tolist() == [*planned.slot_mapping, *[-1] * 6]
        assert group.block_tables[:2, :3].tolist() == planned.block_tables.tolist()
        assert group.block_tables.sum() == planned.block_tables.sum()


def test_rows_of_logits_are_padded_to_those_of_all_drafts() -> None:
    host = ToyHost(toy_config())
    for row, length in enumerate([9, 5]):
        host.add(row, np.arange(1, length + 1))
    host.request_table.num_computed_tokens[:2] = 8, 4
    plan = host.plan([0, 1], [3, 2], drafts=StepDrafts(np.array([2, 1]), np.array([[30, 29], [28, 0]])))
    batch = DeviceBatch.from_plan(plan, Bucket(16, 4, 6, num_drafts=2))
    assert batch.token_ids.tolist() == [9, 30, 29, 5, 28, *[0] * 11]
    assert batch.logits_indices.tolist() == [0, 1, 2, 3, 4, *[0] * 7]
    assert batch.logits_starts.tolist() == [0, 3, 5, 5, 5]
    assert DeviceBatch.from_plan(mixed_plan(), Bucket(16, 4, 6, num_drafts=2)).logits_starts.tolist() == [0, 1, 2, 2, 2]
    assert DeviceBatch.from_plan(mixed_plan(), BUCKET).logits_starts is None
    with pytest.raises(ValueError, match=r"a step of \(5, 2, 3, 2\) .* does not fit Bucket"):
        DeviceBatch.from_plan(plan, Bucket(16, 4, 6, num_drafts=1))


def test_an_index_of_vectors_is_padded_with_tokens() -> None:
    index = np.array([-1, 3, -1, -1, 0, -1, -1, -1, -1, 7])
    assert DeviceBatch.from_plan(mixed_plan(), BUCKET, index).embed_index.tolist() == [*index, *[-1] * 6]
    assert DeviceBatch.from_plan(mixed_plan(), BUCKET).embed_index is None
    assert DeviceBatch.empty(BUCKET, 1, embeds=True).embed_index.tolist() == [-1] * 16
    assert DeviceBatch.empty(BUCKET, 2, encoder=[1]).groups[1].slot_mapping.size == 0


def test_all_arrays_are_fresh_and_int32_even_where_nothing_is_padded() -> None:
    plan = mixed_plan()
    batch = DeviceBatch.from_plan(plan, Bucket(*plan_sizes(plan)))
    leaves = jax.tree.leaves(batch)
    planned = [plan.token_ids, plan.positions, plan.token_source, plan.query_start_loc, plan.distribution]
    planned += [plan.logits_indices, *(x for g in plan.groups for x in (g.block_tables, g.seq_lens, g.slot_mapping))]
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.int32)}
    assert not any(np.shares_memory(leaf, array) for leaf in leaves for array in planned)


def test_tables_that_the_plan_made_in_the_buckets_shape_are_passed_on() -> None:
    host = ToyHost(toy_config())
    for row, length in enumerate([9, 5]):
        host.add(row, np.arange(1, length + 1))
    plan = host.plan([0, 1], [9, 5], pick_shape=Buckets((BUCKET,)).pick)
    batch = DeviceBatch.from_plan(plan, BUCKET)
    without = replace(plan, groups=tuple(replace(group, padded_tables=None) for group in plan.groups))
    jax.tree.map(np.testing.assert_array_equal, batch, DeviceBatch.from_plan(without, BUCKET))
    assert all(b.block_tables is g.padded_tables for b, g in zip(batch.groups, plan.groups, strict=True))
    assert not any(group.block_tables.flags.writeable for group in batch.groups)
    larger = Bucket(16, 8, 6)
    jax.tree.map(
        np.testing.assert_array_equal, DeviceBatch.from_plan(plan, larger), DeviceBatch.from_plan(without, larger)
    )


def test_tables_of_a_step_of_drafts_have_the_shape_of_a_bucket_of_decoding() -> None:
    host = ToyHost(toy_config())
    for row, length in enumerate([9, 5]):
        host.add(row, np.arange(1, length + 1))
    host.request_table.num_computed_tokens[:2] = 8, 4
    decode, mixed = Bucket(9, 3, 5, num_drafts=2, is_mixed=False), Bucket(8, 4, 6, num_drafts=2)
    drafts = StepDrafts(np.array([2, 2]), np.array([[30, 29], [28, 27]]))
    plan = host.plan([0, 1], [3, 3], drafts=drafts, pick_shape=Buckets((decode, mixed)).pick)
    assert {group.padded_tables.shape for group in plan.groups} == {(decode.num_requests, decode.num_columns)}


def test_an_empty_batch_has_the_shapes_of_a_full_one() -> None:
    batch, empty = DeviceBatch.from_plan(mixed_plan(), BUCKET), DeviceBatch.empty(BUCKET, 2)
    assert jax.tree.map(np.shape, batch) == jax.tree.map(np.shape, empty)
    assert empty.distribution.tolist() == [0, 0, 0]
    assert all((group.slot_mapping == -1).all() for group in empty.groups)


def test_entries_of_several_tokens_have_slots_of_their_own() -> None:
    """As many as a step of the bucket may complete; lengths beside them are those of tokens."""
    specs = [MLAAttentionSpec(block_size=8, head_size=4, dtype="float32", tokens_per_state=r) for r in (2, 4)]
    mixed = KVCacheGroupSpec(("a", "b"), specs[0], layer_specs=tuple(specs))
    config = KVCacheConfig((KVCachePoolSpec(20),), (KVCacheGroupSpec(("c",), specs[0]), mixed))
    manager = KVCacheManager(config, 32, 8)
    requests = [Request(name, range(length)) for name, length in (("r", 7), ("s", 3))]
    for request in requests:
        manager.allocate_slots(request, request.num_tokens)
    plan = build_step_plan(manager, np.array([r.row for r in requests]), np.array([7, 3]))
    batch = DeviceBatch.from_plan(plan, BUCKET)
    of_both = [group.compressed for group in batch.groups]
    assert [sorted(compressed.slot_mappings) for compressed in of_both] == [[2], [2, 4]]
    for group, compressed in zip(plan.groups, of_both, strict=True):
        assert compressed.seq_lens.tolist() == [7, 3, 0, 0]
        for planned in group.compressed:
            slots = compressed.slot_mappings[planned.tokens_per_state]
            room = max_new_entries(BUCKET.num_tokens, BUCKET.num_requests, planned.tokens_per_state)
            assert slots.tolist() == [*planned.slot_mapping, *[-1] * (room - planned.slot_mapping.size)]
    empty = DeviceBatch.empty(BUCKET, 2, compressed={0: {2}, 1: {4, 2}})
    assert jax.tree.map(np.shape, batch) == jax.tree.map(np.shape, empty)
    assert all((slots == -1).all() for group in empty.groups for slots in group.compressed.slot_mappings.values())


def test_pages_of_states_are_padded_with_requests_that_have_none() -> None:
    """One to write a request, or one for each draft, too; as an empty batch has them."""
    plan = mixed_plan()
    for write, num_drafts in ((np.array([3, 4]), 0), (np.array([[0, 3], [4, 5]]), 1)):
        states = {"state_read": np.array([1, 2]), "state_write": write, "has_initial_state": np.array([True, False])}
        groups = tuple(replace(group, **states) for group in plan.groups)
        batch = DeviceBatch.from_plan(replace(plan, groups=groups), BUCKET)
        (found, *_), none = (group.states for group in batch.groups), [0] * (1 + num_drafts) if num_drafts else 0
        assert found is not None
        assert found.read.tolist() == [1, 2, 0, 0]
        assert found.write.tolist() == [*write.tolist(), none, none]
        assert found.has_initial.tolist() == [True, False, False, False]
        empty = DeviceBatch.empty(BUCKET, len(groups), recurrent=dict.fromkeys(range(len(groups)), num_drafts))
        assert jax.tree.map(np.shape, empty) == jax.tree.map(np.shape, batch)


def test_positions_of_three_axes_are_padded_along_tokens() -> None:
    assert padded(np.ones((3, 5), np.int64), 8).sum(axis=1).tolist() == [5, 5, 5]
    assert DeviceBatch.empty(BUCKET, 1, mrope=True).positions.shape == (3, 16)


@pytest.mark.parametrize("bucket", [Bucket(9, 4, 6), Bucket(16, 1, 6), Bucket(16, 4, 2)], ids=str)
def test_refuses_a_bucket_that_is_too_small(bucket: Bucket) -> None:
    step = r"a step of \(10, 2, 3, 0\) \(tokens, requests, columns, drafts\) and 9 tokens of a request"
    with pytest.raises(ValueError, match=f"{step} does not fit Bucket"):
        DeviceBatch.from_plan(mixed_plan(), bucket)
