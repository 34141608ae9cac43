"""The TPU kernel of the indexer: its ring, its selection, races, what it cannot do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cases.latents import LatentShape
from pallas_kernels.indexer_topk import indexer_topk, kernel_tpu
from pallas_kernels.indexer_topk.tpu_select import GROUP, LEAST, Selection, sort_keys
from pallas_kernels.interpret.on_tpu import RaceError, compile_on_tpu, tpu_device
from pallas_kernels.layouts import cdiv, latent_layout
from pallas_kernels.tpu.call import Operand, call
from pallas_kernels.tpu.latent_blocks import StateBlocks
from pallas_kernels.tpu.mosaic import LANES
from tests.pallas_kernels.indexer_topk.test_indexer_topk import SMALL, check


def test_items_may_have_more_blocks_than_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And fewer, one after the other, some of them none: a ring of four goes round."""
    monkeypatch.setattr(kernel_tpu, "_BUFFERS", 4)
    jax.clear_caches()
    check(replace(SMALL, context=640), "tpu", [(1, 640), (1, 20), (0, 0), (2, 300)])
    jax.clear_caches()


ROWS, PLACES, TOPK = 2 * GROUP, 4, 200
# Entries in the order in which their keys stand: of each block of rows, all at one place, then at the next.
ENTRIES = np.arange(ROWS * LANES).reshape(-1, LANES, PLACES).swapaxes(1, 2).reshape(-1)


class SelectionRefs(NamedTuple):
    num_seen: Any  # SMEM int32[1]
    scores: Any  # float32[ROWS, 128]
    entries: Any  # int32[ROWS, 128]
    out: Any  # int32[1, K padded]
    keys: Any  # int32[ROWS, 128]
    picked_keys: Any  # int32[K padded, 128]
    picked_entries: Any  # int32[K padded, 128]


