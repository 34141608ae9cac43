"""What every kind owes the coordinator: one suite over the registry, a kind of a user's own among them.

Nothing here knows a kind. A law is stated from `get_num_skipped_tokens`, the one thing that a kind alone can say, from
the spec's flags, and from what the pool is left with.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvjax.core import (
    KVCacheConfig,
    KVCacheManager,
    KVCacheSpec,
    Request,
    SingleTypeKVCacheManager,
    registered_specs,
)
from kvjax.core.kinds.prefix_lookup import PrefixLookup
from kvjax.core.spec import NEVER
from tests.core.kinds.contract_world import MAX_MODEL_LEN, World
from tests.core.kinds.examples import EXAMPLES
from tests.plain_lru import PLAIN_LRU

NEVER_CACHED = ("cross", "mamba_none", "buffer", "running", "mla_window_replayed")
CACHEABLE = {name: spec for name, spec in EXAMPLES.items() if name not in NEVER_CACHED}
every_kind = pytest.mark.parametrize("spec", EXAMPLES.values(), ids=EXAMPLES)
every_cacheable_kind = pytest.mark.parametrize("spec", CACHEABLE.values(), ids=CACHEABLE)


def test_every_registered_kind_is_here() -> None:
    ours = {spec_class for spec_class in registered_specs() if spec_class.__module__.startswith("kvjax.")}
    assert ours <= {type(spec) for spec in EXAMPLES.values()}


def first_seen(kind: SingleTypeKVCacheManager, num_computed: int) -> int:
    """The first column of the tokens that the next token sees, but for those that all others see."""
    window = kind.kv_cache_spec.rswa_window
    skipped = kind.get_num_skipped_tokens(num_computed) if window is None else max(num_computed - window + 1, 0)
    return skipped // kind.block_size


def num_kept(kind: SingleTypeKVCacheManager, request: Request) -> int:
    """Columns of the tokens that all others see."""
    spec = kind.kv_cache_spec
    tokens = spec.num_sink_tokens if spec.rswa_window is None else request.num_prompt_tokens
    return -(-tokens // kind.block_size)


def seen_columns(kind: SingleTypeKVCacheManager, request: Request) -> list[int]:
    """Columns of the tokens that a request's next token sees."""
    computed = request.num_computed_tokens
    kept, first = num_kept(kind, request), first_seen(kind, computed)
    return [column for column in range(-(-computed // kind.block_size)) if column < kept or column >= first]


# -- specs


@every_kind
def test_a_spec_says_what_its_page_takes(spec: KVCacheSpec) -> None:
    assert spec.kind.isidentifier()
    assert spec.page_size_bytes > 0
    for platform in ("cpu", "gpu", "tpu"):
        layout = spec.page_layout(platform)
        assert layout.page_bytes >= sum(array.page_bytes for array in layout.arrays) > 0
    assert {spec: 1}[spec] == 1


@every_kind
def test_the_most_blocks_of_a_request_grow_with_length_and_tokens_in_flight(spec: KVCacheSpec) -> None:
    lengths, in_flight = (1, 7, 8, 20, 64), (1, 3, 16)
    most = np.array([[spec.max_blocks_per_request(length, tokens) for tokens in in_flight] for length in lengths])
    assert (most >= 1).all()
    assert (np.diff(most, axis=0) >= 0).all()
    assert (np.diff(most, axis=1) >= 0).all()


@every_kind
def test_one_token_count_and_many_are_skipped_alike(spec: KVCacheSpec) -> None:
    kind = World(spec, 0).kind
    computed = np.arange(60)
    skipped = kind.get_num_skipped_tokens(computed)
    assert skipped.tolist() == [kind.get_num_skipped_tokens(n) for n in range(60)]
    assert (np.diff(skipped) >= 0).all()
    assert (skipped <= computed).all()
    for live in range(12):
        release = kind.tokens_until_release(live)
        assert release == kind.tokens_until_release(np.array([live]))[0]
        gone = np.flatnonzero([first_seen(kind, n) > live for n in range(60)])
        assert release > 59 if gone.size == 0 else release == gone[0]


# -- allocation


@every_kind
@pytest.mark.parametrize(("num_groups", "num_blocks"), [(1, 8), (2, 16), (2, 40)])
def test_needed_blocks_are_taken_and_a_refusal_lacks_them(spec: KVCacheSpec, num_groups: int, num_blocks: int) -> None:
    """`World` asserts it at every call, and that a refused call changes nothing."""
    for seed in range(2):
        World(spec, seed, num_groups, num_blocks).live(60)


@every_kind
@pytest.mark.parametrize("lacking", [0, 1])
def test_exactly_the_needed_blocks_suffice(spec: KVCacheSpec, lacking: int) -> None:
    for seed in range(8):
        world = World(spec, seed, num_groups=2)
        request = world.new_request()
        encoder = 5 if world.kind.reads_encoder else 0
        no_ids = world.manager.groups.no_ids
        [needed] = world.manager.block_needs.of_new(request.num_tokens, no_ids, 0, False, encoder)
        held = world.manager.block_pool.get_new_blocks(world.num_free - needed + lacking)
        fits = world.manager.allocate_slots(request, request.num_tokens, num_encoder_tokens=encoder) is not None
        assert fits == (lacking == 0)
        world.manager.block_pool.free_blocks(held)


@every_kind
def test_what_the_next_token_sees_has_blocks_of_its_own(spec: KVCacheSpec) -> None:
    """Without a cache nobody shares."""
    for seed in range(4):
        world = World(spec, seed, 2, options={"enable_caching": False})
        for _ in range(40):
            if not world.running or world.rng.random() < 0.3:
                world.admit()
            else:
                world.step()
            held = np.concatenate([world.columns(request).ravel() for request in world.running])
            held = held[held > 0]
            assert np.unique(held).size == held.size
            for request in world.running:
                columns = world.columns(request)
                if world.kind.reads_encoder:
                    assert columns.all()
                    continue
                assert columns[:, seen_columns(world.kind, request)].all()


@every_kind
def test_a_request_never_holds_more_than_its_worst_case(spec: KVCacheSpec) -> None:
    for seed, in_flight in product(range(3), (1, 4)):
        world = World(spec, seed, 2, 60, {"max_in_flight_tokens": in_flight, "enable_caching": False})
        request = Request("r", [1])
        encoder = 7 if world.kind.reads_encoder else 0
        assert world.manager.allocate_slots(request, 1, num_encoder_tokens=encoder) is not None
        request.num_computed_tokens = 1
        while request.num_computed_tokens < MAX_MODEL_LEN:
            new = min(world.some(1, in_flight), MAX_MODEL_LEN - request.num_computed_tokens)
            request.append_output_token_ids([1] * new)
            assert world.manager.allocate_slots(request, new) is not None
            request.num_computed_tokens += new
            held = int((world.columns(request) > 0).sum())
            assert held <= world.kind.worst_case_blocks(request.num_computed_tokens)
            assert held <= 2 * spec.max_blocks_per_request(MAX_MODEL_LEN, in_flight)


# -- release


@every_kind
def test_exactly_what_no_token_sees_any_more_goes_back(spec: KVCacheSpec) -> None:
    for seed in range(6):
        world = World(spec, seed, 2)
        world.admit()
        world.admit()
        request = world.running[0]
        columns, kind = world.columns(request), world.kind
        settled = world.some(0, request.num_computed_tokens)
        refs = world.manager.block_pool.ref_count.copy()
        world.manager.remove_skipped_blocks(request.request_id, settled)
        first = first_seen(kind, settled) if kind.releases else 0
        kept = num_kept(kind, request)
        gone, seen = columns[:, kept:first], [*range(kept), *range(max(kept, first), columns.shape[1])]
        seen = [column for column in seen if column < columns.shape[1]]
        assert not world.columns(request)[:, kept:first].any()
        assert (world.columns(request)[:, seen] == columns[:, seen]).all()
        np.subtract.at(refs, gone[gone > 0], 1)
        assert (world.manager.block_pool.ref_count == refs).all()
        after = world.manager.snapshot()
        for less in range(settled + 1):
            world.manager.remove_skipped_blocks(request.request_id, less)
        assert world.manager.snapshot() == after


@every_kind
def test_a_free_gives_everything_back_the_last_block_first(spec: KVCacheSpec) -> None:
    for seed in range(4):
        world = World(spec, seed, 2, options=dict(PLAIN_LRU))
        world.live(30)
        while world.running:
            request = world.running[0]
            columns = world.columns(request)
            refs = world.manager.block_pool.ref_count.copy()
            order = list(world.manager.snapshot().pools[0].free_order)
            world.manager.free(world.running.pop(0))
            back = [block for block in columns[:, ::-1].ravel().tolist() if block and refs[block] == 1]
            assert list(world.manager.snapshot().pools[0].free_order) == order + back
        assert world.manager.usage == 0.0


# -- hits


def brute_force_hit(kind: SingleTypeKVCacheManager, lookup: PrefixLookup, is_cached: np.ndarray) -> int:
    """The longest hit in tokens; bool[k] says which blocks every group has."""
    for length in range(lookup.max_length - lookup.max_length % lookup.alignment, 0, -lookup.alignment):
        blocks = length // kind.block_size
        start = kind.get_num_skipped_tokens(length) // kind.block_size
        start -= lookup.needs_last_block and start == blocks
        end = blocks + lookup.drop_last_block
        needed = is_cached[start : blocks if kind.holds_states else end]  # a state follows from the one before
        first = is_cached[: min(-(-kind.kv_cache_spec.num_sink_tokens // kind.block_size), end)]  # all tokens see them
        if end * kind.block_size <= lookup.max_length and end <= is_cached.size and needed.all() and first.all():
            return length
    return 0


@every_cacheable_kind
def test_the_longest_hit_agrees_with_brute_force(spec: KVCacheSpec) -> None:
    found = 0
    for seed in range(60):
        world = World(spec, seed, 2, 60)
        kind, rng, pool = world.kind, world.rng, world.manager.block_pool
        hashes = [rng.bytes(16) for _ in range(rng.integers(1, 12))]
        is_cached = np.ones(len(hashes), bool)
        for group_id in kind.group_ids:
            of_group = rng.random(len(hashes)) < 0.8
            chosen = np.flatnonzero(of_group)
            ids = pool.get_new_blocks(chosen.size)
            pool.register_many(ids, [hashes[i] for i in chosen], group_id)
            pool.free_blocks(ids)
            is_cached &= of_group
        for drops in {False, spec.supports_eagle}:
            alignment = kind.block_size * world.some(1, 3)
            max_length, needs_last = world.some(0, len(hashes) * kind.block_size + 3), bool(world.some(0, 1))
            lookup = PrefixLookup(hashes, max_length, alignment, drops, needs_last)
            hit = kind.find_longest_cache_hit(lookup)
            length = brute_force_hit(kind, lookup, is_cached)
            assert hit.shape == (2, length // kind.block_size), lookup
            start = kind.get_num_skipped_tokens(length) // kind.block_size
            start -= needs_last and length > 0 and start == hit.shape[1]
            kept = -(-spec.num_sink_tokens // kind.block_size)
            assert not hit[:, kept:start].any()
            seen = [column for column in range(hit.shape[1]) if column < kept or column >= start]
            for group_id, ids in zip(kind.group_ids, hit, strict=True):
                expected = [pool.get_cached_block(hashes[column], [group_id]) for column in seen]
                assert [[block] for block in ids[seen].tolist()] == expected
            found += length > 0
    assert found > 10


@every_kind
def test_the_common_prefix_agrees_with_brute_force(spec: KVCacheSpec) -> None:
    """Of kinds that keep their prefix; the others share none."""
    most = 0
    for seed in range(12):
        world = World(spec, seed, 2, 60)
        for _ in range(25):
            if len(world.running) > 3:
                world.leave()
            else:
                world.admit()
            tables = [world.columns(request) for request in world.running]
            for request, own in zip(world.running, tables, strict=True):
                counts = world.manager.get_num_common_prefix_blocks(request.request_id)
                width = min(table.shape[1] for table in tables)
                same = np.logical_and.reduce([table[:, :width] == own[:, :width] for table in tables])
                expected = np.minimum.accumulate(same, axis=1).sum(axis=1).tolist()
                keeps = world.kind.is_prefix_cacheable and not world.kind.releases
                assert counts == (expected if keeps else [0, 0])
                most = max(most, *counts) if len(tables) > 1 else most
    assert (most > 1) == keeps


# -- many rows


@every_kind
@pytest.mark.parametrize("num_blocks", [12, 40])
def test_a_planned_step_equals_its_calls(spec: KVCacheSpec, num_blocks: int) -> None:
    for seed in range(3):
        one, many = (World(spec, seed, 2, num_blocks) for _ in range(2))
        for world in (one, many):
            world.live(25)
            for request in world.running:
                request.append_output_token_ids([1] * (request.num_tokens < MAX_MODEL_LEN))
        steps = [
            (request.row, one.step_of(request, min(one.some(1, 3), request.num_tokens - request.num_computed_tokens)))
            for request in one.running
            if request.num_computed_tokens < request.num_tokens
        ]
        planned = many.manager.plan_step([row for row, _ in steps], [new for _, new in steps]).num_planned
        for i, (row, new) in enumerate(steps):
            request = one.manager.request_table.requests[row]
            fits = one.manager.allocate_slots(request, new) is not None
            assert fits == (i < planned)
            if not fits:
                break
        assert one.manager.snapshot() == many.manager.snapshot()


# -- what can not be


BAD_CALLS: dict[str, tuple[dict[str, int], str]] = {
    "no token": ({"num_new_tokens": 0}, "expected num_new_tokens >= 1, got 0"),
    "negative": ({"num_new_tokens": -1}, "expected num_new_tokens >= 0, got -1"),
    "lookahead": ({"num_lookahead_tokens": -1}, "expected num_lookahead_tokens >= 0, got -1"),
    "in flight": ({"num_in_flight_tokens": -1}, "expected num_in_flight_tokens >= 0, got -1"),
    "external": ({"num_external_computed_tokens": -1}, "expected num_external_computed_tokens >= 0, got -1"),
    "encoder": ({"num_encoder_tokens": -1}, "expected num_encoder_tokens >= 0, got -1"),
    "too long": ({"num_new_tokens": MAX_MODEL_LEN + 1}, f"expected at most max_model_len = {MAX_MODEL_LEN} tokens"),
    "no hit": ({"num_new_computed_tokens": 4}, "group 0: expected"),
}


@every_kind
@pytest.mark.parametrize(("wrong", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_wrong_counts_are_refused_and_change_nothing(spec: KVCacheSpec, wrong: dict[str, int], message: str) -> None:
    world = World(spec, 0)
    if not world.kind.is_prefix_cacheable and "num_new_computed_tokens" in wrong:
        message = "expected no hit, got 4 computed tokens: no group has a prefix cache"
    world.admit()
    before = world.manager.snapshot()
    with pytest.raises(ValueError, match=message):
        world.manager.allocate_slots(Request("new", [1] * 8), **({"num_new_tokens": 1} | wrong))  # type: ignore[arg-type]
    assert world.manager.snapshot() == before


@every_kind
def test_unknown_rows_are_refused_and_change_nothing(spec: KVCacheSpec) -> None:
    world = World(spec, 0)
    world.admit()
    row = world.running[0].row
    before = world.manager.snapshot()
    for rows, message in (([row + 1], "expected rows that a request owns"), ([row, row], "expected distinct rows")):
        with pytest.raises(ValueError, match=message):
            world.manager.plan_step(rows, 1)
    assert world.manager.snapshot() == before


@every_kind
def test_a_block_size_below_one_is_refused(spec: KVCacheSpec) -> None:
    with pytest.raises(ValueError, match="expected block_size >= 1, got 0"):
        replace(spec, block_size=0)


@every_cacheable_kind
def test_an_unaligned_hash_block_size_is_refused(spec: KVCacheSpec) -> None:
    with pytest.raises(ValueError, match=f"expected hash_block_size to divide .* hash_block_size 3 and {spec.kind}"):
        KVCacheManager(KVCacheConfig.single_pool(40, spec), MAX_MODEL_LEN, 3)


@every_kind
def test_a_kind_has_eagle_and_context_parallelism_or_says_that_it_has_not(spec: KVCacheSpec) -> None:
    if spec.supports_eagle:
        World(spec, 0, options={"use_eagle": True}).live(30)
    else:
        with pytest.raises(NotImplementedError, match=f"{spec.kind} attention does not work with use_eagle=True"):
            World(spec, 0, options={"use_eagle": True})
    for ranks in ({"dcp_world_size": 2}, {"pcp_world_size": 2}):
        if spec.supports_context_parallelism:
            world = World(spec, 0, options=ranks)
            assert world.kind.block_size == 2 * spec.block_size
            world.live(30)
        else:
            with pytest.raises(NotImplementedError, match=f"{spec.kind} attention does not work with context parall"):
                World(spec, 0, options=ranks)


@every_kind
def test_a_bound_on_admission_is_what_the_spec_says(spec: KVCacheSpec) -> None:
    kind = World(spec, 0, options={"max_in_flight_tokens": 5}).kind
    assert kind.max_admission_blocks in (NEVER, spec.max_blocks_per_request(MAX_MODEL_LEN, 5))
