"""Every argument that does not fit is named, with what was expected and what came."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.kv_write import kv_write

SPLIT = (jnp.zeros((3, 4, 2, 8)), jnp.zeros((3, 4, 2, 16)))
PACKED = (jnp.zeros((3, 4, 2, 2, 128), jnp.bfloat16),)
GOOD: dict[str, Any] = {
    "new_k": jnp.zeros((5, 2, 8)),
    "new_v": jnp.zeros((5, 2, 16)),
    "pages": SPLIT,
    "slot_mapping": jnp.array([-1, 4, 5, 6, 7], jnp.int32),
}
BAD = {
    "backend": ({"backend": "cuda"}, r"kv_write: expected backend out of .*, got 'cuda'"),
    "pages_type": ({"pages": SPLIT[0]}, r"expected pages to be a tuple \(k, v\) or \(kv,\), got ArrayImpl"),
    "pages_number": ({"pages": SPLIT * 2}, r"expected pages to be a tuple .*, got 4 arrays"),
    "pages_dtype": ({"pages": (jnp.zeros((3, 4, 2, 8), jnp.int32),)}, r"expected pages of a dtype out of .* got int32"),
    "pages_rank": ({"pages": (SPLIT[0][0], SPLIT[1])}, r"expected pages\[0\] .* of shape \(any, any, any, any\)"),
    "pages_differ": ({"pages": (SPLIT[0], SPLIT[1][:2])}, r"expected pages\[1\] .* as pages\[0\] of shape \(3, 4, 2"),
    "pages_mixed": (
        {"pages": (SPLIT[0], SPLIT[1].astype(jnp.bfloat16))},
        "expected K and V pages of one dtype, got float32 and bfloat16",
    ),
    "k_rank": ({"new_k": jnp.zeros((5, 16))}, r"expected new_k .* got \(5, 16\)"),
    "k_heads": ({"new_k": jnp.zeros((5, 4, 8))}, r"expected new_k .* of shape \(5, 2, 8\), got \(5, 4, 8\)"),
    "v_dim": ({"new_v": jnp.zeros((5, 2, 8))}, r"expected new_v .* of shape \(5, 2, 16\), got \(5, 2, 8\)"),
    "k_dtype": ({"new_k": jnp.zeros((5, 2, 8), jnp.int32)}, "expected new_k of dtype float32, bfloat16 or float16"),
    "v_dtype": ({"new_v": jnp.zeros((5, 2, 16), jnp.int8)}, "expected new_v of dtype float32, .* got int8"),
    "slots_shape": ({"slot_mapping": jnp.zeros(4, jnp.int32)}, r"expected slot_mapping .* of shape \(5\), got \(4,\)"),
    "slots_dtype": ({"slot_mapping": jnp.zeros(5)}, r"expected slot_mapping of dtype int32, got float32; convert"),
    "slots_range": (
        {"slot_mapping": jnp.array([4, 5, 6, 7, 12], jnp.int32)},
        r"expected slots in \[-1, 12\), got 4 ... 12",
    ),
    "slots_low": ({"slot_mapping": jnp.array([4, 5, 6, 7, -2], jnp.int32)}, r"expected slots in \[-1, 12\), got -2"),
    "slots_twice": (
        {"slot_mapping": jnp.array([-1, -1, 9, 4, 9], jnp.int32)},
        "one token per slot, got two for slot 9",
    ),
    "k_scale": ({"k_scale": jnp.ones(3)}, r"expected k_scale of shape \(\) or \(2,\), got \(3,\)"),
    "v_scale": ({"v_scale": jnp.ones((2, 1))}, r"expected v_scale of shape \(\) or \(2,\), got \(2, 1\)"),
    "scale_dtype": ({"k_scale": jnp.ones((), jnp.int32)}, "expected k_scale of dtype float32"),
    "packed_heads": (
        {"pages": PACKED, "new_k": jnp.zeros((5, 5, 8)), "new_v": jnp.zeros((5, 5, 8))},
        r"expected num_kv_heads out of \[2\] for 2 rows of packing 2 and head_dim 8, got 5",
    ),
    "packed_dim": (
        {"pages": PACKED, "new_k": jnp.zeros((5, 2, 130)), "new_v": jnp.zeros((5, 2, 130))},
        r"expected num_kv_heads out of \[1\] for 2 rows of packing 2 and head_dim 130, got 2",
    ),
    "packed_v": ({"pages": PACKED, "new_v": jnp.zeros((5, 2, 16))}, r"expected new_v .* of shape \(5, 2, 8\)"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str) -> None:
    change, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        kv_write(**{**GOOD, **change})


def test_what_a_platform_cannot_do() -> None:
    packed = {**GOOD, "new_v": GOOD["new_k"], "pages": (jnp.zeros((5, 4, 4, 1, 128)),)}
    with pytest.raises(NotImplementedError, match="kv_write: GPU kernels write split K and V pages, got packed ones"):
        kv_write(**packed, backend="gpu")


def test_good_arguments() -> None:
    """The base of the cases above is itself accepted, packed pages with odd heads too."""
    kv_write(**GOOD)
    new = jnp.zeros((5, 3, 8))
    kv_write(new, new, (jnp.zeros((3, 4, 2, 4, 128), jnp.int8),), GOOD["slot_mapping"])
