"""Checkpoints: what is kept is what hits need there, hits at checkpoints are as long as if all were kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import lcm

import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, ReleaseRules, Request
from kvjax.core.kinds.checkpoint_columns import CheckpointColumns, CheckpointNeed
from kvjax.core.kinds.retention import Retention
from tests.core.manager.manager_lockstep import FULL, Setup, config_of
from tests.core.manager.naive_manager import NaiveGroup
from tests.core.manager.prefill import compute_prompt

HASHER = BlockHasher(2, "xxhash_cbor", seed="0")
MAX_MODEL_LEN = 96
HYBRIDS = {
    "window": Setup((NaiveGroup(2), NaiveGroup(2, window=9)), max_model_len=MAX_MODEL_LEN),
    "window alone": Setup((NaiveGroup(2, window=5),), max_model_len=MAX_MODEL_LEN),
    "sizes": Setup((NaiveGroup(4), NaiveGroup(2, window=5), NaiveGroup(6, window=3)), max_model_len=MAX_MODEL_LEN),
    "chunk": Setup((NaiveGroup(2), NaiveGroup(2, chunk=14)), max_model_len=MAX_MODEL_LEN),
    "EAGLE": Setup((NaiveGroup(2), NaiveGroup(4, window=6)), max_model_len=MAX_MODEL_LEN, eagle=True),
    "Mamba": Setup((NaiveGroup(2), NaiveGroup(4, mamba="align")), max_model_len=MAX_MODEL_LEN),
    "all": Setup(
        (NaiveGroup(4), NaiveGroup(4, mamba="align"), NaiveGroup(2, window=7), NaiveGroup(2, window=1)),
        max_model_len=MAX_MODEL_LEN,
    ),
}
WITH_STATES = ("Mamba", "all")


def alignment(setup: Setup) -> int:
    return lcm(*(group.block_size for group in setup.groups))


def make(setup: Setup, retention: int | None, ends: str = "all") -> KVCacheManager:
    return replace(setup, retention=retention, ends=ends).manager([2_000])


def request(name: str, tokens: list[int]) -> Request:
    return Request(name, tokens, block_hasher=HASHER)


def compute(manager: KVCacheManager, name: str, tokens: list[int], budget: int = MAX_MODEL_LEN) -> int:
    """Computes a prompt in steps of at most `budget` tokens and frees it; the hit."""
    new = request(name, tokens)
    manager.new_step_starts()
    hit = compute_prompt(manager, new, budget)
    manager.check_invariants()
    manager.free(new)
    manager.new_step_starts()
    return hit


def lookup(manager: KVCacheManager, tokens: list[int]) -> int:
    return manager.get_computed_blocks(request("lookup", tokens))[1]


def skipped_by(kind: str, size: int) -> Callable[[np.ndarray], np.ndarray]:
    """Tokens that the token behind so many does not see: of a window, a chunk, or a state of `size`."""
    if kind == "window":
        return lambda lengths: np.maximum(lengths - size + 1, 0)
    return lambda lengths: lengths // size * size if kind == "chunk" else np.maximum(lengths - 1, 0)


@pytest.mark.parametrize("has_probation", [False, True])
@pytest.mark.parametrize("kind", ["window", "chunk", "state"])
@pytest.mark.parametrize("seed", range(20))
def test_what_lasts_is_what_checkpoints_need(kind: str, has_probation: bool, seed: int) -> None:
    """With probation what a row's own need; without it what the interval's do is registered too, and nothing else."""
    rng = np.random.default_rng(seed)
    block_size = int(rng.integers(1, 5))
    step = block_size * int(rng.integers(1, 5))
    interval = step * int(rng.integers(0, 5))
    skipped, num_after = skipped_by(kind, int(rng.integers(1, 40))), int(rng.integers(0, 2))
    retention = Retention(interval, step, int(rng.integers(0, 5)), str(rng.choice(["all", "vllm-0.33"])))
    retention.reserve_rows(3)
    lengths: list[set[int]] = []
    for row in range(3):
        num_tokens, shared = int(rng.integers(1, 200)), int(rng.integers(0, 200)) // step * step
        retention.note_admission(row, num_tokens, shared)
        multiples = range(interval, 400, interval) if interval and not has_probation else ()
        lengths.append({*retention.lengths_for(num_tokens, shared), *multiples} - {0})
    checkpoints = CheckpointColumns(
        CheckpointNeed(block_size, skipped, 400, num_after=num_after), interval, 60, retention, has_probation
    )

    def is_needed(row: int, column: int) -> bool:
        return any(
            int(skipped(np.array(n))) // block_size <= column < n // block_size + num_after for n in lengths[row]
        )

    for rows, columns in ((np.repeat(np.arange(3), 60), np.tile(np.arange(60), 3)), (np.array([1]), np.arange(60))):
        pairs = zip(np.broadcast_to(rows, columns.shape).tolist(), columns.tolist(), strict=True)
        needed = [is_needed(row, column) for row, column in pairs]
        own = checkpoints.find_own(rows, columns) if has_probation else checkpoints.find_kept(rows, columns)
        assert (np.zeros(columns.size, np.bool_) if own is None else own).tolist() == needed
    for row, start, end in ((0, 0, 60), *rng.integers(0, 60, (5, 3)) % (3, 60, 60)):
        stretches = checkpoints.stretches_on_probation(int(row), int(start), int(end))
        in_stretches = [column for first, behind in stretches for column in range(first, behind)]
        rest = [column for column in range(start, end) if not is_needed(row, column)]
        assert in_stretches == (rest if has_probation else [])


@pytest.mark.parametrize("ends", ["all", "vllm-0.33"])
@pytest.mark.parametrize("interval", [0, 1, 2])
@pytest.mark.parametrize("name", HYBRIDS)
def test_a_prompt_that_comes_again_hits_as_much_as_ever(name: str, interval: int, ends: str) -> None:
    """Or more: recurrent states exist where steps end, and with checkpoints steps end where the prompt is hit."""
    setup = HYBRIDS[name]
    rng = np.random.default_rng(3)
    dense, sparse = make(setup, None), make(setup, interval * 2 * alignment(setup), ends)
    for i in range(60):
        tokens = rng.integers(0, 9_999, int(rng.integers(2, MAX_MODEL_LEN))).tolist()
        for manager in (dense, sparse):
            assert compute(manager, f"r{i}", tokens) == 0
        hits = [lookup(manager, tokens) for manager in (dense, sparse)]
        assert hits[0] <= hits[1] if name in WITH_STATES else hits[0] == hits[1]
    num_sparse, num_dense = sparse.block_pool.num_hashed_blocks, dense.block_pool.num_hashed_blocks
    if name not in WITH_STATES:
        assert num_sparse <= num_dense
        assert num_sparse < num_dense or interval or (ends, name) == ("vllm-0.33", "chunk")


@pytest.mark.parametrize("name", [name for name in HYBRIDS if name not in WITH_STATES])
def test_checkpoints_everywhere_hit_as_if_all_were_kept(name: str) -> None:
    """Prompts that part and come again, in one step each."""
    setup = HYBRIDS[name]
    rng = np.random.default_rng(5)
    dense, sparse = make(setup, None), make(setup, alignment(setup))
    trunk = rng.integers(0, 9, MAX_MODEL_LEN).tolist()
    hits = 0
    for i in range(60):
        tokens = (
            trunk[: int(rng.integers(0, MAX_MODEL_LEN - 20))] + rng.integers(0, 9, int(rng.integers(1, 20))).tolist()
        )
        hit = compute(sparse, f"r{i}", tokens)
        assert hit == compute(dense, f"r{i}", tokens)
        hits += hit > 0
    assert hits > 20
    assert sparse.block_pool.num_hashed_blocks <= dense.block_pool.num_hashed_blocks


def test_steps_of_recurrent_groups_end_at_checkpoints() -> None:
    setup = HYBRIDS["Mamba"]
    manager = make(setup, 16)
    new = request("new", list(range(90)))
    assert [manager.limit_step(new, n) for n in (3, 7, 15, 17, 39, 90)] == [0, 4, 12, 16, 32, 80]
    blocks = manager.empty_kv_cache_blocks
    blocks = type(blocks)(blocks.block_ids, blocks.pools, num_shared_tokens=12)
    assert manager.limit_step(new, 90, 0, blocks) == 12
    assert manager.allocate_slots(new, 12, 0, blocks) is not None
    new.num_computed_tokens = 12
    assert manager.limit_step(new, 78) == 68
    sparse = make(setup, 0)
    again = request("again", list(range(88)))
    assert sparse.limit_step(again, 88) == 84  # where the same prompt can go on from
    assert sparse.allocate_slots(again, 84) is not None
    again.num_computed_tokens = 84
    assert sparse.limit_step(again, 4) == 4


@pytest.mark.parametrize(("interval", "first"), [(16, 2_048), (512, 2_048), (528, 2_112), (4_096, 4_096)])
def test_steps_end_at_landmarks(interval: int, first: int) -> None:
    """Whole intervals, each twice as far as the one before; there is none where only own checkpoints are kept."""
    retention = Retention(interval, 16, 0)
    ends = [0]
    while ends[-1] < 40 * first:
        ends.append(retention.step_end(ends[-1], 100 * first, ()))
    assert ends == [0, *(first << n for n in range(7))]
    assert retention.step_end(first, 3 * first, (first + 16,)) == first + 16
    assert retention.step_end(first, 3 * first, (3 * first,)) == 2 * first
    assert Retention(0, 16, 0).step_end(0, 3 * first + 1, ()) == 3 * first + 1
    for rule in ("vllm-0.32", "vllm-0.33"):
        assert Retention(interval, 16, 0, rule).step_end(0, 9 * first + 1, ()) == 9 * first


def test_a_step_with_drafts_ends_at_a_checkpoint_while_two_tokens_are_left() -> None:
    """The step that begins at the last known token is one of decoding, and stays as it is."""
    manager = make(Setup((NaiveGroup(3, mamba="align"),), hash_block_size=3, max_model_len=MAX_MODEL_LEN), 3)
    for num_tokens, num_new in ((5, 3), (4, 4)):
        new = Request("new", range(num_tokens), block_hasher=BlockHasher(3, "xxhash_cbor", seed="0"))
        assert manager.limit_step(new, 4, num_new_computed_tokens=3) == num_new


def test_by_vllms_rules_chunks_keep_everything() -> None:
    setup = Setup((NaiveGroup(2), NaiveGroup(2, chunk=8)), max_model_len=MAX_MODEL_LEN)
    rules = ({"retention_interval": None}, {"retention_interval": 0, "rules": ReleaseRules(retention_ends="vllm-0.33")})
    managers = [KVCacheManager(config_of(list(setup.groups), [2_000]), MAX_MODEL_LEN, 2, **rule) for rule in rules]
    for manager in managers:
        compute(manager, "r", list(range(50)))
    assert managers[0].block_pool.snapshot() == managers[1].block_pool.snapshot()


@pytest.mark.parametrize(
    ("interval", "message"),
    [
        (-12, r"expected retention_interval as a multiple of 12 \(the LCM of the block sizes\), or 0, got -12"),
        (18, r"expected retention_interval as a multiple of 12 .* got 18"),
    ],
)
def test_bad_intervals_are_refused(interval: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(HYBRIDS["sizes"], interval)


def test_without_a_cache_there_is_nothing_to_keep() -> None:
    with pytest.raises(ValueError, match="expected enable_caching=True with retention_interval, got 4 without caching"):
        replace(FULL, caching=False, retention=4).manager([9])


def test_hits_inside_blocks_do_not_go_with_it() -> None:
    with pytest.raises(NotImplementedError, match="retention_interval=4 does not work with sub_block_hits=True"):
        replace(FULL, retention=4, same_step_hits=False).manager([9], sub_block_hits=True)


@pytest.mark.parametrize("dropped", [0, 4])
@pytest.mark.parametrize("num_tokens", range(1, 40))
def test_resent_ends_are_where_vllm_0_33_keeps_them(num_tokens: int, dropped: int) -> None:
    """Blocks of 8: where the same prompt resumes; with EAGLE the aligned lengths of prompt and resend, less one."""
    size, shared = 8, 16
    ends = Retention(0, size, dropped, "vllm-0.33").lengths_for(num_tokens, shared)
    resend, extension = (num_tokens - 1) // size * size, num_tokens // size * size
    expected = {max(resend - size, 0), max(extension - size, 0), shared, 8} if dropped else {resend, shared}
    assert {*ends, 0} == {*expected, 0}


def test_an_unknown_choice_of_ends_is_refused() -> None:
    config = make(HYBRIDS["window"], 0).kv_cache_config
    with pytest.raises(ValueError, match=r"expected retention_ends of all, vllm-0\.32, vllm-0\.33, got 'first'"):
        KVCacheManager(config, MAX_MODEL_LEN, 2, retention_interval=0, rules=ReleaseRules(retention_ends="first"))


@pytest.mark.parametrize("name", ["window", "window alone", "sizes", "chunk"])
def test_idle_memory_is_used_and_what_ended_lasts(name: str) -> None:
    """With probation prompts hit wherever they part; under pressure ends of prompts and answers are what is left."""
    setup = HYBRIDS[name]
    size = alignment(setup)
    dense = make(setup, None)
    pools = [replace(setup, retention=0).manager([n], eviction_policy="probation") for n in (2_000, 140)]
    for manager in (dense, *pools):
        compute(manager, "first", list(range(48)))
        grown = request("grown", list(range(72)))
        blocks, hit = manager.get_computed_blocks(grown)
        assert manager.allocate_slots(grown, 72 - hit, hit, blocks) is not None
        grown.num_computed_tokens = 72
        for token in range(72, 84):
            grown.append_output_token_ids(token)
            assert manager.allocate_slots(grown, 1) is not None
            grown.num_computed_tokens += 1
        manager.free(grown)
    for length in range(2, 84):
        tokens = [*range(length), 999]
        assert lookup(pools[0], tokens) == lookup(dense, tokens)
    fresh, shortest = 0, 28 if name == "chunk" else 0
    while lookup(pools[1], [*range(36), 999]) > shortest:
        fresh += 1
        assert fresh < 40
        compute(pools[1], f"other {fresh}", list(range(1_000 * fresh, 1_000 * fresh + 30)))
    assert lookup(pools[1], [*range(84), 999]) == 84 // size * size


@pytest.mark.parametrize("setup", [HYBRIDS["window"], HYBRIDS["chunk"]], ids=["window", "chunk"])
@pytest.mark.parametrize("seed", range(20))
def test_with_probation_lookups_tell_what_is_registered(setup: Setup, seed: int) -> None:
    """Whatever is evicted: a hit is the longest prefix all of whose needed blocks stand in the index."""
    rng = np.random.default_rng(seed)
    manager = replace(setup, retention=0).manager([120], eviction_policy="probation")
    naive = setup.naive([60])
    trunks = [rng.integers(0, 9, MAX_MODEL_LEN).tolist() for _ in range(3)]
    for i in range(40):
        trunk = trunks[int(rng.integers(3))]
        tokens = trunk[: int(rng.integers(0, 60))] + rng.integers(9, 99, int(rng.integers(1, 20))).tolist()
        new = request(f"r{i}", tokens)
        cached = [set(manager.block_pool.prefix_index.hash_maps[group].snapshot()) for group in range(2)]
        hashes = list(new.block_hashes)
        fits = [
            2 * n
            for n in range((len(tokens) - 1) // 2 + 1)
            if all(hashes[c] in cached[0] for c in range(n))
            and all(hashes[c] in cached[1] for c in naive.needed_for_hit(setup.groups[1], 2 * n))
        ]
        assert compute(manager, new.request_id, tokens) == max(fits)
