"""`AttentionMetadata`'s fields say to tpu-inference's kernels what the plan says to kvjax's.

tpu-inference needs vLLM and a TPU build to import, so an oracle written from the documented meaning of its metadata
takes its kernels' place here: flat tables of S rows, lengths with the step's own tokens, K and V written by the kernel
at the last places. `scripts/stack_references.py` runs tpu-inference's own references.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvjax.adapters.padded_step import Shape
from kvjax.adapters.tpu_inference import (
    TPU_INFERENCE,
    attention_metadata_fields,
    to_attention_metadata,
    to_grouped_attention_metadata,
)
from kvjax.core import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    MambaSpec,
    Request,
    SlidingWindowSpec,
    StepPlan,
    build_step_plan,
)
from kvjax.core.step.step_plan import CompressedStates
from scripts.stack_checks.random_steps import BLOCK_SIZE, KINDS, LKV_DIM, SM_SCALE, AttendedStep, random_steps
from tests.adapters.oracle import attend_pages
from tests.adapters.stand_ins import stack_with


def oracle(step: AttendedStep, fields: dict[str, Any]) -> tuple[np.ndarray, ...]:
    """(outputs, pages after) from the metadata's documented meaning alone."""
    num_seqs = int(fields["request_distribution"][2])
    tables = fields["block_tables"].reshape(len(fields["seq_lens"]), -1)
    starts, lengths = fields["query_start_loc"], fields["seq_lens"]
    pages = tuple(array.copy() for array in step.pages)
    ids = [tables[i, : -(-int(lengths[i]) // BLOCK_SIZE)] for i in range(num_seqs)]
    for i in range(num_seqs):
        for token in range(starts[i], starts[i + 1]):
            place = lengths[i] - (starts[i + 1] - token)
            for array, new in zip(pages, step.new_kv, strict=True):
                array[tables[i, place // BLOCK_SIZE], place % BLOCK_SIZE] = new[token]
    kv = pages if len(pages) == 2 else (pages[0][:, :, None], pages[0][:, :, None, :LKV_DIM])
    out = attend_pages(step.q, kv, ids, lengths, starts, num_seqs, sm_scale=SM_SCALE, window=step.window)
    return out, *pages


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_a_kernel_that_reads_the_metadata_answers_as_kvjax(seed: int, kind: str) -> None:
    for step in random_steps(seed, kind):
        fields = attention_metadata_fields(step.plan, step.shape)[step.group_id]
        out, *pages = oracle(step, fields)
        np.testing.assert_allclose(step.out, out, atol=1e-5, rtol=0)
        for written, expected in zip(step.written, pages, strict=True):
            np.testing.assert_array_equal(written[1:], expected[1:])


def first_plan(kind: str = "hybrid") -> StepPlan:
    return next(random_steps(0, kind)).plan


def test_fields_have_the_shapes_of_the_bucket() -> None:
    plan = first_plan()
    shape = Shape(num_tokens=64, num_requests=6, num_columns=9)
    for fields in attention_metadata_fields(plan, shape):
        sizes = {name: value.shape for name, value in fields.items() if isinstance(value, np.ndarray)}
        assert sizes == {
            "input_positions": (64,),
            "block_tables": (54,),
            "seq_lens": (6,),
            "query_start_loc": (7,),
            "request_distribution": (3,),
        }
        assert {value.dtype for value in fields.values() if isinstance(value, np.ndarray)} == {np.dtype(np.int32)}
        assert fields["query_start_loc"][plan.num_requests :].tolist() == [plan.num_tokens] * (7 - plan.num_requests)
        assert not fields["seq_lens"][plan.num_requests :].any()


@pytest.mark.parametrize(
    ("shape", "told"),
    [
        (Shape(1, 5, 8), "tokens, got 1"),
        (Shape(32, 1, 8), "requests, got 1"),
        (Shape(32, 5, 1), "table columns, got 1"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(shape: Shape, told: str) -> None:
    steps = list(random_steps(3, "full"))
    with pytest.raises(ValueError, match=rf"expected a shape of at least \d+ {told}"):
        attention_metadata_fields(steps[-1].plan, shape)


def test_compressed_states_are_refused() -> None:
    plan = first_plan("full")
    compressed = (CompressedStates(4, plan.groups[0].seq_lens, plan.groups[0].slot_mapping),)
    with pytest.raises(NotImplementedError, match="full_attention group with compressed states"):
        attention_metadata_fields(
            replace(plan, groups=(replace(plan.groups[0], compressed=compressed),)), Shape(32, 5, 8)
        )


def recurrent_plan(num_computed: int) -> StepPlan:
    """The next token of a request of 9, with attention and states."""
    spec = MambaSpec(block_size=4, shapes=((2, 3),), dtypes=("float32",))
    attention = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float32")
    manager = KVCacheManager(KVCacheConfig.single_pool(20, attention, spec), max_model_len=32, hash_block_size=4)
    request = Request("a", range(9))
    for done, count in ((0, num_computed), (num_computed, 1)):
        request.num_computed_tokens = done
        if count:
            assert manager.allocate_slots(request, count) is not None
    return build_step_plan(manager, np.array([request.row]), np.array([1]))


def test_a_state_that_stays_in_its_page_is_a_slot_of_the_request() -> None:
    plan = recurrent_plan(5)
    attention, mamba = attention_metadata_fields(plan, Shape(4, 2, 4))
    assert attention["mamba_state_indices"] is None
    assert mamba["mamba_state_indices"].tolist() == [plan.groups[1].state_write[0], 0]


def test_a_state_that_moves_to_another_page_is_refused() -> None:
    plan = recurrent_plan(5)
    mamba = plan.groups[1]
    assert mamba.state_write is not None
    moved = replace(mamba, state_read=mamba.state_write + 1)
    with pytest.raises(NotImplementedError, match=r"reads its state in page \d+ and leaves it in page \d+"):
        attention_metadata_fields(replace(plan, groups=(plan.groups[0], moved)), Shape(4, 2, 4))


def test_the_stack_s_classes_get_the_fields_by_name() -> None:
    """Of every recorded version, through stand-ins that have its fields and nothing else."""
    step = next(random_steps(0, "hybrid"))
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 4, "dtype": "float32"}
    specs = (FullAttentionSpec(**sizes), SlidingWindowSpec(**sizes, sliding_window=6))
    config = replace(KVCacheConfig.single_pool(9, *specs), shared_layers=(("layers.2", "layers.1"),))
    for version in range(2):
        with stack_with("tpu_inference", version):
            metadata = to_attention_metadata(step.plan, step.shape)
            for fields, made in zip(attention_metadata_fields(step.plan, step.shape), metadata, strict=True):
                for name, value in fields.items():
                    np.testing.assert_array_equal(getattr(made, name), value)
                assert made.pcp is None
            grouped = to_grouped_attention_metadata(step.plan, config, step.shape)
            assert grouped.given["layer_names_per_group"] == (("layers.0",), ("layers.1", "layers.2"))


def test_the_recorded_versions_are_told() -> None:
    assert TPU_INFERENCE.versions == "0.32.0 or main-b8692ff"
