"""pallas_kernels.gpu.mosaic: the card's multiprocessors, and grids that CUDA does not take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.merge import merge_pieces


def test_work_is_shared_by_the_multiprocessors_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 PCIe has 114; without a card kernels are compiled for those of an H100 SXM."""
    assert mosaic.num_sms() == mosaic.NUM_SMS == 132
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(core_count=114)])
    assert mosaic.num_sms() == 114


def test_a_merge_takes_more_units_than_a_cuda_grid_has_rows() -> None:
    """8,192 sequences of 8 KV heads are 65,536 units: an axis of blocks that must be the grid's x."""
    num_units, pieces, group, dim = 65_536, 65_537, 2, 128
    arguments = (
        (jnp.float32, (pieces, 8, dim)),
        (jnp.float32, (pieces, 8)),
        (jnp.int32, (num_units, 2)),
        (jnp.float32, (8 * group,)),
        (jnp.float32, (8,)),
    )

    def merge(out: Any, lse: Any, *rest: Any) -> Any:
        return merge_pieces((out, lse), *rest, dim, jnp.bfloat16)

    shapes = jax.eval_shape(merge, *(jax.ShapeDtypeStruct(shape, dtype) for dtype, shape in arguments))
    assert [x.shape for x in shapes] == [(num_units // 8, 8 * group, dim), (num_units // 8, 8 * group)]


def test_a_grid_that_cuda_does_not_take_is_refused() -> None:
    grid = {"rows": 65_536, "columns": 2}
    with pytest.raises(NotImplementedError, match="expected a grid of at most 65,535 along 'rows', got 65,536"):
        mosaic.kernel(lambda *refs: None, name="x", outputs=[], grid=grid)
    with pytest.raises(NotImplementedError, match="x: expected a grid"):
        mosaic.kernel_in_place(lambda *refs: None, name="x", outputs=[], grid=grid)


@pytest.mark.parametrize("count", [1, 3, 4, 18])
def test_every_copy_is_started_by_one_warp(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A warp reads all its places before it starts a copy."""
    done: list[list[tuple[str, int]]] = [[] for _ in range(4)]

    def warp_map(run: Any) -> None:
        for warp, own in enumerate(done):
            current.append(own)
            run(warp)

    current: list[list[tuple[str, int]]] = []
    monkeypatch.setattr(plgpu, "warp_map", warp_map, raising=False)

    def place(number: int) -> int:
        current[-1].append(("place", number))
        return 10 * number

    def start(number: int, found: int) -> None:
        assert found == 10 * number
        current[-1].append(("start", number))

    mosaic.start_copies(count, start, place)
    assert sorted(number for own in done for what, number in own if what == "start") == list(range(count))
    for own in done:
        assert [what for what, _ in own] == ["place"] * (len(own) // 2) + ["start"] * (len(own) // 2)
