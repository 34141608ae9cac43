"""The update step computes what dense attention does, whatever the chunks, and leaves its arguments alone."""

from __future__ import annotations

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, MRopePositions, Request
from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.step.step_builder import build_step_plan
from kvjax.core.step.step_plan import StepPlan
from kvjax.device import Bucket, Buckets, KVPages, UpdateStep, count_compilations, create_pages, make_update_step
from tests.device.aliases import assert_in_place
from tests.device.toy import BLOCK_SIZE, VOCAB, ToyHost, ToyModel, dense_logits, is_greedy, sample, toy_config
from tests.device.traces import at_most_traced

BUCKETS = Buckets((Bucket(4, 4, 8), Bucket(32, 4, 8)), page_counts=(2, 4))
GREEDY = {"offset": np.zeros(1, np.int32)}
CLOSE = {"atol": 3e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return ToyModel()


@pytest.fixture(scope="module")
def steps(model: ToyModel) -> dict[str, UpdateStep]:
    """One step per layout for all tests, since compiling is what takes the time."""
    return {
        platform: make_update_step(model, toy_config(platform=platform), buckets, sample_fn=sample, return_logits=True)
        for platform, buckets in (("cpu", BUCKETS), ("tpu", Buckets(BUCKETS.steps[1:])))
    }


@pytest.fixture
def step(steps: dict[str, UpdateStep]) -> UpdateStep:
    return steps["cpu"]


def sequences(seed: int, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


def one_request(length: int = 9, seed: int = 0) -> tuple[np.ndarray, ToyHost]:
    host = ToyHost(toy_config())
    (tokens,) = sequences(seed, [length])
    host.add(0, tokens)
    return tokens, host


def as_numpy(pages: KVPages) -> list[np.ndarray]:
    return [np.array(leaf) for leaf in jax.tree.leaves(pages)]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_paged_logits_equal_dense_logits_for_every_chunk(
    model: ToyModel, steps: dict[str, UpdateStep], platform: str
) -> None:
    """Prefill at once, in chunks, and token by token (decode), each over pages that others used before."""
    config, step = toy_config(platform=platform), steps[platform]
    pages, host = create_pages(config), ToyHost(config)
    for chunk in (30, 8, 3, 1):
        for row, tokens in enumerate(sequences(chunk, [29, 21])):
            dense = dense_logits(model, tokens)
            host.add(row, tokens)
            for start in range(0, len(tokens), chunk):
                count = min(chunk, len(tokens) - start)
                plan = host.plan([row], [count], wants_logits=np.array([True]))
                output = step(pages, plan, sampling=GREEDY)
                pages = output.pages
                np.testing.assert_allclose(output.logits[0], dense[start + count - 1], **CLOSE)
            host.release(row)
    assert all(not leaf[0].any() for leaf in as_numpy(pages)), "page 0 is zero for ever"


def test_requests_of_one_step_do_not_see_each_other(model: ToyModel, step: UpdateStep) -> None:
    tokens = sequences(5, [12, 1, 7, 1])
    host = ToyHost(toy_config())
    for row, t in enumerate(tokens):
        host.add(row, t)
    plan = host.plan([2, 1, 0, 3], [7, 1, 12, 1])
    assert plan.request_ids == ("r1", "r3", "r2", "r0")
    output = step(create_pages(toy_config()), plan, sampling=GREEDY)
    for line, row in enumerate([1, 3, 2, 0]):
        np.testing.assert_allclose(output.logits[line], dense_logits(model, tokens[row])[-1], **CLOSE)


def test_host_state_may_change_right_after_dispatch(step: UpdateStep) -> None:
    """jax reads numpy arguments after dispatch, and on CPU may look at them for ever."""

    def run(is_scrambled: bool) -> list[np.ndarray]:
        pages, outputs = create_pages(toy_config()), []
        for seed in range(6):
            _, host = one_request(24, seed)
            sampling = {"offset": np.array([seed, 0, 0, 0], np.int32)}
            plan = host.plan([0], [24])
            output = step(pages, plan, sampling=sampling)
            if is_scrambled:
                host.scramble()
                scramble_plan(plan)
                sampling["offset"][...] = 7
            pages = output.pages
            outputs.append(output._replace(pages=None))
        return [np.array(leaf) for leaf in jax.tree.leaves((outputs, pages))]

    chex.assert_trees_all_equal(run(True), run(False), strict=True)


def scramble_plan(plan: StepPlan) -> None:
    arrays = [plan.token_ids, plan.positions, plan.query_start_loc, plan.logits_indices, plan.distribution]
    for array in (*arrays, *(x for g in plan.groups for x in (g.block_tables, g.seq_lens, g.slot_mapping))):
        array[...] = 1


class ThreeAxes(ToyModel):
    """Takes positions of three axes and looks at the last."""

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend) -> jax.Array:
        return super().__call__(token_ids, positions[2], attend)


def test_positions_of_three_axes_reach_the_model(step: UpdateStep) -> None:
    """Text on all axes gives the logits of plain positions, other positions on the axis give others; one program."""
    mrope_step = make_update_step(
        ThreeAxes(), toy_config(), Buckets(BUCKETS.steps[1:]), sample_fn=sample, return_logits=True, mrope=True
    )
    pages = mrope_step.warmup(create_pages(toy_config()), sampling=GREEDY)
    moved = MRopePositions()
    moved.set(0, np.array([[0] * 9, [0] * 9, range(3, 12)]))
    logits = []
    for mrope in (MRopePositions(), moved):
        _, host = one_request()
        output = mrope_step(pages, host.plan([0], [9], mrope=mrope), sampling=GREEDY)
        pages = output.pages
        logits.append(np.asarray(output.logits[0]))
    assert mrope_step.num_compiled == 1
    _, host = one_request()
    plan = host.plan([0], [9])
    np.testing.assert_allclose(logits[0], step(create_pages(toy_config()), plan, sampling=GREEDY).logits[0], **CLOSE)
    assert np.abs(logits[1] - logits[0]).max() > 1e-3
    with pytest.raises(ValueError, match=r"expected positions \[3, T\] .* got shape \[9\]"):
        mrope_step(pages, plan, sampling=GREEDY)
    with pytest.raises(ValueError, match=r"expected positions \[T\] .*mrope=True.* got shape \[3, 9\]"):
        step(pages, replace(plan, positions=np.zeros((3, 9), np.int32)), sampling=GREEDY)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_compiled_step_updates_the_pages_in_place(steps: dict[str, UpdateStep], platform: str) -> None:
    """Every page array is aliased to its output, and no temporary is as large as one."""
    pages = create_pages(toy_config(platform=platform))
    for bucket in steps[platform].buckets.steps:
        assert_in_place(steps[platform].compiled(pages, bucket, sampling=GREEDY), pages)


def test_a_step_takes_its_pages_away(step: UpdateStep) -> None:
    _, host = one_request()
    pages = create_pages(toy_config())
    output = step(pages, host.plan([0], [9]), sampling=GREEDY)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(pages))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(output.pages))


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_200_mixed_requests_compile_nothing_and_decode_as_dense_attention_does(
    model: ToyModel, step: UpdateStep, is_async: bool
) -> None:
    """Four rows serve them, at most 32 tokens a step; asynchronously, tokens are read one step late."""
    pages, host = step.warmup(create_pages(toy_config()), sampling=GREEDY), ToyHost(toy_config(60), num_rows=4)
    rng = np.random.default_rng(int(is_async))
    waiting = [(rng.integers(0, VOCAB, rng.integers(1, 20)), int(rng.integers(1, 8))) for _ in range(200)]
    server = Server(step, host, pages, waiting, is_async=is_async)
    assert step.num_compiled == len(BUCKETS.steps)
    with count_compilations() as count, at_most_traced(ToyModel, 0):
        while server.step():
            pass
    assert count.num_programs == 0
    for (prompt, num_tokens), generated in zip(waiting, server.generated, strict=True):
        assert len(generated) == num_tokens
        assert is_greedy(model, prompt, generated)


