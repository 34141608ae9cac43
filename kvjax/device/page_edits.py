"""Page edits of a step plan: copies of forked blocks, then pages to zero, before the model runs.

Flow:    StepPlan.page_copies, .pages_to_zero -> [check_edits] -> [edit_pages] -> KVPages
Source:  ARCHITECTURE.md, "Order inside a step"
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.step.step_plan import StepPlan
from kvjax.device.page_ops import check_copies, check_page_ids, copy_pages, zero_pages
from kvjax.device.pages import KVPages


def check_edits(pages: KVPages, plan: StepPlan) -> None:
    """Raises ValueError unless copies and zeroing can be done, the one before the other."""
    if (len(plan.page_copies), len(plan.pages_to_zero)) != (len(pages.pools),) * 2:
        raise ValueError(
            f"expected page copies and pages to zero for {len(pages.pools)} pools, "
            f"got {len(plan.page_copies)} and {len(plan.pages_to_zero)}"
        )
    for pool_id, (copies, page_ids) in enumerate(zip(plan.page_copies, plan.pages_to_zero, strict=True)):
        if not (copies.sources.size or copies.destinations.size or page_ids.size):
            continue
        check_copies(pages.num_pages(pool_id), copies.sources, copies.destinations)
        check_page_ids(page_ids, pages.num_pages(pool_id), "pages to zero")
        if np.isin(page_ids, copies.destinations).any():
            raise ValueError(f"pages {np.intersect1d(page_ids, copies.destinations).tolist()} are copied to and zeroed")


def edit_pages(pages: KVPages, plan: StepPlan, page_counts: Sequence[int], *, backend: str = "auto") -> KVPages:
    """Dispatches the edits of a plan that `check_edits` has passed, lists padded to `page_counts`; donates `pages`."""
    for pool_id, copies in enumerate(plan.page_copies):
        if copies.sources.size:
            pages = copy_pages(pages, pool_id, copies.sources, copies.destinations, page_counts, backend=backend)
    for pool_id, page_ids in enumerate(plan.pages_to_zero):
        if page_ids.size:
            pages = zero_pages(pages, pool_id, page_ids, page_counts, backend=backend)
    return pages


__all__ = ["check_edits", "edit_pages"]
