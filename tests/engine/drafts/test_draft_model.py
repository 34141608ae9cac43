"""A draft model beside a target that is played by a table of tokens: what it drafts, and what it leaves behind."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.device import Placement
from kvjax.device.programs.compile_counter import count_compilations
from kvjax.engine import EngineConfig, LLMEngine, SamplingParams, SpeculativeConfig
from kvjax.engine.drafts.draft_model import DraftModel, check_draft_model, check_speculation
from kvjax.engine.sampling.sampling_table import SamplingTable
from kvjax.models import DenseAttention, load_model
from kvjax.planning import plan_kv_cache
from tests.models.golden_models import goldens_of, model_folder

NUM_DRAFTS = 3
FIRST_SOURCE = 8  # tokens of the target's own step before the drafts
MAX_MODEL_LEN = 136


@functools.cache
def loaded(name: str):
    return load_model(model_folder(name), "float32")


@functools.cache
def dense_greedy(name: str) -> Callable[[np.ndarray], int]:
    """The best token after a sequence, by one dense pass over all of it."""
    module = loaded(name).module

    @jax.jit
    def forward(token_ids: jax.Array) -> jax.Array:
        hidden = module(token_ids, jnp.arange(MAX_MODEL_LEN), DenseAttention())
        return module.logits(hidden).argmax(-1)

    def best(token_ids: np.ndarray) -> int:
        padded = np.zeros(MAX_MODEL_LEN, np.int32)
        padded[: token_ids.size] = token_ids
        return int(forward(padded)[token_ids.size - 1])

    return best


def config(**settings: object) -> EngineConfig:
    base = EngineConfig(
        block_size=8,
        num_blocks=400,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_buckets=1,
        speculative=SpeculativeConfig(method="draft_model", num_drafts=NUM_DRAFTS),
    )
    return dataclasses.replace(base, **settings)


class Target:
    """Requests that run in a table, with nothing computed for them, and one draft model."""

    def __init__(self, name: str, *, max_model_len: int = MAX_MODEL_LEN, like: bool = True, **settings: object) -> None:
        model, given = loaded(name), config(**settings)
        plan = plan_kv_cache(
            model.config.kv_cache_specs(given.block_size),
            max_model_len=max_model_len,
            num_blocks=given.num_blocks,
            max_in_flight_tokens=given.max_num_batched_tokens,
        )
        self.table = RequestTable(max_num_reqs=8, max_model_len=MAX_MODEL_LEN)
        self.sampling = SamplingTable()
        self.draft = DraftModel(
            model,
            given,
            plan,
            Placement.create(),
            first_source=FIRST_SOURCE,
            like=base_draft(name, given.num_blocks) if like else None,
        )
        self.draft.reset(self.table)

    def add(self, name: str, prompt: np.ndarray, params: SamplingParams | None = None, seed: int = 0) -> int:
        request = Request(name, prompt)
        row = self.table.add(request)
        self.sampling.set(row, params or SamplingParams(temperature=0.0), seed)
        return row

    def propose(self, rows: list[int], most: int = NUM_DRAFTS) -> list[list[int]]:
        """The drafts of each row."""
        counts = self.draft.count(np.array(rows), np.full(len(rows), most))
        drafts = self.draft.propose(np.array(rows), counts, self.sampling)
        tokens = np.concatenate([np.full(FIRST_SOURCE, -1), np.asarray(self.draft.device_tokens)])
        return [tokens[drafts.source[i, :count]].tolist() for i, count in enumerate(counts)]

    def take(self, row: int, token_ids: list[int], num_accepted: int) -> None:
        """The target's step gave these tokens, the first of them accepted drafts."""
        self.table.append_run(row, np.array(token_ids, np.int32))
        self.draft.settle(np.array([row]), np.array([NUM_DRAFTS]), np.array([num_accepted]))

    def end(self, row: int) -> None:
        self.draft.requests.release(row)
        self.table.release(self.table.requests[row])

    def check(self) -> None:
        self.draft.check_invariants()