class Server:
    """The least that can serve requests: rows in order, a chunk of a prompt or one token each."""

    def __init__(self, step: UpdateStep, host: ToyHost, pages: KVPages, requests: list, *, is_async: bool) -> None:
        self.update, self.host, self.pages, self.is_async = step, host, pages, is_async
        self.requests, self.generated = requests, [[] for _ in requests]
        self.next_request, self.row_request = 0, {}
        self.unread: dict[int, int] = {}  # row -> line of the sampled tokens of the step before
        self.previous, self.rng = None, np.random.default_rng(0)

    def step(self) -> bool:
        if not self.is_async:
            self.read()
        self.admit()
        rows, counts, sources = self.schedule()
        if not rows:
            self.read()
            return bool(self.row_request) or self.next_request < len(self.requests)
        plan = self.host.plan(rows, counts, last_token_source=np.array(sources))
        output = self.update(self.pages, plan, previous=self.previous, sampling=GREEDY)
        self.read()
        self.pages, self.previous = output.pages, output.sampled
        lines = np.searchsorted(plan.query_start_loc, plan.logits_indices, side="right") - 1
        self.unread = {int(plan.rows[line]): i for i, line in enumerate(lines)}
        return True

    def admit(self) -> None:
        for row in range(self.host.num_rows):
            if row not in self.row_request and self.next_request < len(self.requests):
                self.row_request[row] = self.next_request
                self.host.add(row, self.requests[self.next_request][0])
                self.next_request += 1

    def schedule(self) -> tuple[list[int], list[int], list[int]]:
        rows, counts, sources, budget = [], [], [], BUCKETS.max_num_tokens
        for row in self.rng.permutation(list(self.row_request)).tolist():
            table, request = self.host.request_table, self.row_request[row]
            in_flight = row in self.unread
            missing = int(table.num_tokens[row]) + in_flight - int(table.num_computed_tokens[row])
            is_last = len(self.generated[request]) + in_flight == self.requests[request][1]
            count = min(missing, budget, int(self.rng.integers(1, 20)))
            if count and not is_last:
                budget -= count
                rows.append(row)
                counts.append(count)
                sources.append(self.unread[row] if in_flight and count == missing else -1)
        return rows, counts, sources

    def read(self) -> None:
        tokens = None if self.previous is None else np.asarray(self.previous)
        for row, line in self.unread.items():
            request = self.row_request[row]
            self.generated[request].append(int(tokens[line]))
            self.host.append(row, int(tokens[line]))
            if len(self.generated[request]) == self.requests[request][1]:
                self.host.release(row)
                del self.row_request[row]
        self.unread = {}


