"""Run by test_compiled.py in a process of its own: the op under shard_map over 4 virtual CPU devices."""

from __future__ import annotations

import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[3]))

from pallas_kernels.ragged_paged_attention import ragged_paged_attention
from tests.pallas_kernels.cases import Shape, make_case

HEADS = PartitionSpec(None, "model")
ALL = PartitionSpec()


def main() -> None:
    """Prints "equal" where out and LSE are those of the unsharded call up to rounding, and the pages bit by bit."""
    jax.config.update("jax_num_cpu_devices", 4)
    shape = Shape(num_q_heads=8, num_kv_heads=4)
    case = make_case(0, shape, [(1, 30), (1, 2), (9, 40)])
    q, pages, *meta = case.arrays
    rng = np.random.default_rng(0)
    new_kv = tuple(jnp.asarray(rng.standard_normal((24, 4, 16), dtype=np.float32)) for _ in range(2))
    slots = jnp.full(24, -1, jnp.int32).at[0].set(int(case.block_tables[0, 7]) * 4 + 1)
    sinks = jnp.arange(8.0)

    def op(q, pages, new_kv, sinks, k_scale, tables, lens, starts, distribution, slots):
        result = ragged_paged_attention(
            q,
            pages,
            tables,
            lens,
            starts,
            distribution,
            new_kv=new_kv,
            slot_mapping=slots,
            sm_scale=0.3,
            sliding_window=9,
            sinks=sinks,
            k_scale=k_scale,
            return_lse=True,
        )
        return tuple(result)

    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
    pages_spec = PartitionSpec(None, None, "model")
    head = PartitionSpec("model")
    in_specs = (HEADS, (pages_spec,) * 2, (HEADS,) * 2, head, head, *[ALL] * 5)
    sharded = jax.shard_map(op, mesh=mesh, in_specs=in_specs, out_specs=(HEADS, HEADS, (pages_spec,) * 2))
    args = (q, pages, new_kv, sinks, jnp.linspace(0.5, 2, 4), *meta, slots)
    *got, got_pages = jax.jit(sharded)(*args)
    *expected, expected_pages = jax.jit(op)(*args)
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-6, strict=True)
    chex.assert_trees_all_equal(got_pages, expected_pages, strict=True)
    print("equal")


if __name__ == "__main__":
    main()
