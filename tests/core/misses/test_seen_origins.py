"""The origins of first blocks: which are remembered, and how many."""

from __future__ import annotations

from kvjax.core import BlockOrigin, LoRARequest, Request
from kvjax.core.misses.seen_origins import MAX_ORIGINS, SeenOrigins
from tests.core.manager.test_invalidation import HASHER, request


def test_other_origins_of_the_same_first_block() -> None:
    seen = SeenOrigins(10)
    for options in ({}, {"cache_salt": "a"}, {"lora": LoRARequest("a")}, {"weight_version": 1}):
        seen.meet(request("r", **options))
    assert seen.meet(request("r", num_tokens=2, cache_salt="a")) == [
        BlockOrigin(),
        BlockOrigin(lora=LoRARequest("a")),
        BlockOrigin(weight_version=1),
    ]
    assert seen.meet(request("r", num_tokens=1)) == []


def test_the_latest_are_kept() -> None:
    seen = SeenOrigins(max_prefixes=2)
    for i in [*range(20), 17]:
        seen.meet(request("r", cache_salt=f"salt {i}"))
    origins = seen.meet(request("r"))
    assert origins == [BlockOrigin(f"salt {i}") for i in (16, 18, 19, 17)][-MAX_ORIGINS:]
    for first_token in (7, 8):
        seen.meet(Request("other", [first_token] * 2, block_hasher=HASHER))
    assert seen.meet(request("r")) == []


def test_requests_that_register_nothing_leave_nothing() -> None:
    seen = SeenOrigins(10)
    seen.meet(request("r", cache_salt="a", skip_writing_prefix_cache=True))
    assert seen.meet(request("r")) == []
    assert seen.meet(request("r", cache_salt="b", skip_writing_prefix_cache=True)) == [BlockOrigin()]
