"""References, and the paths in vectorised XLA, inside `jax.shard_map`: loop carries must vary alike.

Per-head arguments are sharded, pages and tables not. Tracing is what checks that, so nothing is compiled, and a mesh of
one device does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from pallas_kernels.gated_delta_rule import gated_delta_rule, reference
from pallas_kernels.indexer_topk import indexer_topk
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from pallas_kernels.ring_delta_rule import DeltaRing, ring_delta_rule
from pallas_kernels.ring_scan import RingScanOutput, ScanRing, ring_scan
from pallas_kernels.sparse_mla_attention import sparse_mla_attention
from pallas_kernels.ssm_update import causal_conv1d, selective_scan
from tests.pallas_kernels.gated_delta_rule import test_validate as delta
from tests.pallas_kernels.ring_delta_rule import test_validate as ring_delta
from tests.pallas_kernels.ring_scan import test_validate as ring_scan_cases
from tests.pallas_kernels.ssm_update import test_validate as ssm

HEADS = PartitionSpec(None, "tp")
NONE = PartitionSpec()
TABLES = jnp.zeros((3, 2), jnp.int32)
STEP = (TABLES, jnp.int32([3, 8, 0]), jnp.int32([0, 1, 4, 4]), jnp.int32([1, 1, 2]))
PAGES = (jnp.zeros((5, 4, 24)),)
PLAIN = pytest.mark.parametrize("backend", ["reference", "xla"])


def traced(call: Callable[..., Any], specs: tuple, out: Any, *arrays: Any) -> Any:
    """Shapes of what `call(*arrays)` gives with these specs."""
    mesh = Mesh(np.array(jax.devices()[:1]), ("tp",))
    return jax.eval_shape(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=out), *arrays)


def test_ragged_paged_attention() -> None:
    def call(q: jax.Array, pages: tuple[jax.Array, ...], sinks: jax.Array) -> jax.Array:
        return ragged_paged_attention(q, pages, *STEP, sm_scale=1.0, sinks=sinks, backend="xla").out

    pages = (jnp.zeros((5, 4, 2, 16)),) * 2
    specs = (HEADS, PartitionSpec(None, None, "tp"), PartitionSpec("tp"))
    assert traced(call, specs, HEADS, jnp.zeros((6, 4, 16)), pages, jnp.zeros(4)).shape == (6, 4, 16)


@PLAIN
def test_mla_paged_attention(backend: str) -> None:
    def call(q_nope: jax.Array, q_pe: jax.Array, pages: tuple[jax.Array, ...]) -> jax.Array:
        return mla_paged_attention(q_nope, q_pe, pages, *STEP, sm_scale=1.0, backend=backend).out

    out = traced(call, (HEADS, HEADS, NONE), HEADS, jnp.zeros((6, 3, 16)), jnp.zeros((6, 3, 8)), PAGES)
    assert out.shape == (6, 3, 16)


@PLAIN
def test_sparse_mla_attention(backend: str) -> None:
    def call(q: jax.Array, pages: tuple[jax.Array, ...], sinks: jax.Array, indices: jax.Array | None) -> jax.Array:
        compressed = {"compressed_pages": pages, "compressed_tables": TABLES, "tokens_per_state": 2}
        options = {"sm_scale": 1.0, "sliding_window": 3, "sinks": sinks, "topk_indices": indices, "backend": backend}
        return sparse_mla_attention(q, pages, *STEP, **compressed, **options).out

    q, sinks = jnp.zeros((6, 3, 24)), jnp.zeros(3)
    for indices in (None, jnp.zeros((6, 2), jnp.int32)):
        specs = (HEADS, NONE, PartitionSpec("tp"), NONE)
        assert traced(call, specs, HEADS, q, PAGES, sinks, indices).shape == (6, 3, 24)


def test_indexer_topk_is_the_same_on_all() -> None:
    def call(q: jax.Array, weights: jax.Array, pages: tuple[jax.Array, ...]) -> jax.Array:
        return indexer_topk(q, weights, pages, *STEP, topk=2, tokens_per_state=2)

    assert traced(call, (NONE,) * 3, NONE, jnp.zeros((6, 3, 24)), jnp.zeros((6, 3)), PAGES).shape == (6, 2)


@PLAIN
def test_recurrent_layers(backend: str) -> None:
    head, paged = PartitionSpec("tp"), PartitionSpec(None, "tp")
    conv = traced(
        lambda x, states, weight: causal_conv1d(x, states, weight, **ssm.STEP, backend=backend).states,
        (paged, paged, head),
        paged,
        *(ssm.CONV[name] for name in ("x", "states", "weight")),
    )
    assert conv.shape == (5, 8, 3)
    for case, a in ((ssm.MAMBA1, head), (ssm.MAMBA2, head)):
        groups = NONE if case is ssm.MAMBA1 else paged
        out = traced(
            lambda *arrays: tuple(selective_scan(*arrays, **ssm.STEP, backend=backend)),
            (paged, paged, paged, a, groups, groups),
            paged,
            *(case[name] for name in ("x", "states", "dt", "a", "b", "c")),
        )
        assert out[0].shape == case["x"].shape


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 refuses how the rings vary over the mesh")
@PLAIN
@pytest.mark.parametrize("is_whole", [False, True])
def test_rings_of_mamba2(is_whole: bool, backend: str) -> None:
    """Groups are split with their heads, or one group is whole on every device, and so is what rings have of it."""
    good = ring_scan_cases.GOOD
    groups, of_groups = (NONE, NONE) if is_whole else (HEADS, PartitionSpec(None, None, "tp"))
    rings = ScanRing(*(PartitionSpec(None, None, "tp"),) * 2, of_groups)
    step = {name: x for name, x in good.items() if name not in ("x", "states", "dt", "a", "b", "c", "ring")}
    arrays = tuple(good[name] for name in ("x", "states", "dt", "a", "b", "c", "ring"))
    specs = (HEADS, HEADS, HEADS, PartitionSpec("tp"), groups, groups, rings)
    call = partial(ring_scan, **step, backend=backend)
    out = traced(call, specs, RingScanOutput(HEADS, HEADS, rings), *arrays)
    assert jax.tree.map(jnp.shape, tuple(out)) == jax.tree.map(jnp.shape, (good["x"], good["states"], good["ring"]))


@PLAIN
@pytest.mark.parametrize("least_numbers", [1, 1 << 16])
def test_gated_delta_nets(least_numbers: int, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks and token by token."""
    monkeypatch.setattr(reference, "_LEAST_NUMBERS", least_numbers)
    jax.clear_caches()
    paged = PartitionSpec(None, "tp")
    for g in ((6, 4), (6, 4, 3)):
        good = delta.GOOD | {"g": jnp.zeros(g), "state_write": jnp.int32([[0, 1], [0, 3], [0, 0]])}
        step = {name: good[name] for name in list(good)[6:]} | {"backend": backend}
        arrays = [good[name] for name in list(good)[:6]]
        out = traced(lambda *x, step=step: tuple(gated_delta_rule(*x, **step)), (paged,) * 6, paged, *arrays)
        assert [x.shape for x in out] == [(6, 4, 5), (7, 4, 3, 5)]
    jax.clear_caches()


@pytest.mark.parametrize("backend", ["reference", "xla"])
@pytest.mark.parametrize("is_per_channel", [False, True])
def test_gated_delta_nets_over_rings(is_per_channel: bool, backend: str) -> None:
    good, head, slot = ring_delta.GOOD, PartitionSpec(None, "tp"), PartitionSpec(None, None, "tp")
    gates, decays = ((6, 4, 3), (7, 4, 4, 3)) if is_per_channel else ((6, 4), (7, 4, 4))
    given = good | {"g": jnp.zeros(gates), "ring": ring_delta.ring(decays=decays)}
    names = ("q", "k", "v", "g", "beta", "states")
    step: dict[str, Any] = {name: x for name, x in given.items() if name not in (*names, "ring")}

    def call(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        result = ring_delta_rule(*arrays[:6], DeltaRing(*arrays[6:]), **step, backend=backend)
        return result.out, result.states

    out = traced(call, (head,) * 6 + (slot,) * 3, head, *(given[name] for name in names), *given["ring"])
    assert [x.shape for x in out] == [(6, 4, 5), (7, 4, 3, 5)]
