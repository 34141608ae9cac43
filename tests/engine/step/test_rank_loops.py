"""Data ranks as one loop: every request gets its own tokens, on the rank where it ends soonest."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from kvjax.core import StepPlan
from kvjax.device import Bucket, Buckets, DeviceBatch
from kvjax.device.inputs.rank_batches import join_batches, pick_bucket_of_ranks
from kvjax.engine.sampling.sampler_lines import LineWrite, SamplerSizes, SamplerWrites, TokenWrites
from kvjax.engine.sampling.sampling_table import SamplingBatch, SamplingTable
from kvjax.engine.step.loop_parts import check_parts
from kvjax.engine.step.rank_inputs import DeviceInputs
from kvjax.engine.step.rank_loops import RankLoops, RankSteps
from kvjax.engine.step.sampled_step import SampledStep, part_of
from kvjax.errors import BlockStateError, UnknownRequestError
from kvjax.metrics import KVCacheMetrics
from kvjax.tiers.connector import KVConnector
from tests.engine.fake_model import FakeEngine, expected_output, logprobs_of
from tests.metrics.test_manager_metrics import value

ROWS = 16  # of tokens that a rank's part of a step has


@dataclass
class Fleet:
    """Fake engines as data ranks of one loop; what a request's device holds is that of its rank."""

    engines: list[FakeEngine]
    loops: RankLoops
    maker: FakeEngine  # of requests alone

    @classmethod
    def of(cls, num_ranks: int, **options: Any) -> Fleet:
        engines = [FakeEngine(**options) for _ in range(num_ranks)]
        return cls(engines, RankLoops([engine.loop for engine in engines], num_step_stats=1_000), FakeEngine())

    def add(self, request_id: str, prompt: list[int], max_tokens: int, n: int = 1, priority: int = 0) -> int:
        """The rank that the request went to."""
        before = len(self.maker.requests)
        self.maker.add(request_id, prompt, max_tokens, n=n, priority=priority)
        samples = list(self.maker.requests.values())[before:]
        self.loops.add(samples)
        return self.loops.rank_of(samples[0].request_id)

    def step(self) -> dict[str, int]:
        """A step's tokens by request; every rank's device runs its own part."""
        steps = self.loops.begin_step()
        if steps is None:
            return {}
        tokens = np.zeros(ROWS * len(self.engines), np.int32)
        for rank, (engine, one) in enumerate(zip(self.engines, steps.by_rank, strict=True)):
            if one is not None:
                sampled = engine.device.run(one.plan).token_ids
                tokens[rank * ROWS : rank * ROWS + sampled.size] = sampled
        outputs = self.loops.end_step(steps, SampledStep(tokens, logprobs_of(tokens)))
        self.loops.scheduler.check_invariants()
        return dict(zip(outputs.request_ids.tolist(), outputs.token_ids.tolist(), strict=True))

    def run(self) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {name: [] for name in self.loops.requests}
        while self.loops.scheduler.num_unfinished:
            for name, token in self.step().items():
                tokens[name].append(token)
        assert all(manager.usage == 0 for manager in self.loops.managers)
        return tokens


def test_less_urgent_requests_that_wait_are_in_nobodys_way() -> None:
    """Those that run are, and so are more urgent ones."""
    fleet = Fleet.of(2, max_num_seqs=1)
    assert [fleet.add("a", [1], 9), fleet.add("b", [2], 8)] == [0, 1]
    fleet.step()
    assert fleet.add("late", [3], 60, priority=2) == 1
    assert fleet.add("urgent", [4], 20, priority=1) == 1
    assert fleet.add("later", [5], 5, priority=2) == 0
    fleet.run()


@pytest.mark.parametrize(("num_ranks", "num_blocks"), [(2, 20), (3, 64)])
def test_every_request_gets_its_own_tokens(num_ranks: int, num_blocks: int) -> None:
    """With few blocks some are preempted, on their rank."""
    fleet, rng = Fleet.of(num_ranks, num_blocks=num_blocks), np.random.default_rng(0)
    wanted, ranks = {}, []
    for i in range(12):
        prompt = rng.integers(0, 50, int(rng.integers(1, 20))).tolist()
        ranks.append(fleet.add(f"r{i}", prompt, 6 + i))
        wanted[f"r{i}"] = expected_output(prompt, 6 + i)
    assert set(ranks) == set(range(num_ranks))
    assert fleet.run() == wanted
    stats = fleet.loops.step_stats
    assert sum(step.num_sampled_tokens for step in stats) == sum(map(len, wanted.values()))
    assert [step.step for step in stats] == list(range(1, len(stats) + 1))
    assert {step.pools[0].held + step.pools[0].cached + step.pools[0].free for step in stats} == {
        num_ranks * (num_blocks - 1)
    }


