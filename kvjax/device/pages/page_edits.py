"""Page edits of a step plan: copies of forked blocks, then pages to zero, before the model runs.

Flow:    StepPlan.page_copies, .pages_to_zero -> [check_edits] -> [edit_pages] -> KVPages
Source:  ARCHITECTURE.md, "Order inside a step"
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvjax.core.step.step_plan import StepPlan
from kvjax.device.mesh.transfers import hands_over
from kvjax.device.pages.kv_pages import KVPages
from kvjax.device.pages.page_ops import (
    SKIP,
    check_copies,
    check_page_ids,
    copy_pages,
    copy_pages_padded,
    padded_pieces,
    zero_pages,
    zero_pages_padded,
)

_NO_IDS = np.zeros(0, np.int32)
_NO_IDS.flags.writeable = False


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


@hands_over
def edit_pages_of_ranks(
    pages: KVPages, plans: Sequence[StepPlan | None], page_counts: Sequence[int], *, backend: str = "auto"
) -> KVPages:
    """As `edit_pages`, of the plans of all data ranks; None: a rank has no step."""
    for pool_id in range(len(pages.pools)):
        copies = [None if plan is None else plan.page_copies[pool_id] for plan in plans]
        sources = [_NO_IDS if one is None else one.sources for one in copies]
        destinations = [_NO_IDS if one is None else one.destinations for one in copies]
        for ids in zip(padded_pieces(sources, page_counts), padded_pieces(destinations, page_counts), strict=True):
            pages = copy_pages_padded(pages, pool_id, *ids, backend=backend)
    for pool_id in range(len(pages.pools)):
        zeroed = [_NO_IDS if plan is None else plan.pages_to_zero[pool_id] for plan in plans]
        for page_ids in padded_pieces(zeroed, page_counts):
            pages = zero_pages_padded(pages, pool_id, page_ids, backend=backend)
    return pages


@hands_over
def warm_up_edits(pages: KVPages, page_counts: Sequence[int], *, backend: str = "auto") -> KVPages:
    """Compiles copies and zeroing of every declared length, by none of each; the pages, unchanged in value."""
    for pool_id in range(len(pages.pools)):
        for count in page_counts:
            nothing = np.full(count * pages.num_ranks, SKIP, np.int32)
            pages = copy_pages_padded(pages, pool_id, nothing, nothing.copy(), backend=backend)
            pages = zero_pages_padded(pages, pool_id, nothing.copy(), backend=backend)
    return pages


__all__ = ["check_edits", "edit_pages", "edit_pages_of_ranks", "warm_up_edits"]
