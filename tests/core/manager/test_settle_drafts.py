"""Drafts and their rejection leave nothing behind: a manager that verifies drafts caches what one without them does."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from kvjax.core import (
    BlockHasher,
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    Request,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvjax.core.kinds.ring_state import RingStateSpec
from tests.core.manager.page_contents import PageContents, Writes

HEADS = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
LATENT = {"head_size": 8, "dtype": "float32"}
HASHER = BlockHasher(2, "xxhash_cbor", seed="0")
MAX_MODEL_LEN = 40
MOST_DRAFTS = 3


def state(drafts: int, block_size: int = 4, mode: str = "align") -> MambaSpec:
    options = {"num_speculative_blocks": drafts, "mamba_cache_mode": mode}
    return MambaSpec(block_size=block_size, shapes=((4, 2),), dtypes=("float32",), **options)


def ring(drafts: int, block_size: int = 4) -> RingStateSpec:
    adds: dict[str, Any] = {"token_shapes": ((4,),), "token_dtypes": ("float32",)}
    return RingStateSpec.of(replace(state(0, block_size), **adds), ring_tokens=5, num_drafts=drafts)


def specs_of(name: str, drafts: int) -> list[KVCacheSpec]:
    """Of a deployment whose recurrent groups have states for so many drafts."""
    full = FullAttentionSpec(block_size=2, **HEADS)
    window = SlidingWindowSpec(block_size=2, sliding_window=5, **HEADS)
    return {
        "full": [full],
        "window": [window],
        "window_first": [SlidingWindowSpec(block_size=2, sliding_window=5, num_sink_tokens=3, **HEADS)],
        "hybrid": [full, window, SlidingWindowSpec(block_size=4, sliding_window=7, **HEADS)],
        "chunked": [full, ChunkedLocalAttentionSpec(block_size=2, attention_chunk_size=8, **HEADS)],
        "sink": [SinkFullAttentionSpec(block_size=2, sink_len=4, **HEADS)],
        "mla": [
            MLAAttentionSpec(block_size=4, **LATENT),
            SlidingWindowMLASpec(block_size=2, sliding_window=5, **LATENT),
        ],
        "compressed": [
            MLAAttentionSpec(block_size=8, tokens_per_state=4, **LATENT),
            SlidingWindowMLASpec(block_size=4, sliding_window=8, **LATENT),
        ],
        "mamba": [state(drafts)],
        "small_mamba": [full, state(drafts, 2)],
        "full_mamba": [full, state(drafts), state(drafts, 8)],
        "window_mamba": [window, state(drafts, 6)],
        "ring": [ring(drafts)],
        "full_ring": [full, ring(drafts, 8), ring(drafts, 4)],
        "mamba_none": [full, state(drafts, mode="none")],
    }[name]


NAMES = ["full", "window", "window_first", "hybrid", "chunked", "sink", "mla", "compressed"]
RECURRENT = ["mamba", "full_mamba", "window_mamba", "mamba_none", "ring", "full_ring"]


@dataclass
class Decoding:
    """A manager that verifies drafts of requests whose tokens are known beforehand to who draws them."""

    manager: KVCacheManager
    texts: dict[str, list[int]]
    device: PageContents = field(init=False)
    requests: dict[str, Request] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.device = PageContents(self.manager)

    def admit(self, name: str, num_tokens: int) -> int | None:
        """Starts a request, or starts it again; its prefix hit, or None: it does not fit."""
        request = self.requests.get(name) or Request(name, self.texts[name][:num_tokens], block_hasher=HASHER)
        self.manager.new_step_starts()
        hit, num_hit = self.manager.get_computed_blocks(request)
        count = self.manager.limit_step(request, request.num_tokens - num_hit, num_hit)
        if self.manager.allocate_slots(request, count, num_hit, hit) is None:
            return None
        self.requests[name], request.num_computed_tokens = request, num_hit
        self.device.run([Writes(request, count)])
        request.num_computed_tokens += count
        while (left := request.num_tokens - request.num_computed_tokens) > 0:
            count = self.manager.limit_step(request, left)
            if self.manager.allocate_slots(request, count) is None:
                self.preempt(name)
                return None
            self.device.run([Writes(request, count)])
            request.num_computed_tokens += count
        self.sample(request, 1)
        return num_hit

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self.manager.free(request)
        request.num_computed_tokens = 0

    def sample(self, request: Request, count: int) -> None:
        request.append_output_token_ids(self.texts[request.request_id][request.num_tokens :][:count])

    def cut(self, drafts: dict[str, list[int]]) -> dict[str, list[int]]:
        """What of the drafts the manager lets one step verify."""
        rows = [self.requests[name].row for name in drafts]
        limits = self.manager.limit_drafts(rows, [len(own) for own in drafts.values()])
        return {name: own[:limit] for (name, own), limit in zip(drafts.items(), limits.tolist(), strict=True)}

    def plan(self, names: list[str], drafts: dict[str, list[int]]) -> int:
        """Blocks for a step; how many of the requests fit."""
        self.manager.new_step_starts()
        rows = [self.requests[name].row for name in names]
        return self.manager.plan_step(rows, [1 + len(drafts.get(name, ())) for name in names]).num_planned

    def run(self, names: list[str], drafts: dict[str, list[int]]) -> dict[str, int]:
        """Computes what was planned, and settles; how many drafts of each are right."""
        parts, accepted = [], {}
        for name in names:
            request, own = self.requests[name], drafts.get(name, [])
            truth = self.texts[name][request.num_tokens :][: len(own)]
            wrong = [i for i, (one, two) in enumerate(zip(own, truth, strict=True)) if one != two]
            accepted[name] = wrong[0] if wrong else len(own)
            parts.append(Writes(request, 1 + len(own), own, accepted[name]))
        self.device.run(parts)
        for part in parts:
            part.request.num_computed_tokens += part.count
        for part in parts:
            self.sample(part.request, part.num_accepted + 1)
        rejected = [part.count - 1 - part.num_accepted for part in parts]
        self.manager.settle_drafts([part.request.row for part in parts], rejected)
        for part in parts:
            self.device.check(part.request, part.request.num_computed_tokens)
        self.manager.check_invariants()
        return accepted

    def cached(self) -> dict[str, list[list[bool]]]:
        """Which blocks of each request every group has cached, and hits of its prefixes."""
        found = {}
        for name, text in self.texts.items():
            hashes = Request(name, text, block_hasher=HASHER).block_hashes
            by_group = []
            for manager in self.manager.groups.managers:
                of_size = self.manager.groups.hashing.of_block_size(hashes, manager.block_size)
                by_group += [
                    [bool(manager.block_pool.find_run([h], i).size) for h in of_size] for i in manager.group_ids
                ]
            found[name] = by_group
        return found

    def hits(self) -> dict[str, list[int]]:
        self.manager.new_step_starts()
        return {
            name: [
                self.manager.get_computed_blocks(Request("hit", [*text[:length], 9], block_hasher=HASHER))[1]
                for length in range(1, len(text))
            ]
            for name, text in self.texts.items()
        }


def make(name: str, drafts: int, num_blocks: int, texts: dict[str, list[int]], **options: Any) -> Decoding:
    config = KVCacheConfig.single_pool(num_blocks, *specs_of(name, drafts))
    return Decoding(KVCacheManager(config, MAX_MODEL_LEN, hash_block_size=2, **options), texts)


def interval_options(name: str, num_units: int) -> dict[str, int]:
    """A recurrent state of an answer is kept every so many units, so that drafts cross lengths of kept states."""
    units = {"mamba": 4, "small_mamba": 4, "full_mamba": 8, "window_mamba": 6, "ring": 4, "full_ring": 8}
    unit = units[name]
    return {"retention_interval": num_units * unit}


def random_texts(rng: np.random.Generator, count: int) -> dict[str, list[int]]:
    """Some begin alike."""
    trunk = rng.integers(0, 3, MAX_MODEL_LEN).tolist()
    kept = rng.integers(0, 12, count).tolist()
    return {f"r{i}": trunk[:k] + rng.integers(0, 3, MAX_MODEL_LEN - k).tolist() for i, k in enumerate(kept)}


def draw_drafts(rng: np.random.Generator, request: Request, text: list[int], most: int = MOST_DRAFTS) -> list[int]:
    """Drafts that are right more often than not, as far as the longest request allows."""
    count = int(rng.integers(0, min(most, MAX_MODEL_LEN - request.num_tokens - 1) + 1))
    return [int(t if rng.random() < 0.7 else 4) for t in text[request.num_tokens :][:count]]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", NAMES + RECURRENT)
def test_caches_what_a_manager_caches_that_never_drafted(name: str, seed: int) -> None:
    """The same blocks registered after every plan, the same hits of every prefix, with preemption between."""
    check_against_no_drafts(name, seed, {})


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_units", [1, 2, 3])
@pytest.mark.parametrize("name", ["mamba", "full_mamba", "window_mamba", "ring", "full_ring"])
def test_states_of_answers_are_those_of_a_manager_that_never_drafted(name: str, num_units: int, seed: int) -> None:
    check_against_no_drafts(name, seed, interval_options(name, num_units))


def check_against_no_drafts(name: str, seed: int, options: dict[str, int]) -> None:
    rng = np.random.default_rng(seed)
    texts = random_texts(rng, 4)
    drafted, plain = (make(name, drafts, 400, texts, **options) for drafts in (MOST_DRAFTS, 0))
    lengths = rng.integers(1, 9, len(texts)).tolist()
    for request, length in zip(texts, lengths, strict=True):
        assert drafted.admit(request, length) == plain.admit(request, length)
    for _ in range(14):
        running = [name for name in texts if drafted.requests[name].num_tokens < MAX_MODEL_LEN - 1]
        drafts = drafted.cut({name: draw_drafts(rng, drafted.requests[name], texts[name]) for name in running})
        assert drafted.plan(running, drafts) == len(running)
        assert plain.plan(running, {}) == len(running)
        assert drafted.cached() == plain.cached()
        accepted = drafted.run(running, drafts)
        plain.run(running, {})
        for again in range(MOST_DRAFTS):
            behind = [name for name in running if accepted[name] > again]
            assert plain.plan(behind, {}) == len(behind)
            plain.run(behind, {})
        states = [
            [(r.token_ids.tolist(), r.num_computed_tokens) for r in each.requests.values()] for each in (drafted, plain)
        ]
        assert states[0] == states[1]
        if rng.random() < 0.3:
            stopped = str(rng.choice(list(texts)))
            if drafted.requests[stopped].num_tokens < MAX_MODEL_LEN - 1:
                for each in (drafted, plain):
                    each.plan([stopped], {})
                    each.run([stopped], {})
                    each.preempt(stopped)
                assert drafted.admit(stopped, 0) == plain.admit(stopped, 0)
    for each in (drafted, plain):
        for request in each.requests.values():
            each.manager.free(request)
    assert drafted.hits() == plain.hits()
    assert drafted.manager.block_pool.num_free_blocks == plain.manager.block_pool.num_free_blocks


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no_caching"])
@pytest.mark.parametrize("name", NAMES + RECURRENT)
def test_every_pool_size_ends_all_requests_or_refuses_them(name: str, caching: bool) -> None:
    """Under preemption every token reads what it should, and no block is left held."""
    check_every_pool_size(name, {"enable_caching": caching})


@pytest.mark.parametrize("num_units", [1, 2])
@pytest.mark.parametrize("name", ["mamba", "small_mamba", "full_mamba", "window_mamba", "ring", "full_ring"])
def test_every_pool_size_with_states_of_answers(name: str, num_units: int) -> None:
    """Also where a step crosses more than a block, so that the state before it is in a column behind its own."""
    check_every_pool_size(name, {"enable_caching": True, **interval_options(name, num_units)})


def check_every_pool_size(name: str, options: dict[str, Any]) -> None:
    num_finished = []
    sinks = 2 * (name == "sink")
    for num_blocks in (*range(2 + sinks, 18), 22, 27, 34) if options["enable_caching"] else (2 + sinks, 7, 12, 20, 34):
        rng = np.random.default_rng(num_blocks)
        texts = random_texts(rng, 3)
        decoding = make(name, MOST_DRAFTS, num_blocks, texts, **options)
        free = decoding.manager.block_pool.num_free_blocks
        waiting, running, finished = list(texts), [], 0
        while waiting or running:
            drafts = {
                each: draw_drafts(rng, decoding.requests[each], texts[each], int(rng.integers(0, MOST_DRAFTS + 1)))
                for each in running
            }
            drafts = decoding.cut(drafts)
            planned = decoding.plan(running, drafts)
            while planned < len(running):
                stopped = running.pop()
                decoding.preempt(stopped)
                waiting.insert(0, stopped)
                planned += decoding.plan(running[planned:], drafts) if planned < len(running) else 0
            decoding.run(running, drafts)
            for each in [each for each in running if decoding.requests[each].num_tokens >= MAX_MODEL_LEN - 1]:
                running.remove(each)
                decoding.manager.free(decoding.requests[each])
                finished += 1
            if waiting and decoding.admit(waiting[0], int(rng.integers(1, 9))) is not None:
                running.append(waiting.pop(0))
            elif not running:
                break  # the pool is too small for one request
        assert decoding.manager.block_pool.num_free_blocks == free
        num_finished.append(finished)
    if name != "ring":  # of which one page may be enough
        assert num_finished[0] == 0
    assert num_finished[-1] == 3


# -- one call


def started(name: str = "full_mamba", num_tokens: int = 9) -> tuple[KVCacheManager, Request]:
    """A request whose step of one token and three drafts is computed."""
    manager = KVCacheManager(KVCacheConfig.single_pool(50, *specs_of(name, 3)), MAX_MODEL_LEN, hash_block_size=2)
    request = Request("r", range(num_tokens), block_hasher=HASHER)
    for count in (num_tokens - 1, 4):
        assert manager.allocate_slots(request, count) is not None
        request.num_computed_tokens += count
    return manager, request


def test_tokens_fall_and_blocks_stay() -> None:
    manager, request = started("hybrid")
    blocks = manager.get_block_ids("r")
    assert all(update.rows.size == 0 for update in manager.settle_drafts([request.row], 2))
    assert request.num_computed_tokens == 10
    assert manager.get_block_ids("r") == blocks


def test_bad_counts_change_nothing() -> None:
    manager, request = started()
    row = request.row
    before = manager.snapshot()
    for rows, counts, message in (
        ([row], [-1], "expected num_rejected >= 0, got -1"),
        ([row], [1, 1], r"expected num_rejected for 1 rows or one number, got shape \[2\]"),
        ([row], [1.5], "expected num_rejected as integers, got float64"),
        ([row], [4], r"row 0, groups \(1,\): expected at most 3 rejected drafts, as there are states for, got 4"),
        ([row], [12], r"row 0: expected fewer rejected drafts than its 12 computed tokens, got 12"),
        (
            [row],
            [5],
            "row 0: expected rejected drafts behind the 8 tokens whose blocks are cached, got 5 of 12 computed",
        ),
        ([row, row], 1, "expected distinct rows"),
        ([row + 1], 1, "expected rows that a request owns, got row 1"),
        ([-1], 1, "expected rows in"),
    ):
        with pytest.raises(ValueError, match=message):
            manager.settle_drafts(rows, counts)
        assert manager.snapshot() == before
    assert manager.settle_drafts([], 1) == manager.settle_drafts([row], 0)
    assert manager.snapshot() == before