def test_a_request_goes_where_fewest_tokens_are_unless_its_prefix_is_elsewhere() -> None:
    fleet = Fleet.of(2)
    prefix = list(range(40))
    assert fleet.add("long", [*prefix, 1], 5) == 0
    assert fleet.add("short", [7, 8], 5) == 1
    assert fleet.add("shorter", [9], 5) == 1, "it has fewer tokens than the long one alone"
    fleet.run()
    assert fleet.add("fresh", [3] * 30, 20) == 0, "of equal ranks the first"
    assert fleet.add("hit", [*prefix, 2], 5) == 1, "40 tokens found do not outweigh 50 to hold"
    fleet.loops.abort("fresh")
    fleet.loops.abort("hit")
    assert fleet.add("again", [*prefix, 3], 5) == 0
    assert fleet.add("other", [5], 2) == 1


def test_samples_of_a_prompt_stay_together() -> None:
    fleet = Fleet.of(2)
    rank = fleet.add("many", [1, 2, 3, 4, 5, 6], 4, n=3)
    assert len(fleet.engines[rank].loop.requests) == 3


def test_an_unknown_request_is_refused() -> None:
    with pytest.raises(UnknownRequestError, match="got 'nobody'"):
        Fleet.of(2).loops.abort("nobody")


def test_one_manager_is_asked_for_in_vain() -> None:
    with pytest.raises(ValueError, match="expected one data rank, got 2; read `managers`"):
        _ = Fleet.of(2).loops.manager


def test_a_pin_is_held_by_the_rank_that_has_most_of_the_prompt() -> None:
    """Managers of ranks number their pins alike; a pin says whose it is."""
    fleet, prompt = Fleet.of(2, num_blocks=200), list(range(30))
    fleet.add("other", [40] * 30, 5)
    assert fleet.add("own", prompt, 5) == 1
    fleet.run()
    fleet.maker.add("pin", prompt, 1)
    pin = fleet.loops.pin(fleet.maker.requests["pin"].request)
    assert pin is not None
    assert (pin.rank, pin.num_tokens > 0) == (1, True)
    assert [manager.usage > 0 for manager in fleet.loops.managers] == [False, True]
    fleet.loops.unpin(pin)
    assert all(manager.usage == 0 for manager in fleet.loops.managers)
    with pytest.raises(BlockStateError, match="expected a prefix that is pinned here"):
        fleet.loops.unpin(pin)


def test_metrics_of_ranks_are_their_sums() -> None:
    fleet = Fleet.of(2, num_blocks=20)
    metrics = KVCacheMetrics(fleet.loops.managers[0], other_ranks=fleet.loops.managers[1:])
    for i in range(6):
        fleet.add(f"r{i}", list(range(i, i + 12)), 6)
    fleet.step()
    metrics.observe()
    pools = [manager.block_pools[0] for manager in fleet.loops.managers]
    assert value(metrics.registry, "kv_cache_blocks", pool="0", state="free") == sum(
        pool.num_free_blocks - pool.num_cached_free_blocks for pool in pools
    )
    held = sum(pool.num_blocks - 1 - pool.num_free_blocks for pool in pools)
    assert value(metrics.registry, "kv_cache_blocks", pool="0", state="held") == held > 0
    assert value(metrics.registry, "kv_cache_usage_perc") == max(manager.usage for manager in fleet.loops.managers)
    assert value(metrics.registry, "kv_cache_evicted_blocks_total", pool="0") == 0


def test_outputs_that_were_not_delivered_come_first_and_unfinished_requests_go_on() -> None:
    """Broken off between the ends of two ranks: what one handed over stays, the other computes it again."""
    fleet, prompts = Fleet.of(2), {"a": [1, 2, 3], "b": [4, 5]}
    for name, prompt in prompts.items():
        fleet.add(name, prompt, 6)
    got: dict[str, list[int]] = {name: [] for name in prompts}
    for name, token in fleet.step().items():
        got[name].append(token)
    fleet.loops.step_end = None
    steps = fleet.loops.begin_step()
    assert steps is not None
    first = steps.by_rank[0]
    assert first is not None
    sampled = fleet.engines[0].device.run(first.plan).token_ids
    fleet.engines[0].loop.end_step(first, SampledStep(sampled, logprobs_of(sampled)))
    fresh = Fleet.of(2)
    fresh.loops.take_over(fleet.loops)
    assert fresh.loops.undelivered is not None
    outputs = fresh.loops.deliver()
    assert fresh.loops.undelivered is None
    for name, token in zip(outputs.request_ids.tolist(), outputs.token_ids.tolist(), strict=True):
        got[name].append(token)
    assert [len(tokens) for tokens in got.values()] == [2, 1]
    for name, tokens in fresh.run().items():
        got[name] += tokens
    assert got == {name: expected_output(prompt, 6) for name, prompt in prompts.items()}


