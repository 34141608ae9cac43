"""`PageBatchInfo`'s fields say to levanter's attention what the plan says to kvjax's.

levanter and what it imports are not installed here, so an oracle written from the documented meaning of its
metadata takes its kernels' place: -1 where nothing is, `new_token_dests` the slot of each token, a
table row per sequence.
`scripts/stack_references.py` runs the stack's own reference.
"""

from __future__ import annotations

import sys
from types import ModuleType

import numpy as np
import pytest

from kvjax.adapters.levanter import page_batch_info_fields, to_page_batch_info
from kvjax.core import KVCacheConfig, KVCacheManager, MambaSpec, Request, build_step_plan
from scripts.stack_checks.random_steps import BLOCK_SIZE, SM_SCALE, random_steps
from tests.adapters.oracle import attend_pages
from tests.adapters.stand_ins import stack_with


@pytest.mark.parametrize("kind", ["full", "windowed", "hybrid"])
@pytest.mark.parametrize("seed", range(2))
def test_a_kernel_that_reads_the_metadata_answers_as_kvjax(seed: int, kind: str) -> None:
    for step in random_steps(seed, kind):
        fields = page_batch_info_fields(step.plan, step.config, step.shape)[step.group_id]
        num_seqs = int(fields["num_seqs"])
        assert fields["slot_ids"][:num_seqs].tolist() == step.plan.rows.tolist()
        assert (fields["slot_ids"][num_seqs:] == -1).all()
        assert (fields["seq_lens"][num_seqs:] == -1).all()
        assert (fields["page_indices"] != 0).all()
        counts = -(-fields["seq_lens"] // fields["page_size"])
        ids = [row[:count] for row, count in zip(fields["page_indices"], counts, strict=True)]
        pages = tuple(array.copy() for array in step.pages)
        for token, slot in enumerate(fields["new_token_dests"]):
            for array, new in zip(pages, step.new_kv, strict=True):
                if slot >= 0:
                    array[slot // BLOCK_SIZE, slot % BLOCK_SIZE] = new[token]
        for written, expected in zip(step.written, pages, strict=True):
            np.testing.assert_array_equal(written, expected)
        out = attend_pages(
            step.q,
            step.written,
            ids,
            fields["seq_lens"],
            fields["cu_q_lens"],
            num_seqs,
            sm_scale=SM_SCALE,
            window=step.window,
        )
        np.testing.assert_allclose(step.out, out, atol=1e-5, rtol=0)


def test_the_stack_s_class_gets_arrays_with_named_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through stand-ins: a class that has the recorded fields, and haliax as a function that keeps the names."""
    haliax = ModuleType("haliax")
    haliax.named = lambda array, axes: (array, axes)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "haliax", haliax)
    step = next(random_steps(0, "hybrid"))
    with stack_with("levanter"):
        made = to_page_batch_info(step.plan, step.config, step.shape)
    for one, fields in zip(made, page_batch_info_fields(step.plan, step.config, step.shape), strict=True):
        assert one.page_indices[1] == ("seq", "page")
        assert one.new_token_dests[1] == ("position",)
        np.testing.assert_array_equal(one.page_indices[0], fields["page_indices"])
        assert int(one.num_seqs) == fields["num_seqs"]
        assert one.page_size == BLOCK_SIZE


def test_groups_of_states_are_refused() -> None:
    mamba = MambaSpec(block_size=4, shapes=((2, 3),), dtypes=("float32",))
    config = KVCacheConfig.single_pool(20, mamba)
    manager = KVCacheManager(config, max_model_len=32, hash_block_size=4)
    request = Request("a", range(3))
    assert manager.allocate_slots(request, 3) is not None
    plan = build_step_plan(manager, np.array([request.row]), np.array([3]))
    with pytest.raises(NotImplementedError, match="expected a group of attention, got "):
        page_batch_info_fields(plan, config, next(random_steps(0, "full")).shape)