@functools.cache
def base_draft(name: str, num_blocks: int) -> DraftModel:
    """Holds the compiled step of one model and pool size."""
    return Target(name, num_blocks=num_blocks, like=False).draft


def continuation(name: str, token_ids: np.ndarray, count: int) -> list[int]:
    tokens = list(token_ids)
    for _ in range(count):
        tokens.append(dense_greedy(name)(np.array(tokens)))
    return tokens[len(token_ids) :]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_drafts_are_the_dense_greedy_continuation_whatever_was_accepted(name: str) -> None:
    """Each round some of the drafts are accepted at random, then a token comes that may be no draft at all."""
    random = np.random.default_rng(0)
    target = Target(name)
    rows = [target.add(f"{i}", goldens_of(name)[i].prompt[: 20 + 7 * i]) for i in range(4)]
    num_drafts = 0
    for _ in range(8):
        most = int(random.integers(1, NUM_DRAFTS + 1))
        asked = [row for row in rows if random.random() < 0.8] or rows[:1]
        proposed = target.propose(asked, most)
        for row, drafts in zip(asked, proposed, strict=True):
            tokens = target.table.tokens_of(row).copy()
            assert drafts in ([], continuation(name, tokens, most))  # none: the prompt is not computed
            num_drafts += len(drafts)
            accepted = int(random.integers(0, len(drafts) + 1))
            target.take(row, [*drafts[:accepted], int(random.integers(0, 64))], accepted)
        target.check()
    assert num_drafts > 30
    for row in rows:
        target.end(row)
    target.check()
    assert target.draft.manager.usage == 0


def test_tokens_that_were_not_drafted_are_computed_anew() -> None:
    """The target may decode without drafts, or accept none of those that it was given."""
    target = Target("llama")
    row = target.add("a", goldens_of("llama")[0].prompt)
    drafts = target.propose([row])[0]
    target.table.append_run(row, np.array([1, 2, 3, 4], np.int32))  # none is a draft, and no word of accepted ones
    assert drafts != [1, 2, 3]
    assert target.propose([row])[0] == continuation("llama", target.table.tokens_of(row).copy(), NUM_DRAFTS)


def test_drafts_are_drawn_with_the_noise_of_the_targets_request() -> None:
    """As an engine of the draft model draws them with the same parameters and seed."""
    params = SamplingParams(max_tokens=NUM_DRAFTS, temperature=1.3, top_p=0.9, top_k=20, seed=77)
    prompt = goldens_of("llama")[2].prompt[:50]
    engine = LLMEngine(loaded("llama"), config(speculative=None))
    (result,) = engine.generate([prompt], params)
    target = Target("llama")
    row = target.add("a", prompt, params, seed=77)
    assert target.propose([row]) == [result.output_token_ids.tolist()]


def test_long_prompts_are_computed_in_chunks_and_drafted_for_at_the_end() -> None:
    """A round computes at most `max_num_batched_tokens` tokens; requests that have caught up come first."""
    target = Target("llama", max_num_batched_tokens=32)
    short = target.add("short", goldens_of("llama")[0].prompt[:10])
    long = target.add("long", np.tile(goldens_of("llama")[3].prompt, 2)[:75])
    counts = []
    for _ in range(4):
        drafts = target.propose([short, long])
        counts.append([len(tokens) for tokens in drafts])
        target.take(short, drafts[0][:1], 0)
    assert counts == [[3, 0], [3, 0], [3, 3], [3, 3]]
    assert drafts[1] == continuation("llama", target.table.tokens_of(long).copy(), NUM_DRAFTS)