def test_parts_that_data_ranks_cannot_have_are_refused() -> None:
    placement: Any = SimpleNamespace(num_data=2, mesh=None)
    with pytest.raises(NotImplementedError, match="draft models do not work over 2 data ranks"):
        check_parts(placement, has_draft_model=True)
    devices = np.array([SimpleNamespace(process_index=i) for i in range(2)])
    placement = SimpleNamespace(num_data=1, mesh=SimpleNamespace(devices=devices))
    with pytest.raises(NotImplementedError, match="a SimpleNamespace does not work over several processes"):
        check_parts(placement, connector=cast(KVConnector, SimpleNamespace()))
    check_parts(placement, has_draft_model=True)


def plan_of(fleet: Fleet, *prompts: list[int]) -> StepPlan:
    for i, prompt in enumerate(prompts):
        fleet.add(f"p{i}", prompt, 5)
    steps = fleet.loops.begin_step()
    assert steps is not None
    assert steps.by_rank[0] is not None
    return steps.by_rank[0].plan


def test_a_joined_batch_has_each_rank_in_its_place() -> None:
    one, two = plan_of(Fleet.of(1), [1, 2, 3]), plan_of(Fleet.of(1), [4], [5, 6, 7, 8])
    bucket = pick_bucket_of_ranks([one, None, two], Buckets((Bucket(8, 4, 4), Bucket(16, 8, 8))))
    assert bucket == Bucket(8, 4, 4)
    batches = [DeviceBatch.from_plan(plan, bucket) for plan in (one, two)]
    joined = join_batches(batches, 4)
    np.testing.assert_array_equal(joined.token_ids, np.concatenate([batch.token_ids for batch in batches]))
    np.testing.assert_array_equal(part_of(joined.query_start_loc, 1, 2), batches[1].query_start_loc)
    for rank, plan in enumerate((one, two)):
        rows = part_of(joined.logits_indices, rank, 2)[: plan.logits_indices.size]
        np.testing.assert_array_equal(joined.token_ids[rows], plan.token_ids[plan.logits_indices])
        for group, own in zip(joined.groups, batches[rank].groups, strict=True):
            np.testing.assert_array_equal(part_of(group.block_tables, rank, 2), own.block_tables)
            np.testing.assert_array_equal(part_of(group.slot_mapping, rank, 2), own.slot_mapping)


def test_a_rank_that_does_not_only_decode_keeps_all_out_of_a_decode_bucket() -> None:
    decode = SimpleNamespace(num_requests=4, distribution=[4, 4, 4])
    longer = SimpleNamespace(num_requests=1, distribution=[0, 0, 1])
    for plan, tokens in ((decode, [1, 1, 1, 1]), (longer, [2])):
        size = plan.num_requests
        plan.num_tokens, plan.num_new_tokens = sum(tokens), np.int32(tokens)
        plan.most_drafts, plan.groups = 0, ()
        plan.logits_indices = np.zeros(size, np.int32)
    buckets = Buckets((Bucket(4, 4, 4, is_mixed=False), Bucket(8, 4, 4)))
    plans: list[Any] = [decode, longer]
    assert pick_bucket_of_ranks(plans[:1], buckets) == Bucket(4, 4, 4, is_mixed=False)
    assert pick_bucket_of_ranks(plans, buckets) == Bucket(8, 4, 4)


def test_lines_of_the_sampler_and_tokens_before_are_moved_to_their_rank() -> None:
    batch = SamplingBatch(*[np.zeros(3)] * 5, line=np.int32([0, 1, 2]))  # type: ignore[arg-type]
    nothing = np.zeros(0)
    line = LineWrite(1, nothing, 3, False, False, nothing, nothing, nothing)
    tokens = TokenWrites(*(np.int32(x) for x in ([1, 2], [0, 0], [9, 9], [-1, 1])))
    writes = SamplerWrites((line,), ((2, nothing),), tokens)
    step: Any = SimpleNamespace(plan="plan", sampling=batch, given=None, sampler_writes=writes)
    steps = RankSteps((None, step), SamplingTable().empty_batch())
    inputs = DeviceInputs.of(steps, SamplerSizes(num_lines=5, num_tokens=8, vocab_size=9), num_previous=4)
    assert inputs.plans == [None, "plan"]
    assert [one.line.tolist() for one in inputs.sampling] == [[], [0, 6, 7]]
    [moved] = inputs.sampler_writes
    assert moved.tokens is not None
    assert (moved.lines[0].line, moved.masks[0][0]) == (6, 7)
    assert (moved.tokens.lines.tolist(), moved.tokens.source.tolist()) == ([6, 7], [-1, 5])
