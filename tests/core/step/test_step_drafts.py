"""Step plans with drafts: tokens after a request's last one, their sources, and the rows of logits that judge them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvjax.core import FullAttentionSpec, KVCacheConfig, KVCacheManager, MambaSpec, Request, StepDrafts, build_step_plan
from kvjax.core.step.step_builder import logits_requests
from kvjax.core.step.step_plan import StepPlan

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float32")
OLD = 777  # what others left behind in the table


def make_manager(*specs: Any) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig.single_pool(200, *(specs or (SPEC,))), 60, hash_block_size=4)


def start(manager: KVCacheManager, name: str, num_tokens: int, num_computed: int, num_new: int) -> Request:
    """A request with `num_computed` tokens done and blocks for `num_new` more."""
    request = Request(name, range(num_tokens))
    if num_computed:
        assert manager.allocate_slots(request, num_computed) is not None
        request.num_computed_tokens = num_computed
    assert manager.allocate_slots(request, num_new) is not None
    manager.request_table.token_ids[request.row, num_tokens:] = OLD
    return request


def drafts_of(lines: list[list[int]], sources: list[list[int]] | None = None, width: int = 4) -> StepDrafts:
    """As wide as four, with entries behind the counts that mean nothing."""
    ids = np.array([line + [-5] * (width - len(line)) for line in lines]).reshape(len(lines), width)
    source = None
    if sources is not None:
        source = np.array([line + [9] * (width - len(line)) for line in sources])
    return StepDrafts(np.array([len(line) for line in lines]), ids, source)


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_a_plan_made_request_by_request(seed: int) -> None:
    """Decoding with and without drafts, first tokens of the step before included, and prompts among them."""
    rng = np.random.default_rng(seed)
    manager, rows, counts, sources, lines, wanted = make_manager(), [], [], [], [], {}
    for i in range(int(rng.integers(1, 7))):
        length = int(rng.integers(2, 20))
        is_prompt = rng.random() < 0.3
        is_in_flight = not is_prompt and rng.random() < 0.4
        line = [] if is_prompt else rng.integers(100, 200, int(rng.integers(0, 5))).tolist()
        count = int(rng.integers(1, length)) if is_prompt else 1 + len(line)
        computed = 0 if is_prompt else length - 1 + is_in_flight
        rows.append(start(manager, f"r{i}", length, computed, count).row)
        counts.append(count)
        sources.append(i if is_in_flight else -1)
        lines.append(line)
        wanted[f"r{i}"] = computed + count - len(line) >= length
    on_device = [[50 + 10 * i + j if (i + j) % 2 else -1 for j in range(len(line))] for i, line in enumerate(lines)]
    plan = build_step_plan(
        manager,
        np.array(rows),
        np.array(counts),
        last_token_source=np.array(sources),
        drafts=drafts_of(lines, on_device),
    )
    check(plan, manager, dict(zip(rows, zip(lines, on_device, sources, strict=True), strict=True)), wanted)


def check(plan: StepPlan, manager: KVCacheManager, by_row: dict[int, Any], wanted: dict[str, bool]) -> None:
    token_ids, token_source, logits, starts = [], [], [], [0]
    for i, row in enumerate(plan.rows.tolist()):
        line, on_device, source = by_row[row]
        request = manager.request_table.requests[row]
        assert request is not None
        first, count = request.num_computed_tokens, int(plan.num_new_tokens[i])
        assert plan.positions[plan.query_start_loc[i] :][:count].tolist() == list(range(first, first + count))
        assert plan.groups[0].seq_lens[i] == first + count
        own = count - len(line)
        known = request.token_ids[first : first + own].tolist()
        token_ids += known if source < 0 else [0]
        token_source += [-1] * len(known) if source < 0 else [source]
        token_ids += [draft if place < 0 else 0 for draft, place in zip(line, on_device, strict=True)]
        token_source += on_device
        if wanted[plan.request_ids[i]]:
            end = int(plan.query_start_loc[i + 1])
            logits += range(end - 1 - len(line), end)
            starts.append(len(logits))
    assert plan.token_ids.tolist() == token_ids
    assert plan.token_source.tolist() == token_source
    assert plan.logits_indices.tolist() == logits
    assert plan.logits_starts.tolist() == starts
    assert plan.most_drafts == max(max(np.diff(starts), default=1) - 1, 0)
    owners = [plan.request_ids[i] for i in logits_requests(plan)]
    by_name = {name: len(by_row[row][0]) for name, row in zip(plan.request_ids, plan.rows.tolist(), strict=True)}
    assert owners == [name for name in plan.request_ids if wanted[name] for _ in range(1 + by_name[name])]
    assert {plan.logits_indices.dtype, plan.logits_starts.dtype, plan.token_ids.dtype} == {np.dtype(np.int32)}


def test_a_shape_is_picked_for_the_most_drafts_of_a_request() -> None:
    manager, asked = make_manager(), []

    class Shape:
        num_requests, num_columns = 4, 8

    def pick(*sizes: int, **options: int) -> Shape:
        asked.append((sizes, options))
        return Shape()

    rows = np.array([start(manager, "a", 9, 8, 3).row, start(manager, "b", 9, 8, 1).row])
    build_step_plan(manager, rows, np.array([3, 1]), drafts=drafts_of([[1, 2], []]), pick_shape=pick)
    build_step_plan(manager, rows, np.array([1, 1]), drafts=drafts_of([[], []]), pick_shape=pick)
    assert asked == [((4, 2, 3), {"num_drafts": 2, "longest": 3}), ((2, 2, 3), {})]


BAD: dict[str, tuple[Callable[[], dict[str, Any]], str]] = {
    "shapes": (lambda: {"drafts": drafts_of([[1], [2]])}, r"expected drafts of 1 requests, counts \[S\] and .* \[2\]"),
    "sources": (
        lambda: {"drafts": StepDrafts(np.array([1]), np.ones((1, 2), int), np.ones((1, 3), int))},
        r"expected sources of drafts \[1, 2\], got \[1, 3\]",
    ),
    "negative": (
        lambda: {"drafts": StepDrafts(np.array([-1]), np.ones((1, 2)))},
        "row 0: expected 0 to 2 drafts, got -1",
    ),
    "wide": (lambda: {"drafts": StepDrafts(np.array([3]), np.ones((1, 2)))}, "row 0: expected 0 to 2 drafts, got 3"),
    "nothing before": (
        lambda: {"new": 2, "drafts": drafts_of([[1, 2]])},
        "more new tokens than the 2 drafts among them",
    ),
    "no id": (lambda: {"drafts": drafts_of([[3, -1]])}, r"expected drafts in \[0, 2\*\*31\), got -1 to 3"),
    "too large": (
        lambda: {"drafts": drafts_of([[2**31, 1]])},
        r"expected drafts in \[0, 2\*\*31\), got 1 to 2147483648",
    ),
    "no logits": (
        lambda: {"drafts": drafts_of([[1, 2]]), "wants_logits": np.array([False])},
        "row 0: 2 drafts need logits that verify them",
    ),
    "not last": (lambda: {"new": 2, "drafts": drafts_of([[1]])}, "row 0: 1 drafts need the request's last token"),
    "unknown": (
        lambda: {"new": 4, "drafts": drafts_of([[1]])},
        "a step up to token 10 needs tokens, the request has 9",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_drafts_are_refused(name: str) -> None:
    options, message = BAD[name]
    manager = make_manager()
    computed = 7 if name in ("not last", "unknown") else 8
    request = start(manager, "a", 9, computed, 4)
    chosen = {"new": 3} | options()
    before = manager.snapshot()
    with pytest.raises(ValueError, match=message):
        build_step_plan(manager, np.array([request.row]), np.array([chosen.pop("new")]), **chosen)
    assert manager.snapshot() == before


def test_drafts_need_states_of_their_own() -> None:
    state = {"shapes": ((2,),), "dtypes": ("float32",), "mamba_cache_mode": "align"}
    manager = make_manager(SPEC, MambaSpec(block_size=4, num_speculative_blocks=1, **state))
    request = start(manager, "a", 9, 8, 3)
    with pytest.raises(ValueError, match="row 0, group 1: expected at most 1 drafts, as there are states for, got 2"):
        build_step_plan(manager, np.array([request.row]), np.array([3]), drafts=drafts_of([[1, 2]]))
