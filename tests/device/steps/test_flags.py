"""The update step under every flag of jax that an application may set: the same outputs, and as many programs."""

from __future__ import annotations

from typing import Any

import chex
import jax
import numpy as np
import pytest

from kvjax.device import Bucket, Buckets, KVPages, UpdateStep, create_pages, make_update_step
from kvjax.device.pages.page_ops import gather_pages, scatter_pages
from tests.device.programs.test_step_cuts import Serving
from tests.device.toy import VOCAB, ToyHost, ToyModel, sample, toy_config
from tests.flags import FLAGS, ROUNDS_ELSEWHERE

BUCKETS = Buckets((Bucket(4, 4, 8), Bucket(16, 4, 8)), page_counts=(2,))
CLOSE = {"rtol": 1e-4, "atol": 3e-5}

every_flag = pytest.mark.parametrize("flag", FLAGS)


def toy_step(model: ToyModel) -> UpdateStep:
    return make_update_step(model, toy_config(), BUCKETS, sample_fn=sample, return_logits=True)


def serve(step: UpdateStep, pages: KVPages) -> list[Any]:
    """A prompt, then decoding, after warm-up; pages gathered and scattered at the end."""
    pages = step.warmup(pages, sampling={"offset": np.zeros(1, np.int32)})
    host, kept = ToyHost(toy_config()), []
    host.add(0, np.random.default_rng(0).integers(0, VOCAB, 12).astype(np.int32))
    previous = None
    for count in (10, 1, 1):
        plan = host.plan([0], [count])
        output = step(pages, plan, previous=previous, sampling={"offset": np.full(1, 3, np.int32)})
        pages, previous = output.pages, output.sampled
        kept.append(output._replace(pages=None))
    copied = gather_pages(pages, 0, np.array([1, 2], np.int64), (2,))
    pages = scatter_pages(pages, 0, np.array([8, 9], np.int64), copied, (2,))
    return jax.device_get([kept, pages.pools])


def assert_same(got: Any, expected: Any, flag: str) -> None:
    chex.assert_trees_all_equal_shapes_and_dtypes(got, expected)
    if flag in ROUNDS_ELSEWHERE:
        chex.assert_trees_all_close(got, expected, **CLOSE)
    else:
        chex.assert_trees_all_equal(got, expected, strict=True)


@pytest.fixture(scope="module")
def toy() -> tuple[ToyModel, list[Any], int]:
    """A model, and what its steps give without a flag, of how many programs."""
    model = ToyModel()
    step = toy_step(model)
    return model, serve(step, create_pages(toy_config())), step.num_compiled


@every_flag
@pytest.mark.parametrize("is_made_before", [True, False])
def test_a_step_computes_the_same(toy: tuple[ToyModel, list[Any], int], flag: str, is_made_before: bool) -> None:
    """Whether the flag was set when step and pages were made, or later; warm-up compiles all that there is."""
    model, expected, num_compiled = toy
    made = (toy_step(model), create_pages(toy_config())) if is_made_before else None
    with FLAGS[flag]():
        step, pages = made or (toy_step(model), create_pages(toy_config()))
        got = serve(step, pages)
    assert_same(got, expected, flag)
    if flag != "jax_disable_jit":
        assert step.num_compiled == num_compiled


COUNTS = [[7, 3], [1, 1]]  # tokens of two requests, step by step


@pytest.fixture(scope="module")
def chained() -> tuple[Serving, list[np.ndarray]]:
    """A step that is a chain of programs, and what it gives without a flag."""
    serving = Serving(12, cut_layers=True)
    return serving, serving.run(COUNTS, seed=0)


@every_flag
@pytest.mark.parametrize("has_run", [pytest.param(False, marks=pytest.mark.sweep), True])
def test_a_chain_of_programs_computes_the_same(
    chained: tuple[Serving, list[np.ndarray]], flag: str, has_run: bool
) -> None:
    """Its pieces were cut and compiled before the flag was set, or not."""
    serving, expected = chained
    serving = serving if has_run else Serving(12, cut_layers=True)
    with FLAGS[flag]():
        assert_same(serving.run(COUNTS, seed=0), expected, flag)
