"""The indexer in vectorised XLA, whatever is done at a time."""

from __future__ import annotations

from typing import Any

import pytest

from pallas_kernels.indexer_topk.xla_topk import Limits, indexer_topk
from pallas_kernels.latent_entries import Plain
from tests.pallas_kernels.indexer_topk.test_indexer_topk import MIXED, SMALL, check


@pytest.mark.parametrize(
    "limits",
    [
        Limits(5_000, 2_000),
        pytest.param(Limits(1, 1), marks=pytest.mark.sweep),
        pytest.param(Limits(1 << 20, 2_000), marks=pytest.mark.sweep),
    ],
)
def test_whatever_is_done_at_a_time(limits: Limits) -> None:
    def call(pages: Any, rest: Any) -> Any:
        q, weights, step = rest
        sizes = {"topk": SMALL.topk, "tokens_per_state": SMALL.ratio, "page_size": SMALL.page}
        return indexer_topk(q, weights, pages, *step, entries=Plain(), limits=limits, **sizes), ()

    check(SMALL, "xla", MIXED, call)
