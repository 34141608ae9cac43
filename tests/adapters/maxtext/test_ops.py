"""The op answers MaxText's call as kvjax answers the plan, and has the recorded signature."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.adapters.maxtext import sharded_ragged_paged_attention
from kvjax.adapters.signatures import parameters_of, recorded
from kvjax.adapters.tpu_inference import RPAv3Layout, attention_metadata_fields
from scripts.stack_checks.random_steps import BLOCK_SIZE, KV_HEADS, SM_SCALE, AttendedStep, random_steps

OP = jax.jit(
    partial(sharded_ragged_paged_attention, None),
    static_argnames=("sm_scale", "attention_chunk_size", "update_kv_cache"),
)


def arguments(step: AttendedStep, pages: tuple[np.ndarray, ...]) -> tuple[RPAv3Layout, list[Any]]:
    """What `forward_serve_vllm` passes, up to the sinks."""
    layout = RPAv3Layout(BLOCK_SIZE, "float32", KV_HEADS, step.q.shape[-1])
    metadata = SimpleNamespace(**attention_metadata_fields(step.plan, step.shape)[step.group_id])
    cache = layout.pack(*map(jnp.asarray, pages))
    numbers = (metadata.seq_lens, metadata.block_tables, metadata.query_start_loc, metadata.request_distribution)
    return layout, [*map(jnp.asarray, (step.q, *step.new_kv)), cache, *map(jnp.asarray, numbers), None]


@pytest.mark.parametrize("kind", ["full", "hybrid"])
def test_the_op_answers_as_kvjax(kind: str) -> None:
    for step in random_steps(5, kind):
        layout, given = arguments(step, step.pages)
        out, cache = OP(*given, sm_scale=SM_SCALE, attention_chunk_size=step.window)
        np.testing.assert_allclose(out[: step.plan.num_tokens], step.out, atol=1e-5, rtol=0)
        assert not np.asarray(out[step.plan.num_tokens :]).any()
        for written, expected in zip(layout.unpack(cache), step.written, strict=True):
            np.testing.assert_array_equal(written[1:], expected[1:])


def test_a_layer_that_shares_pages_reads_them_and_writes_nothing() -> None:
    step = list(random_steps(5, "full"))[-1]
    _, given = arguments(step, step.written)
    given[1] = given[2] = jnp.full_like(given[1], jnp.nan)
    out, cache = OP(*given, sm_scale=SM_SCALE, update_kv_cache=False)
    np.testing.assert_allclose(out[: step.plan.num_tokens], step.out, atol=1e-5, rtol=0)
    np.testing.assert_array_equal(cache, given[3])


def test_the_signature_is_a_recorded_one() -> None:
    ours = parameters_of(sharded_ragged_paged_attention)
    theirs = [v["objects"]["sharded_ragged_paged_attention"]["parameters"] for v in recorded("tpu_inference")]
    assert ours in theirs
    assert all(ours[: len(names)] == names for names in theirs)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "scale": ({"k_scale": 0.5}, "expected k_scale=None, got 0.5"),
    "queries": ({"decode_query_size": 2}, "expected one query of a decoding request, got 2"),
    "mesh": ({"mesh": SimpleNamespace(size=4)}, "expected a mesh of one device, got 4"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_op_cannot_do_is_refused(name: str) -> None:
    step = next(random_steps(5, "full"))
    options, told = REFUSED[name]
    options = {"mesh": None, **options}
    with pytest.raises(NotImplementedError, match=told):
        sharded_ragged_paged_attention(options.pop("mesh"), *arguments(step, step.pages)[1], SM_SCALE, **options)


def test_a_head_of_8_bits_lies_in_padded_words() -> None:
    """tpu-inference pads one int8 head to whole words: the op writes and reads it as the same numbers in float32."""
    rng, new, results = np.random.default_rng(0), 3, []
    q, k, v = (rng.integers(-3, 4, (new, heads, 32)).astype(np.float32) for heads in (4, 1, 1))
    old = [rng.integers(-3, 4, (3, 8, 1, 32)) for _ in range(2)]
    step = [jnp.array(x, jnp.int32) for x in ([6], [2, 1], [0, new], [0, 0, 1])]
    for dtype in ("float32", "int8"):
        layout = RPAv3Layout(8, dtype, 1, 32)
        cache = layout.pack(*(jnp.asarray(x, dtype) for x in old))
        out, cache = OP(*map(jnp.asarray, (q, k, v)), cache, *step, jnp.ones(4), sm_scale=SM_SCALE)
        results.append((out, *(x.astype(jnp.float32) for x in layout.unpack(cache))))
        np.testing.assert_array_equal(results[-1][1][2, 3:6], k)
    for exact, short in zip(*results, strict=True):
        np.testing.assert_allclose(short, exact, atol=1e-5, rtol=0)
