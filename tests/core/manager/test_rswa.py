"""R-SWA: what of an answer is released, who may hit what, and how much an admission counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheManager, MambaSpec, Request, RSWASpec
from kvjax.core.options.release_rules import RELEASES

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
SPEC = RSWASpec(block_size=4, rswa_window=6, **HEADS)
HASHER = BlockHasher(4, seed="0")
AS_VLLM = {"rules": RELEASES["0.33.0"], "eviction_policy": "lru"}


def make_manager(*specs: Any, num_blocks: int = 40, **options: Any) -> KVCacheManager:
    return KVCacheManager(KVCacheConfig.single_pool(num_blocks, *(specs or (SPEC,))), 128, 4, **options)


def run(manager: KVCacheManager, name: str, num_prompt: int, num_answer: int) -> Request:
    """A request that has computed its prompt and answer, tokens 0, 1, 2 and so on, one a step."""
    request = Request(name, range(num_prompt), block_hasher=HASHER)
    hit, length = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, num_prompt - length, length, hit) is not None
    request.num_computed_tokens = num_prompt
    for token in range(num_prompt, num_prompt + num_answer):
        request.append_output_token_ids([token])
        assert manager.allocate_slots(request, 1) is not None
        request.num_computed_tokens += 1
    return request


def num_hit(manager: KVCacheManager, num_tokens: int) -> int:
    return manager.get_computed_blocks(Request("probe", range(num_tokens), block_hasher=HASHER))[1]


@pytest.mark.parametrize("num_prompt", [1, 7, 8, 9])
def test_a_request_keeps_its_prompt_and_the_window_of_its_answer(num_prompt: int) -> None:
    """Blocks are null where the token computed last sees none of their tokens."""
    manager = make_manager()
    for num_answer in range(40):
        request = run(manager, f"r{num_answer}", num_prompt, num_answer)
        last = request.num_computed_tokens - 1
        is_seen = [key < num_prompt or last - key < 6 for key in range(last + 1)]
        expected = [any(is_seen[start : start + 4]) for start in range(0, last + 1, 4)]
        [ids] = manager.get_block_ids(request.request_id)
        assert [block > 0 for block in ids] == expected
        manager.check_invariants()
        manager.free(request)
    assert manager.usage == 0.0


def test_what_depends_on_the_prompts_end_is_no_hit() -> None:
    """A prompt of 10 tokens and an answer: tokens 0 to 15 see all before them."""
    manager = make_manager()
    run(manager, "r", 10, 30)
    assert num_hit(manager, 60) == 16
    assert make_hits(manager, num_prompt=5, num_tokens=60) == 8
    assert make_hits(manager, num_prompt=6, num_tokens=60) == 12


def make_hits(manager: KVCacheManager, num_prompt: int, num_tokens: int) -> int:
    """Tokens that a request finds whose answer has begun: one that was preempted."""
    request = Request("preempted", range(num_prompt), block_hasher=HASHER)
    request.append_output_token_ids(list(range(num_prompt, num_tokens)))
    return manager.get_computed_blocks(request)[1]


def test_a_group_beside_it_registers_no_more() -> None:
    manager = make_manager(SPEC, FullAttentionSpec(block_size=4, **HEADS))
    run(manager, "r", 10, 30)
    assert num_hit(manager, 60) == 16


def test_a_hit_that_reaches_too_far_is_refused() -> None:
    manager = make_manager()
    run(manager, "r", 30, 1)
    blocks, length = manager.get_computed_blocks(Request("long", range(60), block_hasher=HASHER))
    assert length == 28
    preempted = Request("preempted", range(5), block_hasher=HASHER)
    preempted.append_output_token_ids(list(range(5, 60)))
    before = manager.snapshot()
    with pytest.raises(ValueError, match=r"at most 5 prompt tokens and 6 of the answer \(rswa_window\), got 28 tokens"):
        manager.allocate_slots(preempted, 32, length, blocks)
    assert manager.snapshot() == before


def test_all_is_registered_by_vllms_rules_and_a_token_more_is_kept() -> None:
    """Tokens 12 to 15 are not seen from token 21 on; by vLLM's rules their block goes a step later."""
    for options, first_gone in (({}, 12), (AS_VLLM, 13)):
        for num_answer in (11, 12, 13):
            manager = make_manager(**options)
            run(manager, "r", 10, num_answer)
            [ids] = manager.get_block_ids("r")
            assert (ids[3] > 0) == (num_answer < first_gone)
    manager = make_manager(**AS_VLLM)
    run(manager, "r", 10, 30)
    assert num_hit(manager, 60) == 40


def test_a_preempted_request_needs_no_more_than_it_held() -> None:
    """7 blocks: 3 of the prompt, 6 tokens in flight and 5 before them in at most 4, where 40 tokens fill 10."""
    for num_blocks, fits in ((7, True), (6, False)):
        manager = make_manager(num_blocks=1 + num_blocks, max_in_flight_tokens=6, enable_caching=False)
        request = Request("r", range(10))
        request.append_output_token_ids(list(range(10, 40)))
        given = manager.allocate_slots(request, 6, full_sequence_must_fit=True)
        assert (given is not None) == fits
        while given is not None and request.num_computed_tokens < 34:
            request.num_computed_tokens += 6
            given = manager.allocate_slots(request, min(6, 40 - request.num_computed_tokens))
            assert given is not None


def test_a_step_of_many_rows_releases_as_one_by_one() -> None:
    one, many = make_manager(num_blocks=200), make_manager(num_blocks=200)
    requests = [[run(manager, f"r{n}", n, 3) for n in range(1, 12)] for manager in (one, many)]
    for token in range(30):
        for of_manager in requests:
            for request in of_manager:
                request.append_output_token_ids([token])
        for request in requests[0]:
            assert one.allocate_slots(request, 1) is not None
        rows = np.array([request.row for request in requests[1]])
        assert many.plan_step(rows, 1).num_planned == rows.size
        for of_manager in requests:
            for request in of_manager:
                request.num_computed_tokens += 1
        many.check_invariants()
        assert one.snapshot() == many.snapshot()


def test_children_see_the_prompt_of_their_parent() -> None:
    manager = make_manager()
    request = run(manager, "r", 9, 20)
    children = manager.fork(request, 2)
    assert children is not None
    for child in children:
        for token in range(20):
            child.append_output_token_ids([token])
            assert manager.allocate_slots(child, 1) is not None
            child.num_computed_tokens += 1
        [ids] = manager.get_block_ids(child.request_id)
        assert [block > 0 for block in ids] == [True] * 3 + [False] * 7 + [True] * 3
        manager.check_invariants()


def test_states_that_are_kept_inside_blocks_are_refused_beside_it() -> None:
    states = MambaSpec(
        block_size=4,
        shapes=((4, 2),),
        dtypes=("float32",),
        mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=1,
        prefill_checkpoint_alignment=4,
    )
    with pytest.raises(NotImplementedError, match="num_prefill_checkpoint_blocks=0 of states beside R-SWA"):
        make_manager(SPEC, states)
