"""Writes new states into latent pages, one slot per state: MLA's latents, compressed entries, compressor states.

Flow:    new states of a step + slot mapping -> [latent_write] -> pages, updated in place when donated
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from pallas_kernels.backends import resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.latent_entries import EntryFormat, Plain
from pallas_kernels.latent_write import reference, validate
from pallas_kernels.lazy import lazy
from pallas_kernels.slab_pages import page_arrays

if TYPE_CHECKING:
    from pallas_kernels.latent_write import kernel_tpu
    from pallas_kernels.tpu import memory
else:
    kernel_tpu = lazy("pallas_kernels.latent_write.kernel_tpu")
    memory = lazy("pallas_kernels.tpu.memory")


@by_default_rules
def latent_write(
    states: jax.Array,  # [num_states, dim]
    pages: tuple[jax.Array, ...],  # as pallas_kernels.layouts: (latent,)
    slot_mapping: jax.Array,  # int32[num_states] page * page_size + offset, -1: skip
    *,
    scale: jax.Array | None = None,  # float32[]: pages hold states / scale; plain entries only
    entries: EntryFormat = Plain(),  # noqa: B008
    page_size: int | None = None,  # states of a page; None: as many as there is room for, packing included
    backend: str = "auto",
) -> tuple[jax.Array, ...]:
    """Pages with `states[n]` at slot `slot_mapping[n]`. Slots of one call differ, -1 apart.

    Page 0, the null page, is never written: slots of page 0 are skipped as -1 is. Saturation is that of `kv_write`.

    Raises:
        ValueError: a shape, dtype or (outside `jit`) slot does not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    page_size = validate.check(states, pages, slot_mapping, scale, entries, page_size)
    packed = "GPU kernels write latent pages [pages, page_size, dim], got packed ones"
    kernels = {
        "tpu": lambda: kernel_tpu.reason_not_supported(pages, states.shape[0]),
        "gpu": None if pages[0].ndim == 3 else packed,  # XLA's scatter
    }
    chosen = resolve_backend(validate.OP, backend, kernels)
    arguments = (states, page_arrays(pages), slot_mapping, scale)
    options: dict[str, Any] = {"entries": entries, "page_size": page_size}
    if chosen == "tpu":
        chosen = memory.with_room(validate.OP, backend, kernel_tpu.latent_write, *arguments, **options)
    return (kernel_tpu.latent_write if chosen == "tpu" else reference.latent_write)(*arguments, **options)
