"""page_ops: null pages, runs of pages and their semaphore, empty lists, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.interpret.on_tpu import compile_on_tpu
from pallas_kernels.page_ops import copy_pages, gather_pages, kernel_tpu, scatter_pages, zero_pages
from pallas_kernels.tpu.dma_runs import copy_all, copy_runs


def all_four(backend: str) -> Callable[..., tuple[jax.Array, ...]]:
    def run(pages: jax.Array, sources: jax.Array, targets: jax.Array, values: jax.Array) -> tuple[jax.Array, ...]:
        return (
            copy_pages(pages, sources, targets, backend=backend),
            zero_pages(pages, targets, backend=backend),
            gather_pages(pages, sources, backend=backend),
            scatter_pages(pages, targets, values, backend=backend),
        )

    return run


def test_what_stands_in_page_0_does_not_spread() -> None:
    """A stray write into the null page poisons no page that is set to zero afterwards."""
    for shape, dtype in (((4, 2, 2, 128), "bfloat16"), ((6, 512, 128), "float32")):  # one part a page, and several
        pages = jnp.full((5, *shape), jnp.nan, dtype)
        run = compile_on_tpu(lambda pages, ids: zero_pages(pages, ids, backend="tpu"), pages, ids(1, 3, -1, 0))
        got = run(pages, ids(1, 3, -1, 0)).astype(np.float32)
        assert (got[[1, 3]] == 0).all()
        assert np.isnan(got[[0, 2, 4]]).all()


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 300])
def test_a_semaphore_counts_few_runs_at_a_time(count: int) -> None:
    """Never more runs under way than may be; every run is started once, and waited for after that."""
    events: list[tuple[str, int]] = []

    class Copy:
        def __init__(self, source: jax.Array, target: jax.Array, length: jax.Array) -> None:
            self.run = (int(source), int(target), int(length))

        def start(self) -> None:
            events.append(("start", self.run[0]))

        def wait(self) -> None:
            events.append(("wait", self.run[0]))

    rows = np.arange(count + 3)
    table = np.concatenate([rows * 2, rows * 3, np.ones_like(rows), [count]]).astype(np.int32)
    with jax.disable_jit():
        copy_all(jnp.asarray(table), Copy)
    started = [run for what, run in events if what == "start"]
    assert started == [run for what, run in events if what == "wait"] == [2 * i for i in range(count)]
    under_way = np.cumsum([1 if what == "start" else -1 for what, _ in events])
    assert under_way.max(initial=0) <= 64
    assert under_way.min(initial=0) >= 0


def test_a_run_of_pages_has_a_largest_size() -> None:
    """Neighbouring pages beyond 16 MiB go in several DMAs: no copy outgrows a semaphore's 32 bits."""
    pages = jnp.zeros((20, 1 << 13, 128), jnp.float32)  # 4 MiB each
    assert kernel_tpu._longest_run(pages) == 4
    targets = jnp.arange(1, 17, dtype=jnp.int32)
    table = np.asarray(copy_runs(targets >= 1, targets, targets, 4))
    assert table[2 * 16 : 3 * 16].max() == 4


def test_no_pages() -> None:
    """Empty lists of ids."""
    pages, none = jnp.ones((3, 8, 128)), jnp.zeros(0, jnp.int32)
    for backend in ("reference", "tpu"):
        assert gather_pages(pages, none, backend=backend).shape == (0, 8, 128)
        chex.assert_trees_all_equal(
            pages,
            copy_pages(pages, none, none, backend=backend),
            zero_pages(pages, none, backend=backend),
            scatter_pages(pages, none, jnp.zeros((0, 8, 128)), backend=backend),
            strict=True,
        )


def ids(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


PAGES = jnp.zeros((5, 2, 3))
BAD: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "pages": (zero_pages, (jnp.zeros(5), ids(1)), r"zero_pages: expected pages \[num_pages, \*page_shape\], got"),
    "ids": (gather_pages, (PAGES, jnp.zeros((1, 1), jnp.int32)), r"gather_pages: expected page_ids \[n\] of shape"),
    "dtype": (gather_pages, (PAGES, jnp.zeros(2, jnp.uint32)), "expected page_ids of dtype int32, got uint32"),
    "high": (zero_pages, (PAGES, ids(1, 5)), r"expected page_ids in \[-1, 5\), got 1 ... 5"),
    "low": (zero_pages, (PAGES, ids(-2, 1)), r"expected page_ids in \[-1, 5\), got -2 ... 1"),
    "sources": (copy_pages, (PAGES, ids(9), ids(1)), r"copy_pages: expected sources in \[-1, 5\), got 9 ... 9"),
    "lengths": (copy_pages, (PAGES, ids(1, 2), ids(3)), "expected as many sources as destinations, got 2 and 1"),
    "twice": (copy_pages, (PAGES, ids(1, 2), ids(3, 3)), r"expected distinct destinations, got \[3\] more than once"),
    "both": (
        copy_pages,
        (PAGES, ids(1, 2), ids(3, 1)),
        r"expected destinations that are no sources, got \[1\] as both",
    ),
    "values": (scatter_pages, (PAGES, ids(1), jnp.zeros((2, 2, 3))), r"expected values \[n, \*page_shape\] of shape"),
    "values' dtype": (
        scatter_pages,
        (PAGES, ids(1), jnp.zeros((1, 2, 3), jnp.bfloat16)),
        "expected values of the pages' dtype float32, got bfloat16",
    ),
    "scattered twice": (scatter_pages, (PAGES, ids(1, 1), jnp.zeros((2, 2, 3))), "expected distinct page_ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    function, arguments, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        function(*arguments)


NOT_ON_TPU = {
    "flat": (jnp.zeros((5, 128)), 1, "move pages of at least two dimensions, got 1"),
    "float16": (jnp.zeros((5, 8, 128), jnp.float16), 1, "TPU has no float16 pages"),
    "many": (PAGES, 32769, "move up to 32768 pages a call, got 32769"),
}


@pytest.mark.parametrize("name", NOT_ON_TPU)
def test_what_the_kernels_cannot_do(name: str) -> None:
    pages, count, message = NOT_ON_TPU[name]
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda ids: gather_pages(pages, ids, backend="tpu"), jax.ShapeDtypeStruct((count,), jnp.int32))


@pytest.mark.parametrize(("last", "is_kernel"), [(128, True), (256, True), (3, False), (16, False)])
def test_pages_of_part_lanes_are_left_to_xla(last: int, is_kernel: bool) -> None:
    """It lays them out with another dimension last; a kernel would have the pool copied to its layout and back."""
    pages, ids = jnp.zeros((13, 16, last), jnp.bfloat16), jnp.arange(1, 3, dtype=jnp.int32)
    jaxpr = str(jax.make_jaxpr(all_four("tpu"))(pages, ids, ids + 4, pages[:2]))
    assert jaxpr.count("pallas_call") == 4 * is_kernel
