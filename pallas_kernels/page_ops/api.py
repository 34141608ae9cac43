"""Whole pages of one array: copied, set to zero, read out and put back.

Flow:    page array + page ids -> [page_ops] -> page array, updated in place when donated; or the pages read

Page ids are int32. As a target -1 is skipped (padding), and so is page 0, the null page, which stays zero; as a source
-1 stands for page 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from pallas_kernels.backends import by_xla, resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.lazy import lazy
from pallas_kernels.page_ops import reference, validate

if TYPE_CHECKING:
    from pallas_kernels.page_ops import kernel_tpu
else:
    kernel_tpu = lazy("pallas_kernels.page_ops.kernel_tpu")


@by_default_rules
def copy_pages(
    pages: jax.Array,  # [num_pages, *page_shape]
    sources: jax.Array,  # int32[n]
    destinations: jax.Array,  # int32[n] distinct, none of them a source
    *,
    backend: str = "auto",
) -> jax.Array:
    """Pages with page `destinations[i]` as `sources[i]`.

    Raises:
        ValueError: a shape, dtype or (outside `jit`) id does not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    op = "copy_pages"
    validate.check_pages(op, pages)
    validate.check_copies(op, pages, sources, destinations)
    run = kernel_tpu if _chosen(op, pages, sources, backend) == "tpu" else reference
    return run.copy_pages(pages, sources, destinations)


@by_default_rules
def zero_pages(pages: jax.Array, page_ids: jax.Array, *, backend: str = "auto") -> jax.Array:
    """Pages [num_pages, *page_shape] with the pages `page_ids` int32[n] zero.

    Raises:
        ValueError: a shape, dtype or (outside `jit`) id does not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    op = "zero_pages"
    validate.check_pages(op, pages)
    validate.check_ids(op, "page_ids", pages, page_ids)
    run = kernel_tpu if _chosen(op, pages, page_ids, backend) == "tpu" else reference
    return run.zero_pages(pages, page_ids)


@by_default_rules
def gather_pages(pages: jax.Array, page_ids: jax.Array, *, backend: str = "auto") -> jax.Array:
    """The pages `page_ids` int32[n] of `pages` [num_pages, *page_shape], as [n, *page_shape].

    Raises:
        ValueError: a shape, dtype or (outside `jit`) id does not fit.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    op = "gather_pages"
    validate.check_pages(op, pages)
    validate.check_ids(op, "page_ids", pages, page_ids)
    run = kernel_tpu if _chosen(op, pages, page_ids, backend) == "tpu" else reference
    return run.gather_pages(pages, page_ids)


@by_default_rules
def scatter_pages(
    pages: jax.Array,  # [num_pages, *page_shape]
    page_ids: jax.Array,  # int32[n] distinct
    values: jax.Array,  # [n, *page_shape] in the pages' dtype
    *,
    backend: str = "auto",
) -> jax.Array:
    """Pages with page `page_ids[i]` as `values[i]`.

    Raises:
        ValueError: a shape, dtype or (outside `jit`) id does not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    op = "scatter_pages"
    validate.check_pages(op, pages)
    validate.check_values(op, pages, page_ids, values)
    run = kernel_tpu if _chosen(op, pages, page_ids, backend) == "tpu" else reference
    return run.scatter_pages(pages, page_ids, values)


def _chosen(op: str, pages: jax.Array, page_ids: jax.Array, backend: str) -> str:
    kernels = {
        "tpu": lambda: kernel_tpu.reason_not_supported(pages, page_ids.shape[0]),
        "gpu": by_xla,
    }
    return resolve_backend(op, backend, kernels)
