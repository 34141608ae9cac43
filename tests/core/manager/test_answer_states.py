"""States of answers: registered every unit, forgotten soon after a later one is there, hit where an answer ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher, FullAttentionSpec, KVCacheConfig, KVCacheManager, MambaSpec, Request
from kvjax.core.kinds.answer_columns import ANSWER_TOKENS
from kvjax.core.kinds.answer_states import STEPS

SIZE = 4
MAX_LEN = 410  # no multiple of the unit
HASHER = BlockHasher(SIZE, "xxhash_cbor", seed="0")
FULL = FullAttentionSpec(block_size=SIZE, num_kv_heads=1, head_size=8, dtype="float32")


def make(num_blocks: int = 900, drafts: int = 0, interval: int | str = "auto", **options: Any) -> KVCacheManager:
    states = MambaSpec(
        block_size=SIZE,
        shapes=((3, 2), (2, 5)),
        dtypes=("bfloat16", "float32"),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
    )
    config = KVCacheConfig.single_pool(num_blocks, FULL, states)
    return KVCacheManager(config, MAX_LEN, SIZE, retention_interval=interval, **options)


def prefill(manager: KVCacheManager, request: Request) -> int:
    """The tokens of its hit; all of its tokens are computed."""
    blocks, hit = manager.get_computed_blocks(request)
    request_hit, given = hit, blocks
    while (left := request.num_tokens - request.num_computed_tokens - request_hit) > 0:
        count = manager.limit_step(request, min(left, 40), request_hit, given)
        assert manager.allocate_slots(request, count, request_hit, given) is not None
        request.num_computed_tokens += request_hit + count
        request_hit, given = 0, None
        manager.new_step_starts()
    return hit


def decode(manager: KVCacheManager, requests: list[Request], rng: np.random.Generator) -> None:
    for request in requests:
        request.append_output_token_ids(int(rng.integers(100)))
    rows = np.array([request.row for request in requests])
    assert manager.plan_step(rows, 1).num_planned == len(requests)
    manager.request_table.num_computed_tokens[rows] += 1
    manager.new_step_starts()


def registered(manager: KVCacheManager, request: Request) -> set[int]:
    """Lengths of the request at which its state can be found."""
    pool, hashes = manager.block_pool, request.block_hashes
    found = [bool(pool.find_each(hashes[i : i + 1], 1)[0] > 0) for i in range(len(hashes))]
    return {(i + 1) * SIZE for i in np.flatnonzero(found).tolist()}


@pytest.mark.parametrize("eagle", [False, True])
@pytest.mark.parametrize("interval", ["auto", 0, 16, 128])
@pytest.mark.parametrize("num_prompt", [3, 63, 64, 70, 131])
def test_the_last_state_of_an_answer_stays_and_those_of_the_interval(
    num_prompt: int, interval: int | str, eagle: bool
) -> None:
    manager = make(interval=interval, use_eagle=eagle)
    rng = np.random.default_rng(num_prompt)
    request = Request("r", range(num_prompt), block_hasher=HASHER)
    prefill(manager, request)
    dropped = SIZE if eagle else 0
    last_of_prompt = max(num_prompt - dropped, 0) // SIZE * SIZE
    at_first = registered(manager, request)
    of_prompt = {length for length in at_first if length <= last_of_prompt}
    unit = interval if interval == 16 else ANSWER_TOKENS
    kept_every = {"auto": 512, 0: MAX_LEN + 1}.get(interval, interval)
    while request.num_tokens < MAX_LEN:
        decode(manager, [request], rng)
        done = request.num_computed_tokens
        ends = sorted(at_first - of_prompt)
        ends += [length for length in range(unit, done + 1, unit) if length > num_prompt]
        expected = {*ends[len(ends) - (2 if eagle else 1) :], *(end for end in ends if end % kept_every == 0)}
        if done % unit > STEPS:
            assert registered(manager, request) - of_prompt == expected, done
        else:
            assert registered(manager, request) >= expected
        assert np.count_nonzero(manager.get_block_ids("r")[1]) <= 2
        manager.check_invariants()
    manager.free(request)
    following = Request("s", [*request.token_ids.tolist(), 7, 7, 7], block_hasher=HASHER)
    longest = max(end for end in registered(manager, request) if end + dropped <= MAX_LEN)
    assert manager.get_computed_blocks(following)[1] == longest


@pytest.mark.parametrize("num_tokens", [64, 67, 100, 127])
def test_what_was_hit_stays(num_tokens: int) -> None:
    """Another request hits the newest state while the answer goes on."""
    manager, rng = make(), np.random.default_rng(num_tokens)
    request = Request("r", range(40), block_hasher=HASHER)
    prefill(manager, request)
    while request.num_tokens < num_tokens:
        decode(manager, [request], rng)
    other = Request("s", [*request.token_ids.tolist(), 1, 2, 3], block_hasher=HASHER)
    assert prefill(manager, other) == 64
    for _ in range(150):
        decode(manager, [request, other], rng)
    assert 64 in registered(manager, request)
    manager.free(other)
    assert prefill(manager, Request("t", [*request.token_ids.tolist()[:66], 9, 9], block_hasher=HASHER)) == 64


def test_an_answer_that_another_has_too_keeps_the_state_of_each() -> None:
    """Equal prompts, equal answers, blocks of their own: what one forgets the other may hold."""
    manager = make()
    requests = [Request(name, range(40), block_hasher=HASHER) for name in "rs"]
    for request in requests:
        prefill(manager, request)
    for _ in range(100):
        decode(manager, requests, np.random.default_rng(0))
        manager.check_invariants()
    assert 128 in registered(manager, requests[0])
    assert 64 not in registered(manager, requests[0])


@pytest.mark.parametrize("drafts", [0, 2])
def test_children_go_on_from_a_state_of_their_own(drafts: int) -> None:
    manager, rng = make(drafts=drafts), np.random.default_rng(0)
    request = Request("r", range(40), block_hasher=HASHER)
    prefill(manager, request)
    for _ in range(50):
        decode(manager, [request], rng)
    children = manager.fork(request, 2)
    assert children is not None
    for _ in range(70):
        decode(manager, [request, *children], rng)
        manager.check_invariants()
    ends = [{length for length in registered(manager, each) if length > 40} for each in (request, *children)]
    assert ends == [{128}, {128}, {128}]


@pytest.mark.parametrize("num_blocks", [180, 260, 900])
@pytest.mark.parametrize("seed", range(3))
def test_a_step_at_once_is_a_step_row_by_row(seed: int, num_blocks: int) -> None:
    """Also where memory is full and each step evicts."""
    managers = [make(num_blocks), make(num_blocks)]
    rng = np.random.default_rng(seed)
    prompts = [range(start, start + int(rng.integers(5, 90))) for start in range(0, 600, 100)]
    held = [[Request(f"r{i}", prompt, block_hasher=HASHER) for i, prompt in enumerate(prompts)] for _ in managers]
    for manager, requests in zip(managers, held, strict=True):
        for request in requests:
            prefill(manager, request)
    for _ in range(200):
        token = int(rng.integers(100))
        for requests in held:
            for request in requests:
                request.append_output_token_ids(token)
        at_once, one_by_one = managers
        rows = np.array([request.row for request in held[0]])
        num_planned = at_once.plan_step(rows, 1).num_planned
        fitted = []
        for request in held[1]:
            if one_by_one.allocate_slots(request, 1) is None:
                break
            fitted.append(request)
        assert num_planned == len(fitted)
        for manager, requests in zip(managers, held, strict=True):
            manager.request_table.num_computed_tokens[rows[:num_planned]] += 1
            for request in requests[num_planned:]:
                manager.free(request)
            del requests[num_planned:]
            manager.new_step_starts()
        assert managers[0].snapshot() == managers[1].snapshot()
        if not held[0]:
            return


def test_by_the_rules_of_vllm_nothing_is_forgotten() -> None:
    manager, rng = make(eviction_policy="lru", interval=None), np.random.default_rng(0)
    request = Request("r", range(40), block_hasher=HASHER)
    prefill(manager, request)
    for _ in range(40):
        decode(manager, [request], rng)
    assert registered(manager, request) >= set(range(44, 81, SIZE))


def test_a_restored_manager_forgets_what_the_saved_one_would() -> None:
    manager, rng = make(drafts=2), np.random.default_rng(0)
    requests = [Request(f"r{i}", range(i, i + 30), block_hasher=HASHER) for i in range(5)]
    for request in requests:
        prefill(manager, request)
    for _ in range(101):
        decode(manager, requests, rng)
    restored = KVCacheManager.restore(manager.save_state())
    own = [request for request in restored.request_table.requests if request is not None]
    for _ in range(100):
        token = int(rng.integers(100))
        for each, of_each in ((manager, requests), (restored, own)):
            decode(each, of_each, np.random.default_rng(token))
        assert manager.snapshot() == restored.snapshot()
    restored.check_invariants()


def test_each_state_is_forgotten_once(monkeypatch: pytest.MonkeyPatch) -> None:
    manager, rng, given = make(interval=128), np.random.default_rng(0), []
    pool = manager.block_pool
    forget = pool.forget_doubtful
    monkeypatch.setattr(pool, "forget_doubtful", lambda ids, hashes: (given.extend(ids.ravel()), forget(ids, hashes)))
    request = Request("r", range(40), block_hasher=HASHER)
    prefill(manager, request)
    while request.num_tokens < MAX_LEN - 1:
        decode(manager, [request], rng)
    assert len(given) == len({64, 192, 320})