def test_prompts_that_begin_alike_are_hits() -> None:
    target = Target("llama")
    prompt = goldens_of("llama")[0].prompt
    first = target.add("first", prompt)
    target.propose([first])
    second = target.add("second", prompt)
    assert target.propose([second])[0] == continuation("llama", prompt, NUM_DRAFTS)
    shared = target.draft.manager.get_block_ids("second")[0][: (prompt.size - 1) // 8]
    assert shared == target.draft.manager.get_block_ids("first")[0][: len(shared)]


def test_a_pool_without_blocks_takes_drafts_from_those_that_find_none() -> None:
    """Nothing else happens to them: they are followed again once others have given blocks up."""
    target = Target("llama", num_blocks=24, enable_prefix_caching=False)
    prompts = [np.tile(golden.prompt, 2)[:60] for golden in goldens_of("llama")[:4]]
    rows = [target.add(f"{i}", prompt) for i, prompt in enumerate(prompts)]
    drafts = [[] for _ in rows]
    for _ in range(4):
        drafts = target.propose(rows)
        target.check()
    assert [len(tokens) for tokens in drafts] == [3, 3, 0, 0]
    while drafts[1]:  # two requests grow until the pool is empty
        for row in rows[:2]:
            target.take(row, [1] * 8, 0)
        target.propose(rows)
        drafts = target.propose(rows)
        target.check()
    assert target.draft.requests.num_followed == 1
    assert [len(tokens) for tokens in target.propose(rows)] == [3, 0, 0, 0]
    target.end(rows[0])
    target.propose(rows[1:])
    drafts = target.propose(rows[1:])
    assert drafts[0] == continuation("llama", target.table.tokens_of(rows[1]).copy(), NUM_DRAFTS)
    target.check()


def test_a_draft_model_of_fewer_tokens_drafts_up_to_its_length() -> None:
    """The last draft is not computed, so its place may be the one behind the last."""
    target = Target("llama", max_model_len=40)
    row = target.add("a", goldens_of("llama")[0].prompt[:37])
    counts = []
    for _ in range(6):
        counts.append(len(target.propose([row])[0]))
        target.take(row, [5], 0)
    assert counts == [3, 3, 2, 1, 0, 0]
    assert target.draft.manager.usage == 0
    target.check()


def test_rows_change_hands() -> None:
    """A preempted request's row goes to another; the first one comes back in another row."""
    target = Target("llama")
    prompts = [golden.prompt for golden in goldens_of("llama")[:2]]
    first = target.add("first", prompts[0])
    target.propose([first])
    target.end(first)
    second = target.add("second", prompts[1])
    again = target.add("first", prompts[0])
    proposed = target.propose([second, again])
    assert proposed == [continuation("llama", prompts[1], NUM_DRAFTS), continuation("llama", prompts[0], NUM_DRAFTS)]
    target.check()


def test_no_shape_is_new_after_warm_up() -> None:
    target = Target("llama", like=False, max_buckets=8)
    target.draft.warmup()
    rows = [target.add(f"{i}", goldens_of("llama")[i].prompt) for i in range(3)]
    with count_compilations() as count:
        for _ in range(4):
            for row, drafts in zip(rows, target.propose(rows), strict=True):
                target.take(row, [*drafts[:2], 3], min(len(drafts), 2))
    assert count.num_programs == 0


def test_another_vocabulary_is_refused() -> None:
    own = loaded("llama").config
    with pytest.raises(ValueError, match=f"expected a draft model of {own.vocab_size} tokens, got 17"):
        check_draft_model(own, dataclasses.replace(own, vocab_size=17))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("jamba", "a draft model of attention layers"), ("whisper", "a draft model without an encoder")],
)
def test_draft_models_that_cannot_go_back_or_read_more_than_tokens_are_refused(name: str, reason: str) -> None:
    own = loaded(name).config
    with pytest.raises(NotImplementedError, match=f"expected {reason}, got {own.architecture}.*prompt lookup"):
        check_draft_model(own, own)


def test_a_draft_model_comes_with_the_method_that_asks_for_one() -> None:
    own = loaded("llama").config
    with pytest.raises(ValueError, match=r"expected draft_model with the method .*, got none"):
        check_speculation(own, SpeculativeConfig(method="draft_model"), None)
    for other in (None, SpeculativeConfig()):
        with pytest.raises(ValueError, match=r"expected SpeculativeConfig.* with draft_model, got another or none"):
            check_speculation(own, other, own)
