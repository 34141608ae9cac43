"""Writes new K and V into pages, one slot per token.

Flow:    new K, V of a step + slot mapping -> [kv_write] -> pages, updated in place when donated
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from pallas_kernels.backends import resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.kv_write import reference, validate
from pallas_kernels.lazy import lazy
from pallas_kernels.slab_pages import page_arrays

if TYPE_CHECKING:
    from pallas_kernels.kv_write import kernel_tpu
    from pallas_kernels.tpu import memory
else:
    kernel_tpu = lazy("pallas_kernels.kv_write.kernel_tpu")
    memory = lazy("pallas_kernels.tpu.memory")


@by_default_rules
def kv_write(
    new_k: jax.Array,  # [num_tokens, num_kv_heads, head_dim]
    new_v: jax.Array,  # [num_tokens, num_kv_heads, head_dim_v]
    pages: tuple[jax.Array, ...],  # as pallas_kernels.layouts: (k, v) split, or (kv,) packed
    slot_mapping: jax.Array,  # int32[num_tokens] page * page_size + offset, -1: skip
    *,
    k_scale: jax.Array | None = None,  # float32[] or [num_kv_heads]: pages hold K / k_scale
    v_scale: jax.Array | None = None,
    backend: str = "auto",
) -> tuple[jax.Array, ...]:
    """Pages with `new_k[t]`, `new_v[t]` at slot `slot_mapping[t]`. Slots of one call differ, -1 apart.

    Page 0, the null page, is never written: slots of page 0 are skipped as -1 is. What an 8-bit dtype cannot hold
    becomes its largest or smallest finite value; int8 rounds half to even, and NaN, which it lacks, becomes 0.

    Raises:
        ValueError: a shape, dtype or (outside `jit`) slot does not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    validate.check(new_k, new_v, pages, slot_mapping, k_scale, v_scale)
    kernels = {
        "tpu": lambda: kernel_tpu.reason_not_supported(pages, new_k.shape[0]),
        "gpu": None if len(pages) == 2 else "GPU kernels write split K and V pages, got packed ones",  # XLA's scatter
    }
    chosen = resolve_backend(validate.OP, backend, kernels)
    arguments, scales = (new_k, new_v, page_arrays(pages), slot_mapping), {"k_scale": k_scale, "v_scale": v_scale}
    if chosen == "tpu":
        chosen = memory.with_room(validate.OP, backend, kernel_tpu.kv_write, *arguments, **scales)
    return (kernel_tpu.kv_write if chosen == "tpu" else reference.kv_write)(*arguments, **scales)