def test_a_prefix_hit_of_the_manager_reads_the_pages_of_an_earlier_request(model: ToyModel, step: UpdateStep) -> None:
    manager = KVCacheManager(toy_config(), max_model_len=32, hash_block_size=BLOCK_SIZE)
    hasher, pages = BlockHasher(BLOCK_SIZE, "sha256"), create_pages(toy_config())
    (first, tail) = sequences(3, [24, 5])
    for name, prompt, num_cached in (("a", first, 0), ("b", np.concatenate([first[:16], tail]), 16)):
        request = Request(name, prompt, block_hasher=hasher)
        hit, num_computed = manager.get_computed_blocks(request)
        assert num_computed == num_cached
        manager.allocate_slots(request, len(prompt) - num_computed, num_computed, hit)
        request.num_computed_tokens = num_computed
        plan = build_step_plan(manager, np.array([request.row]), np.array([len(prompt) - num_computed]))
        output = step(pages, plan, sampling=GREEDY)
        pages, request.num_computed_tokens = output.pages, len(prompt)
        np.testing.assert_allclose(output.logits[0], dense_logits(model, prompt)[-1], **CLOSE)
        manager.free(request)


def test_page_copies_come_before_zeroing_and_both_before_the_model(model: ToyModel, step: UpdateStep) -> None:
    """A second request starts on a copy of the first one's pages, which are zeroed in the same step."""
    tokens, host = one_request(9)
    pages = step(create_pages(toy_config()), host.plan([0], [8]), sampling=GREEDY).pages
    host.add(1, tokens)
    host.request_table.num_computed_tokens[1] = 8
    host.allocate(1, 1)
    copies, zeros = [], []
    for tables in host.group_tables():
        zeros += tables.entries[0, 0, :2].tolist()
        copies += tables.entries[0, 1, :2].tolist()
    host.request_table.num_computed_tokens[1] = 8
    plan = host.plan(
        [1],
        [1],
        page_copies=(PageCopies(np.array(zeros), np.array(copies)),),
        pages_to_zero=(np.array(zeros),),
    )
    output = step(pages, plan, sampling=GREEDY)
    np.testing.assert_allclose(output.logits[0], dense_logits(model, tokens)[-1], **CLOSE)
    assert all(not leaf[zeros].any() for leaf in as_numpy(output.pages))


def test_sampling_happens_in_the_step_on_inputs_padded_to_the_bucket(model: ToyModel, step: UpdateStep) -> None:
    tokens, host = one_request()
    output = step(create_pages(toy_config()), host.plan([0], [9]), sampling={"offset": np.array([5], np.int32)})
    best = dense_logits(model, tokens)[-1]
    assert output.sampled[0] == (best.argmax() + 5) % VOCAB
    chex.assert_shape([output.sampled, output.extras], (BUCKETS.max_num_requests,))
    np.testing.assert_allclose(output.extras[0], best.max(), **CLOSE)


