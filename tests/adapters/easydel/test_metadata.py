"""`RaggedPagesMetadata`'s fields say to EasyDeL's kernels what the plan says to kvjax's.

EasyDeL and what it imports are not installed here, so an oracle written from the documented meaning of its
metadata takes its kernels' place: a table row per request, `context_lens` with the step's own tokens.
`scripts/stack_references.py` runs the stack's own reference.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.adapters.easydel import ragged_pages_metadata_fields, to_ragged_pages_metadata
from kvjax.core import KVCacheConfig, KVCacheManager, MambaSpec, Request, build_step_plan
from scripts.stack_checks.random_steps import BLOCK_SIZE, SM_SCALE, random_steps
from tests.adapters.oracle import attend_pages
from tests.adapters.stand_ins import stack_with


@pytest.mark.parametrize("kind", ["full", "windowed", "hybrid"])
@pytest.mark.parametrize("seed", range(2))
def test_a_kernel_that_reads_the_metadata_answers_as_kvjax(seed: int, kind: str) -> None:
    for step in random_steps(seed, kind):
        fields = ragged_pages_metadata_fields(step.plan, step.config, step.shape)[step.group_id]
        assert (fields["page_size"], fields["version"]) == (BLOCK_SIZE, "v3")
        assert fields["num_seqs"].tolist() == [step.plan.num_requests] == [fields["request_distribution"][2]]
        positions = fields["position_ids"]
        assert positions[: step.plan.num_tokens].tolist() == step.plan.positions.tolist()
        counts = -(-fields["context_lens"] // BLOCK_SIZE)
        ids = [row[:count] for row, count in zip(fields["pages_tables"], counts, strict=True)]
        out = attend_pages(
            step.q,
            step.written,
            ids,
            fields["context_lens"],
            fields["query_start_loc"],
            int(fields["num_seqs"][0]),
            sm_scale=SM_SCALE,
            window=step.window,
        )
        np.testing.assert_allclose(step.out, out, atol=1e-5, rtol=0)


def test_the_stack_s_class_gets_the_fields_by_name() -> None:
    """Through a stand-in that has the recorded fields and nothing else."""
    step = next(random_steps(0, "hybrid"))
    with stack_with("easydel"):
        made = to_ragged_pages_metadata(step.plan, step.config, step.shape, to_device=np.array)
    for one, fields in zip(made, ragged_pages_metadata_fields(step.plan, step.config, step.shape), strict=True):
        for name, value in fields.items():
            np.testing.assert_array_equal(getattr(one, name), value)


def test_groups_of_states_are_refused() -> None:
    mamba = MambaSpec(block_size=4, shapes=((2, 3),), dtypes=("float32",))
    config = KVCacheConfig.single_pool(20, mamba)
    manager = KVCacheManager(config, max_model_len=32, hash_block_size=4)
    request = Request("a", range(3))
    assert manager.allocate_slots(request, 3) is not None
    plan = build_step_plan(manager, np.array([request.row]), np.array([3]))
    with pytest.raises(NotImplementedError, match="expected a group of attention, got "):
        ragged_pages_metadata_fields(plan, config, next(random_steps(0, "full")).shape)


@pytest.mark.parametrize("kind", ["full", "windowed"])
def test_slices_of_version_2_write_what_the_slots_say(kind: str) -> None:
    """The stack's cache update copies `length` new tokens to the slots behind the first; a slice stays in its page."""
    for step in random_steps(1, kind):
        fields = ragged_pages_metadata_fields(step.plan, step.config, step.shape, num_slices_per_update=8)[0]
        assert (fields["version"], "request_distribution" in fields) == ("v2", False)
        assert fields["slot_mapping"].shape[1] % 8 == 0
        count = int(fields["num_kv_update_slices"][0])
        assert not fields["slot_mapping"][:, count:].any()
        written = {}
        for slot, token, length in fields["slot_mapping"][:, :count].T.tolist():
            assert slot // BLOCK_SIZE == (slot + length - 1) // BLOCK_SIZE
            for i in range(length):
                written[slot + i] = token + i
        slots = step.plan.groups[0].slot_mapping.tolist()
        assert written == {slot: token for token, slot in enumerate(slots) if slot >= 0}
        with stack_with("easydel"):
            (made,) = to_ragged_pages_metadata(step.plan, step.config, step.shape, num_slices_per_update=8)
        assert made.num_slices_per_kv_cache_update_page == 8
