"""`FlashAttentionMetadata`'s fields say to sglang-jax's kernels what the plan says to kvjax's.

sglang-jax and what it imports are not installed here, so an oracle written from the documented meaning of its
metadata takes its kernels' place: pages of all sequences packed, those of one from `cu_kv_lens` on in whole pages, K
and V in their pages before attention.
`scripts/stack_references.py` runs the stack's own reference.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvjax.adapters.sglang_jax import flash_attention_metadata_fields, to_flash_attention_metadata
from kvjax.core import KVCacheConfig
from scripts.stack_checks.random_steps import BLOCK_SIZE, SM_SCALE, random_steps
from tests.adapters.oracle import attend_pages
from tests.adapters.stand_ins import stack_with


@pytest.mark.parametrize("kind", ["full", "windowed", "hybrid"])
@pytest.mark.parametrize("seed", range(2))
def test_a_kernel_that_reads_the_metadata_answers_as_kvjax(seed: int, kind: str) -> None:
    for step in random_steps(seed, kind):
        fields = flash_attention_metadata_fields(step.plan, step.config, step.shape)
        pages = fields["page_indices" if step.group_id == 0 else "swa_page_indices"]
        bounds = fields["cu_kv_lens"] // BLOCK_SIZE
        ids = [pages[bounds[i] : bounds[i + 1]] for i in range(len(bounds) - 1)]
        assert not pages[bounds[-1] :].any()
        assert fields["custom_mask"] is None
        out = attend_pages(
            step.q,
            step.written,
            ids,
            fields["seq_lens"],
            fields["cu_q_lens"],
            int(fields["distribution"][2]),
            sm_scale=SM_SCALE,
            window=step.window,
        )
        np.testing.assert_allclose(step.out, out, atol=1e-5, rtol=0)


def test_the_stack_s_class_gets_the_fields_by_name() -> None:
    """Through a stand-in that has the recorded fields and nothing else."""
    step = next(random_steps(0, "hybrid"))
    with stack_with("sglang_jax"):
        made = to_flash_attention_metadata(step.plan, step.config, step.shape, to_device=np.array)
    for name, value in flash_attention_metadata_fields(step.plan, step.config, step.shape).items():
        np.testing.assert_array_equal(getattr(made, name), value)


def test_groups_that_the_stack_has_no_room_for_are_refused() -> None:
    step = next(random_steps(0, "hybrid"))
    plan, spec = step.plan, step.config.kv_cache_groups[0].kv_cache_spec
    both = replace(plan, groups=(plan.groups[0], plan.groups[0]))
    with pytest.raises(NotImplementedError, match=r"got \['full_attention', 'full_attention'\]"):
        flash_attention_metadata_fields(both, step.config, step.shape)
    sizes = KVCacheConfig.single_pool(9, spec, replace(step.config.kv_cache_groups[1].kv_cache_spec, block_size=8))
    with pytest.raises(NotImplementedError, match=r"expected one page size of both groups, got \[4, 8\]"):
        flash_attention_metadata_fields(plan, sizes, step.shape)
