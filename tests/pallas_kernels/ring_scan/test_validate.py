"""Every argument of ring_scan that does not fit is named; what describes the step: the tests of `ring_checks`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.ring_scan import ScanRing, ring_scan


def ints(*values: int) -> jax.Array:
    return jnp.array(values, jnp.int32)


def ring(xs: Any = (5, 4, 8, 2), dts: Any = (5, 4, 8), bs: Any = (5, 4, 2, 4), dtypes: Any = None) -> ScanRing:
    shapes = {"xs": xs, "dts": dts, "bs": bs}
    return ScanRing(**{name: jnp.zeros(shape, (dtypes or {}).get(name, jnp.float32)) for name, shape in shapes.items()})


GOOD: dict[str, Any] = {
    "x": jnp.zeros((6, 8, 2)),
    "states": jnp.zeros((5, 8, 2, 4)),
    "dt": jnp.zeros((6, 8)),
    "a": jnp.zeros(8),
    "b": jnp.zeros((6, 2, 4)),
    "c": jnp.zeros((6, 2, 4)),
    "ring": ring(),
    "query_start_loc": ints(0, 1, 4),
    "distribution": ints(1, 1, 2),
    "state_read": ints(1, 2),
    "state_write": ints(1, 3),
    "num_held": ints(3, 4),
    "writes_state": jnp.array([False, True]),
    "max_new_tokens": 3,
}
BAD = {
    "backend": ({"backend": "x"}, "ring_scan: expected backend out of .*, got 'x'"),
    "x": (
        {"x": jnp.zeros((6, 8, 2, 1))},
        r"ring_scan: expected x \[num_tokens, channels\] .*, got shape",
    ),
    "states": ({"states": jnp.zeros((5, 8, 3, 4))}, r"ring_scan: expected states .* got \(5, 8, 3, 4\)"),
    "groups": (
        {"b": jnp.zeros((6, 3, 4)), "c": jnp.zeros((6, 3, 4))},
        "ring_scan: expected groups that divide 8 heads, got 3",
    ),
    "limit": ({"dt_limit": (2.0, 1.0)}, r"ring_scan: expected dt_limit to be a pair .*, got \(2.0, 1.0\)"),
    "ring": ({"ring": tuple(ring())}, r"expected ring to be a ScanRing\(xs, dts, bs\), got tuple"),
    "room": (
        {"ring": ring(xs=(5, 4, 15))},
        r"expected ring.xs \[pages, slots, ...\] of slots with room for heads \* head_dim, 16 numbers, got shape",
    ),
    "rank": ({"ring": ring(dts=(5, 8))}, r"ring.dts .* with room for heads, 8 numbers, got shape \(5, 8\)"),
    "pages": ({"ring": ring(bs=(4, 4, 8))}, r"expected ring.bs .* of shape \(5, 4, 8\), got \(4, 4, 8\)"),
    "slots": ({"ring": ring(dts=(5, 3, 8))}, r"expected ring.dts .* of shape \(5, 4, 8\), got \(5, 3, 8\)"),
    "no_slot": ({"ring": ring((5, 0, 16), (5, 0, 8), (5, 0, 8))}, "expected a ring of at least one slot"),
    "xs_dtype": ({"ring": ring(dtypes={"xs": jnp.bfloat16})}, "expected ring.xs of dtype float32, got bfloat16"),
    "dts_dtype": (
        {"ring": ring(dtypes={"dts": jnp.bfloat16})},
        "expected ring.dts of dtype float32, got bfloat16; x and b are kept as they are given",
    ),
    "bs_dtype": ({"b": jnp.zeros((6, 2, 4), jnp.bfloat16)}, "expected ring.bs of dtype bfloat16, got float32"),
    "most": ({"max_new_tokens": 5}, "max_new_tokens of at most the ring's 4 slots, got 5"),
    "held": ({"num_held": ints(5, 4)}, r"expected num_held in \[0, 4\]"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD)
def test_what_does_not_fit_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ring_scan(**GOOD | change)


def test_what_fits_is_run() -> None:
    assert ring_scan(**GOOD).out.shape == (6, 8, 2)


def test_mamba1_is_refused() -> None:
    """A ring would save nothing there."""
    mamba1 = {"x": jnp.zeros((6, 8)), "states": jnp.zeros((5, 8, 4)), "a": jnp.zeros((8, 4)), "b": jnp.zeros((6, 4))}
    with pytest.raises(NotImplementedError, match="ring_scan: a channel of Mamba 1 has a state of few numbers"):
        ring_scan(**GOOD | mamba1 | {"c": jnp.zeros((6, 4))})


def test_a_platform_without_a_kernel_says_so() -> None:
    with pytest.raises(NotImplementedError, match="ring_scan: there is no gpu kernel"):
        ring_scan(**GOOD, backend="gpu")
