"""Buckets: few, enough for every step within the limits, and the smallest that fits is taken."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core.spec import cdiv
from kvjax.device import Bucket, Buckets
from kvjax.device.inputs.buckets import MAX_BUCKETS

LIMITS = {"max_num_batched_tokens": 100, "max_num_seqs": 8, "max_model_len": 64, "block_size": 4}


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.parametrize("seed", range(50))
def test_default_buckets_are_few_and_hold_every_step_within_the_limits(seed: int, num_drafts: int) -> None:
    rng = np.random.default_rng(seed)
    limits = {name: int(2 ** rng.uniform(0, 14)) for name in LIMITS}
    limits["block_size"] = int(2 ** rng.integers(0, 8))
    max_buckets = int(rng.integers(1, MAX_BUCKETS + 1))
    buckets = Buckets.default(**limits, max_buckets=max_buckets, num_drafts=num_drafts)
    tokens, columns = limits["max_num_batched_tokens"], cdiv(limits["max_model_len"], limits["block_size"])
    requests = min(limits["max_num_seqs"], tokens)
    assert len(buckets.steps) <= max_buckets
    assert max(buckets.steps) == Bucket(tokens, requests, columns, num_drafts)
    assert (buckets.max_num_tokens, buckets.max_num_requests) == (tokens, requests)
    assert {bucket.num_drafts for bucket in buckets.steps} <= {0, num_drafts}
    assert buckets.max_num_drafts == num_drafts
    for _ in range(20):
        s = int(rng.integers(1, requests + 1))
        t, p = int(rng.integers(s, tokens + 1)), int(rng.integers(1, columns + 1))
        drafts = int(rng.integers(0, num_drafts + 1))
        bucket = buckets.pick(t, s, p, drafts)
        assert bucket.fits(t, s, p, drafts)
        assert bucket == min(b for b in buckets.steps if b.fits(t, s, p, drafts))
        assert bucket.num_logits >= min(t, s * (1 + drafts)), "a row of logits for each request and draft"


def test_decode_steps_have_buckets_without_spare_tokens() -> None:
    buckets = Buckets.default(max_num_batched_tokens=2048, max_num_seqs=256, max_model_len=8192, block_size=16)
    assert len(buckets.steps) == 20
    assert buckets.pick(256, 256, 512) == Bucket(256, 256, 512)
    assert buckets.pick(10, 10, 20) == Bucket(16, 16, 32)
    assert buckets.pick(2000, 3, 20) == Bucket(2048, 256, 128)


def test_verifying_steps_have_buckets_without_spare_tokens() -> None:
    """As many tokens and rows of logits as requests with all their drafts, as far as the budget of a step goes."""
    limits = {"max_num_batched_tokens": 512, "max_num_seqs": 256, "max_model_len": 8192, "block_size": 16}
    buckets = Buckets.default(**limits, num_drafts=3)
    assert buckets.pick(64, 16, 512, 3) == Bucket(64, 16, 512, 3)
    assert buckets.pick(256, 64, 20, 3) == Bucket(256, 64, 128, 3)
    assert buckets.pick(512, 256, 512, 3).num_logits == 512
    assert buckets.pick(16, 16, 512) == Bucket(16, 16, 512)
    assert Buckets.default(**limits, num_drafts=3, max_buckets=3).pick(256, 256, 512) == Bucket(256, 256, 512)
    assert (Bucket(64, 16, 4, 3).num_logits, Bucket(64, 16, 4).num_logits, Bucket(4, 16, 4).num_logits) == (64, 16, 16)


def test_more_drafts_than_any_bucket_has_fit_none() -> None:
    buckets = Buckets((Bucket(8, 4, 2, 1), Bucket(8, 4, 2)))
    assert buckets.pick(8, 4, 2) == Bucket(8, 4, 2)
    assert buckets.pick(8, 4, 2, 1) == Bucket(8, 4, 2, 1)
    message = r"no bucket fits 4 tokens, .* with 2 drafts of a request; .* \(declared: 8x4x2, 8x4x2 with 1 drafts\)"
    with pytest.raises(ValueError, match=message):
        buckets.pick(4, 1, 1, 2)
    with pytest.raises(ValueError, match="expected num_drafts >= 0, got -1"):
        Bucket(8, 4, 2, -1)
    with pytest.raises(ValueError, match="expected num_drafts >= 0, got -1"):
        Buckets.default(**LIMITS, num_drafts=-1)


def test_equal_buckets_count_once() -> None:
    assert Buckets((Bucket(8, 4, 2), Bucket(4, 4, 2), Bucket(8, 4, 2))).steps == (Bucket(4, 4, 2), Bucket(8, 4, 2))


def test_a_step_that_fits_no_bucket_is_told_the_limits() -> None:
    buckets = Buckets((Bucket(8, 4, 2), Bucket(4, 4, 16)))
    with pytest.raises(ValueError, match=r"no bucket fits 8 tokens, 1 requests .* and 3 table columns"):
        buckets.pick(8, 1, 3)
    with pytest.raises(ValueError, match=r"8 tokens, 4 requests and 16 columns \(declared: 4x4x16, 8x4x2\)"):
        buckets.pick(1, 5, 1)


@pytest.mark.parametrize("name", ["num_tokens", "num_requests", "num_columns"])
def test_refuses_an_empty_bucket(name: str) -> None:
    sizes = {"num_tokens": 1, "num_requests": 1, "num_columns": 1} | {name: 0}
    with pytest.raises(ValueError, match=f"expected {name} >= 1, got 0"):
        Bucket(**sizes)


def test_refuses_no_buckets_too_many_and_empty_page_counts() -> None:
    with pytest.raises(ValueError, match="expected 1 to 24 buckets, got 0"):
        Buckets(())
    with pytest.raises(ValueError, match="expected 1 to 24 buckets, got 25"):
        Buckets(tuple(Bucket(t, 1, 1) for t in range(1, 26)))
    with pytest.raises(ValueError, match=r"expected page_counts >= 1, got \(0, 8\)"):
        Buckets((Bucket(1, 1, 1),), page_counts=(0, 8))


@pytest.mark.parametrize("name", [*LIMITS, "max_buckets"])
def test_refuses_limits_below_one(name: str) -> None:
    with pytest.raises(ValueError, match=f"expected {name} >= 1, got 0"):
        Buckets.default(**LIMITS | {name: 0})


def test_steps_of_decoding_may_have_buckets_of_their_own() -> None:
    """A step of one token a request takes one of them before a smaller mixed bucket; no other step fits one."""
    limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 8192, "block_size": 16}
    buckets = Buckets.default(**limits, decode_apart=True)
    assert len(buckets.steps) <= MAX_BUCKETS
    assert buckets.pick(10, 10, 20) == Bucket(16, 16, 32, is_mixed=False)
    assert buckets.pick(20, 20, 20) == Bucket(64, 64, 32, is_mixed=False)
    assert buckets.pick(20, 19, 20) == Bucket(32, 32, 128)
    drafts = Buckets.default(**limits, decode_apart=True, num_drafts=3)
    assert {bucket.is_mixed for bucket in drafts.steps if bucket.num_drafts} == {True}
    assert not Bucket(8, 8, 4, is_mixed=False).fits(8, 7, 4)
    assert not Bucket(8, 8, 4, is_mixed=False).fits(8, 8, 4, longest=2)  # where rows of logits count as requests
    only_decode = Buckets((Bucket(8, 8, 4, is_mixed=False),))
    with pytest.raises(ValueError, match=r"no bucket fits 8 tokens, 7 .*declared: 8x8x4 of decoding"):
        only_decode.pick(8, 7, 4)


def test_steps_with_drafts_may_have_buckets_of_their_own() -> None:
    """A request of more tokens than drafts allow makes a step mixed; so does one whose tokens nobody has counted."""
    limits = {"max_num_batched_tokens": 2048, "max_num_seqs": 256, "max_model_len": 8192, "block_size": 16}
    buckets = Buckets.default(**limits, decode_apart=True, drafts_apart=True, num_drafts=3)
    decode = Bucket(256, 64, 128, 3, is_mixed=False)
    assert decode in buckets.steps
    assert buckets.pick(70, 20, 20, 3, longest=4) == decode
    assert buckets.pick(70, 20, 20, 0, longest=4) == decode  # prompts of up to four tokens
    assert buckets.pick(70, 20, 20, 3, longest=5).is_mixed
    assert buckets.pick(70, 20, 20, 3).is_mixed
    assert buckets.pick(20, 20, 20) == Bucket(64, 64, 128, is_mixed=False)
    assert buckets.pick(7, 4, 20, 3) == Bucket(64, 16, 128, 3, is_mixed=False)  # one of four at most
    cut = Buckets.default(**limits | {"max_num_batched_tokens": 512}, drafts_apart=True, num_drafts=3)
    assert {(b.num_tokens, b.is_mixed) for b in cut.steps if b.num_requests == 256 and b.num_drafts} == {(512, True)}
    many = Buckets.default(**limits, drafts_apart=True, num_drafts=8)
    assert all(bucket.is_mixed for bucket in many.steps)


@pytest.mark.parametrize("sizes", [(9, 8, 4, 0), (8, 8, 4, 1)])
def test_a_bucket_that_is_not_mixed_has_as_many_tokens_for_each_request(sizes: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="expected one token a request, and its drafts, in a bucket that is not mixed"):
        Bucket(*sizes, is_mixed=False)