def select(scores: jax.Array, num_seen: jax.Array) -> jax.Array:
    """int32[K] of float32[ROWS, 128] scores, of which the entries below `num_seen` int32[1] count."""

    def body(refs: SelectionRefs) -> None:
        seen = refs.entries[...] < refs.num_seen[0]
        refs.keys[...] = jnp.where(seen, sort_keys(refs.scores[...]), LEAST)
        picked = refs.picked_keys, refs.picked_entries
        selection = Selection(refs.keys, jnp.int32(ROWS // GROUP), refs.num_seen[0], TOPK, PLACES, *picked)

        def write(n: int, x: jax.Array) -> None:
            refs.out[:, pl.ds(n * LANES, LANES)] = x

        selection.write(write)

    width = cdiv(TOPK, LANES) * LANES
    whole = pl.BlockSpec((ROWS, LANES), lambda *_: (0, 0))
    results = call(
        body,
        SelectionRefs,
        name="select",
        grid=1,
        scalars={"num_seen": num_seen},
        inputs={
            "scores": Operand(scores, whole),
            "entries": Operand(jnp.asarray(ENTRIES.reshape(ROWS, LANES), jnp.int32), whole),
        },
        outputs={
            "out": Operand(jax.ShapeDtypeStruct((1, width), jnp.int32), pl.BlockSpec((1, width), lambda *_: (0, 0)))
        },
        scratch={
            "keys": pltpu.VMEM((ROWS, LANES), jnp.int32),
            "picked_keys": pltpu.VMEM((width, LANES), jnp.int32),
            "picked_entries": pltpu.VMEM((width, LANES), jnp.int32),
        },
        vmem_limit_bytes=32 << 20,
    )
    return results["out"][0, :TOPK]


def test_selection_equals_a_sort() -> None:
    """Over several groups of rows: distinct scores, ties at the threshold, few seen, all equal, zeros of both signs."""
    rng = np.random.default_rng(0)
    normal = rng.standard_normal(ENTRIES.size)
    cases = [
        (normal, ENTRIES.size),
        (normal * 1e37, ENTRIES.size - 77),
        (np.round(normal * 2), ENTRIES.size - 5),
        (np.round(normal * 40), 700),
        (normal, TOPK),
        (normal, 3),
        (normal, 0),
        (np.full(ENTRIES.size, -1.5), ENTRIES.size),
        (np.where(rng.random(ENTRIES.size) < 0.5, -0.0, 0.0), ENTRIES.size),
        (np.where(rng.random(ENTRIES.size) < 0.004, np.abs(normal), -1.0), ENTRIES.size),
        (-np.abs(normal), ENTRIES.size),
    ]
    run = compile_on_tpu(select, jnp.zeros((ROWS, LANES)), jnp.zeros(1, jnp.int32))
    for values, num_seen in cases:
        scores = values.astype(np.float32)[ENTRIES]  # of entry e: values[e]
        got = run(jnp.asarray(scores.reshape(ROWS, LANES)), jnp.full(1, num_seen, jnp.int32))
        seen = values.astype(np.float32)[:num_seen] + 0.0
        expected = np.full(TOPK, -1)
        best = np.argsort(-seen, kind="stable")[:TOPK]
        expected[: best.size] = best
        np.testing.assert_array_equal(got, expected)


@pytest.mark.skipif(tpu_device() is not None, reason="races are seen by the interpreter only")
def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next block's pages loaded into the buffer in use: a race is reported."""
    target = StateBlocks._target
    monkeypatch.setattr(StateBlocks, "_target", lambda self, i, slot: target(self, i, 1 - slot))
    monkeypatch.setattr(kernel_tpu, "_BUFFERS", 2)
    jax.clear_caches()
    with pytest.raises(RaceError, match=r"race|RACE"):
        check(SMALL, "tpu", [(1, 150), (1, 160)])
    jax.clear_caches()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layout": ({"latent": LatentShape(128, 4)}, "TPU kernels read packed latent pages"),
    "dtype": ({"latent": LatentShape(128, 16, "int8", "tpu")}, "plain entries in bfloat16 or float32, got int8"),
    "page": ({"latent": LatentShape(128, 6, "float32", "tpu")}, "page sizes that are powers of two, got 6"),
    "large page": ({"latent": LatentShape(128, 256, "float32", "tpu")}, "up to 128 rows in a page, got 256"),
    "ratio": ({"ratio": 3}, "tokens_per_state that are powers of two, got 3"),
    "heads": ({"heads": 129}, "up to 128 heads, got 129"),
    "tokens": ({"tokens": 20000}, "up to 16384 tokens, got 20000"),
    "picks": ({"topk": 2049}, "up to 2048 picked entries, got 2049"),
    "scores": ({"columns": 50000}, "up to 25165824 bytes of scores of a tile, got 25690112"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernel_cannot_do(name: str) -> None:
    change, message = BAD[name]
    good = {"latent": LatentShape(128, 16, "bfloat16", "tpu"), "ratio": 4, "topk": 9, "heads": 4, "tokens": 6}
    sizes = {**good, "columns": 2, **change}
    latent, tokens, heads = sizes["latent"], sizes["tokens"], sizes["heads"]
    layout = latent_layout(
        head_dim=latent.head_dim, page_size=latent.page_size, dtype=latent.dtype, platform=latent.platform
    )
    pages = jax.ShapeDtypeStruct(layout.arrays[0].shape(3), jnp.dtype(latent.dtype))
    floats = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((tokens, heads, 128), (tokens, heads))]
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((3, sizes["columns"]), (3,), (4,), (3,))]
    static = {"topk": sizes["topk"], "tokens_per_state": sizes["ratio"], "backend": "tpu"}
    with pytest.raises(NotImplementedError, match=f"indexer_topk: .*{message}"):
        jax.eval_shape(
            lambda q, w, pages, *ints: indexer_topk(q, w, (pages,), *ints, page_size=latent.page_size, **static),
            *floats,
            pages,
            *ints,
        )