def test_without_a_sampler_the_step_gives_logits() -> None:
    _, host = one_request()
    config = toy_config(num_layers=2)
    step = make_update_step(ToyModel(num_layers=2), config, Buckets((Bucket(16, 2, 8),)))
    output = step(create_pages(config), host.plan([0], [9]))
    assert output.logits.shape == (2, VOCAB)
    assert output.sampled.tolist() == [0, 0]
    assert output.extras is None


def bad_plans() -> dict[str, tuple[dict, str]]:
    def copies(sources: list[int], destinations: list[int]) -> tuple[PageCopies, ...]:
        return (PageCopies(np.array(sources, np.int32), np.array(destinations, np.int32)),)

    return {
        "copy to null": ({"page_copies": copies([1], [0])}, r"expected destinations in \[1, 600\), got 0 to 0"),
        "copy from outside": ({"page_copies": copies([600], [3])}, r"expected sources in \[0, 600\), got 600 to 600"),
        "copy lengths": ({"page_copies": copies([5, 6], [3])}, "as many sources as destinations, got 2 and 1"),
        "copy twice": ({"page_copies": copies([5, 6], [3, 3])}, r"expected distinct destinations, got \[3, 3\]"),
        "copy chain": ({"page_copies": copies([5, 6], [6, 7])}, r"destinations \[6\] are sources too"),
        "zero null": ({"pages_to_zero": (np.array([0, 1]),)}, r"expected pages to zero in \[1, 600\), got 0 to 1"),
        "zero a copy": (
            {"page_copies": copies([5], [6]), "pages_to_zero": (np.array([6]),)},
            r"pages \[6\] are copied to and zeroed",
        ),
        "pools": ({"pages_to_zero": ()}, "page copies and pages to zero for 1 pools, got 1 and 0"),
        "source": ({"token_source": np.full(9, 4, np.int32)}, "expected token sources below 4, got 4"),
        "bucket": ({"logits_indices": np.zeros(5, np.int32)}, "no bucket fits 9 tokens, 5 requests or rows of logits"),
    }


@pytest.mark.parametrize("name", bad_plans())
def test_a_refused_plan_leaves_the_pages_alone(step: UpdateStep, name: str) -> None:
    change, message = bad_plans()[name]
    _, host = one_request()
    pages = create_pages(toy_config())
    with pytest.raises(ValueError, match=message):
        step(pages, replace(host.plan([0], [9]), **change))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(pages))


def test_other_sizes_of_previous_tokens_or_sampling_inputs_are_refused(step: UpdateStep) -> None:
    _, host = one_request()
    pages, plan = create_pages(toy_config()), host.plan([0], [9])
    with pytest.raises(ValueError, match=r"expected previous tokens of shape \(4,\), got \(3,\)"):
        step(pages, plan, previous=np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="expected sampling inputs of at most 4 rows, got 5"):
        step(pages, plan, sampling=np.zeros(5))


def test_vectors_are_for_steps_made_with_them(step: UpdateStep) -> None:
    """And an index is of the plan's tokens."""
    _, host = one_request()
    pages, plan = create_pages(toy_config()), host.plan([0], [9])
    vectors = jax.numpy.zeros((2, 3))
    with pytest.raises(ValueError, match=r"expected no embeds \(or make the step with embeds=True\), got \[2, 3\]"):
        step(pages, plan, sampling=GREEDY, embeds=vectors)
    taking = make_update_step(ToyModel(num_layers=3), toy_config(), BUCKETS, embeds=True)
    with pytest.raises(ValueError, match=r"expected embeds \[rows, dim\], got none"):
        taking(pages, plan)
    with pytest.raises(ValueError, match=r"expected embed_index \[9\], got \[8\]"):
        taking(pages, plan, embeds=vectors, embed_index=np.zeros(8, np.int32))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(pages))


def test_a_model_that_skips_a_layer_is_refused() -> None:
    step = make_update_step(ToyModel(num_layers=2), toy_config(), BUCKETS)
    _, host = one_request()
    with pytest.raises(ValueError, match=r"did not attend in layers \('layers.2',\)"):
        step(create_pages(toy_config()), host.plan([0], [BLOCK_SIZE]))
