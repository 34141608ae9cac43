"""Every count that a caller gives is an integer of at most 2**60, or a ValueError that changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, Request
from tests.core.manager.manager_lockstep import config_of
from tests.core.manager.naive_manager import NaiveGroup

HASHER = BlockHasher(4, seed="test")
Call = Callable[[KVCacheManager, Request, Any], object]
CALLS: dict[str, tuple[Call, str]] = {
    "allocate": (lambda m, r, n: m.allocate_slots(r, n), "num_new_tokens"),
    "lookahead": (lambda m, r, n: m.allocate_slots(r, 1, num_lookahead_tokens=n), "num_lookahead_tokens"),
    "in flight": (lambda m, r, n: m.allocate_slots(r, 1, num_in_flight_tokens=n), "num_in_flight_tokens"),
    "encoder": (lambda m, r, n: m.allocate_slots(r, 1, num_encoder_tokens=n), "num_encoder_tokens"),
    "whole": (lambda m, r, n: m.allocate_slots(r, n, full_sequence_must_fit=True), "num_new_tokens"),
    "hit": (lambda m, r, n: m.allocate_slots(Request("new", range(9)), 1, n), "num_new_computed_tokens"),
    "external": (
        lambda m, r, n: m.allocate_slots(Request("new", range(9)), 1, num_external_computed_tokens=n),
        "num_external_computed_tokens",
    ),
    "admit": (lambda m, r, n: m.can_admit(Request("new", range(9)), n), "num_hit_tokens"),
    "keep": (lambda m, r, n: m.can_admit(Request("new", range(9)), kept_free=n), "kept_free"),
    "step": (lambda m, r, n: m.plan_step([r.row], n), "num_new_tokens"),
    "step lookahead": (lambda m, r, n: m.plan_step([r.row], 1, num_lookahead_tokens=n), "num_lookahead_tokens"),
    "step in flight": (lambda m, r, n: m.plan_step([r.row], 1, num_in_flight_tokens=n), "num_in_flight_tokens"),
    "steps": (lambda m, r, n: m.plan_step([r.row], [n]), "num_new_tokens"),
    "steps lookahead": (lambda m, r, n: m.plan_step([r.row], 1, num_lookahead_tokens=[n]), "num_lookahead_tokens"),
    "limit": (lambda m, r, n: m.limit_step(r, n), "num_new_tokens"),
    "limit hit": (lambda m, r, n: m.limit_step(r, 1, n), "num_new_computed_tokens"),
    "cache": (lambda m, r, n: m.cache_blocks(r, n), "num_computed_tokens"),
    "remove": (lambda m, r, n: m.remove_skipped_blocks(r.request_id, n), "num_computed_tokens"),
    "fork": (lambda m, r, n: m.fork(r, n), "n"),
    "fork in flight": (lambda m, r, n: m.fork(r, 1, num_in_flight_tokens=n), "num_in_flight_tokens"),
    "pin": (lambda m, r, n: m.pin(r, n), "longest_request"),
}


def running(enable_caching: bool = True) -> tuple[KVCacheManager, Request]:
    """A request that the quick answer of `allocate_slots` holds for: its block has slots left."""
    config = config_of([NaiveGroup(4), NaiveGroup(4, window=6)], [30])
    manager = KVCacheManager(config, 40, 4, enable_caching=enable_caching)
    request = Request("r", range(9), block_hasher=HASHER)
    assert manager.allocate_slots(request, 9) is not None
    request.num_computed_tokens = 9
    return manager, request


@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("value", [0.5, 1.0, 2**63, 2**63 - 1, 2**62, 2**80, -1, np.float64(2), "1"], ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_counts_that_can_not_be_change_nothing(name: str, value: Any, enable_caching: bool) -> None:
    manager, request = running(enable_caching)
    call, parameter = CALLS[name]
    before = manager.snapshot()
    expected = f"expected {parameter} |expected at most max_model_len = 40 tokens, got "
    with pytest.raises(
        (ValueError, TypeError) if value == "1" else ValueError, match=None if value == "1" else expected
    ):
        call(manager, request, value)
    assert manager.snapshot() == before


@pytest.mark.parametrize("value", [1, np.int64(1), np.int32(1), np.uint8(1)], ids=repr)
@pytest.mark.parametrize("name", ["allocate", "lookahead", "in flight", "whole", "step", "steps", "limit", "fork"])
def test_integers_of_every_kind_are_counts(name: str, value: Any) -> None:
    (manager, request), (twin, other) = running(), running()
    CALLS[name][0](manager, request, value)
    CALLS[name][0](twin, other, 1)
    assert manager.snapshot() == twin.snapshot()


@pytest.mark.parametrize("bad", [2**63 - 1, 2**63 - 9, 2**61, -(2**63), -1, 0])
def test_one_bad_count_of_many_rows_is_named(bad: int) -> None:
    """Sums that wrap around int64 would look like idle rows."""
    manager, request = running()
    other = Request("other", range(9), block_hasher=HASHER)
    assert manager.allocate_slots(other, 9) is not None
    before = manager.snapshot()
    bound = "<= 1152921504606846976" if bad > 0 else ">= 1"
    with pytest.raises(ValueError, match=f"expected num_new_tokens {bound}, got {bad}$"):
        manager.plan_step([request.row, other.row], np.array([1, bad]))
    assert manager.snapshot() == before


@pytest.mark.parametrize("bad", [2**63, 2**64 - 1])
def test_counts_beyond_int64_are_named(bad: int) -> None:
    manager, request = running()
    with pytest.raises(ValueError, match=f"expected num_new_tokens <= 1152921504606846976, got {bad}$"):
        manager.plan_step([request.row], np.array([bad], np.uint64))
