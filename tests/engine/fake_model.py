"""A model without jax for scheduler tests: the next token is a function of all tokens before it.

It reads the tokens through the step, as a device would: positions that the step computes are remembered by block and
offset, so a schedule that loses or misplaces KV changes the output. With states it has a recurrent layer besides, whose
state is a checksum of all tokens before it, in a pool of its own. Drafts are verified as a device does: what follows
each token is computed from what is in the blocks by then, and drafts count up to the first that is something else.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvjax.core import BlockHasher, KVCacheManager, MissReasons, Request
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, SlabSpec
from kvjax.core.step.step_plan import StepPlan
from kvjax.engine.requests.engine_request import EngineRequest, sample_ids
from kvjax.engine.requests.outputs import NO_OUTPUTS, GenerationResult, StepOutputs
from kvjax.engine.requests.request_inputs import NO_INPUTS, RequestInputs
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.scheduling.running_inputs import RunningInputs
from kvjax.engine.scheduling.scheduled_step import ScheduledStep
from kvjax.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvjax.engine.scheduling.speculation import Drafter
from kvjax.engine.step.host_loop import HostLoop, HostStep
from kvjax.engine.step.sampled_step import SampledStep
from tests.engine.fake_tiers import FakeTiers

BLOCK_SIZE = 4
WINDOW = 6
VOCAB = 1000
MAX_ROWS = 64  # of sampled tokens that a step leaves on the device


def next_token(window: list[int], position: int) -> int:
    """What the fake model writes after `position`, having seen the last tokens `window`."""
    return zlib.crc32(repr((window, position)).encode()) % VOCAB


def expected_output(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens[-WINDOW:], len(tokens) - 1))
    return tokens[len(prompt) :]


def state_after(tokens: list[int], state: int = 0) -> int:
    """The fake model's recurrent state after `tokens` more."""
    for token in tokens:
        state = zlib.crc32(b"%d" % token, state)
    return state


def expected_output_with_states(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token([*tokens[-WINDOW:], state_after(tokens)], len(tokens) - 1))
    return tokens[len(prompt) :]


def make_manager(
    num_blocks: int,
    *,
    num_states: int = 0,
    state_block: int = 8,
    num_drafts: int = 0,
    in_slabs: bool = False,
    **options: Any,
) -> KVCacheManager:
    """A manager of the fake model's layers."""
    config = make_config(num_blocks, num_states, state_block, num_drafts, in_slabs)
    return KVCacheManager(config, 256, BLOCK_SIZE, **{"max_in_flight_tokens": 64} | options)


def make_config(
    num_blocks: int, num_states: int = 0, state_block: int = 8, num_drafts: int = 0, in_slabs: bool = False
) -> KVCacheConfig:
    """Full and windowed attention in one pool; with `num_states` a recurrent layer in a pool of as many blocks.

    `in_slabs`: they share a memory, of a slab for each state.
    """
    common = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
    specs = (FullAttentionSpec(**common), SlidingWindowSpec(**common, sliding_window=WINDOW))
    config = KVCacheConfig.single_pool(num_blocks, *specs)
    if num_states:
        state = {"shapes": ((1,),), "dtypes": ("float32",), "mamba_cache_mode": "align"}
        state["num_speculative_blocks"] = num_drafts
        group = KVCacheGroupSpec(("layers.2",), MambaSpec(block_size=state_block, **state), pool_id=1)
        slabs = SlabSpec(num_states, (num_blocks // num_states, 1)) if in_slabs else None
        pools = (*config.pools, KVCachePoolSpec(num_states))
        config = KVCacheConfig(pools, (*config.kv_cache_groups, group), slabs=slabs)
    return config


class Sampled(NamedTuple):
    """What a step leaves: tokens sampled at its rows of logits, and drafts of each request that were right."""

    token_ids: np.ndarray  # int32[N]
    num_accepted: np.ndarray  # int32[requests that sample]


@dataclass
class FakeDevice:
    """Pages that hold the token written into each slot, for both groups, and states; -1: never written."""

    slots: np.ndarray
    states: np.ndarray  # int64[num_states], empty without states
    previous: np.ndarray  # int32[MAX_ROWS] newest tokens of the last step
    num_copies: int = 0

    @property
    def pools(self) -> tuple[np.ndarray, np.ndarray]:
        """Pages by block, of attention and of states."""
        return self.slots.reshape(-1, BLOCK_SIZE), self.states

    def run(self, plan: StepPlan, drafts: np.ndarray | None = None) -> Sampled:
        """Edits pages, writes the step's tokens, then reads each sampling request's context back from its blocks.

        `drafts` stand behind the last step's tokens.
        """
        for pages, copies, pages_to_zero in zip(self.pools, plan.page_copies, plan.pages_to_zero, strict=False):
            pages[copies.destinations] = pages[copies.sources]
            pages[pages_to_zero] = -1
            self.num_copies += copies.sources.size
        previous = self.previous if drafts is None else np.append(self.previous, drafts)
        tokens = np.where(plan.token_source >= 0, previous[plan.token_source], plan.token_ids)
        for group in plan.groups[:2]:
            self.slots[group.slot_mapping] = tokens
        states = self._update_states(plan, tokens)
        sampled = []
        for index in plan.logits_indices.tolist():
            request = int(np.searchsorted(plan.query_start_loc, index, side="right")) - 1
            length = int(plan.positions[index]) + 1
            full, windowed = (self._read(group_id, plan, request, length) for group_id in range(2))
            assert windowed[-WINDOW:] == full[-WINDOW:]
            sampled.append(next_token([*full[-WINDOW:], *states[index : index + 1]], length - 1))
        accepted, newest = [], []
        for begin, end in zip(plan.logits_starts[:-1].tolist(), plan.logits_starts[1:].tolist(), strict=True):
            guessed = tokens[plan.logits_indices[begin + 1 : end]].tolist()
            right = [draft == truth for draft, truth in zip(guessed, sampled[begin:end], strict=False)]
            accepted.append([*right, False].index(False))
            newest.append(sampled[begin + accepted[-1]])
        self.previous = np.array(newest + [0] * (MAX_ROWS - len(newest)), np.int32)
        return Sampled(np.array(sampled, np.int32), np.array(accepted, np.int32))

    def _update_states(self, plan: StepPlan, tokens: np.ndarray) -> list[int]:
        """The state after each token of the step; none without states."""
        after: list[int] = []
        for group in plan.groups[2:]:
            for i, read in enumerate(group.state_read):
                state = int(self.states[read]) if group.has_initial_state[i] else 0
                assert state >= 0, "a state that was never written"
                for token in tokens[plan.query_start_loc[i] : plan.query_start_loc[i + 1]].tolist():
                    state = state_after([token], state)
                    after.append(state)
            for i, pages in enumerate(group.state_write.reshape(plan.num_requests, -1)):
                own = after[plan.query_start_loc[i] : plan.query_start_loc[i + 1]]
                for page, state in zip(pages[::-1].tolist(), own[::-1], strict=False):
                    if page:
                        self.states[page] = state
        return after

    def _read(self, group_id: int, plan: StepPlan, request: int, length: int) -> list[int]:
        table = plan.groups[group_id].block_tables[request]
        positions = np.arange(length)
        return self.slots[table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE].tolist()


def logprobs_of(tokens: np.ndarray | list[int]) -> np.ndarray:  # float32[n]
    """What the fake model says of its tokens."""
    return -np.array(tokens, np.float32) / 8


class FakeEngine:
    """Host loop, manager and fake device, with `depth` steps in flight."""

    def __init__(
        self,
        num_blocks: int = 64,
        *,
        depth: int = 1,
        enable_caching: bool = True,
        sub_block_hits: bool = False,
        zero_new_pages: bool = False,
        watermark: float = 0.0,
        num_states: int = 0,
        state_block: int = 8,
        in_slabs: bool = False,
        make_drafter: Callable[[KVCacheManager], Drafter] | None = None,
        num_drafts: int = 0,
        make_tiers: Callable[[KVCacheConfig], FakeTiers] | None = None,
        num_embedding_rows: int = 0,
        miss_reasons: MissReasons | None = None,
        **limits: int,
    ) -> None:
        sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 128, **limits}
        in_flight = sizes["max_num_batched_tokens"] * depth
        config = make_config(num_blocks, num_states, state_block, num_drafts, in_slabs)
        self.tiers = None if make_tiers is None else make_tiers(config)
        self.manager = make_manager(
            num_blocks,
            num_states=num_states,
            state_block=state_block,
            num_drafts=num_drafts,
            in_slabs=in_slabs,
            tier=None if self.tiers is None else self.tiers.scheduler,
            enable_caching=enable_caching,
            max_in_flight_tokens=in_flight,
            same_step_hits=not sub_block_hits,
            sub_block_hits=sub_block_hits,
            zero_new_pages=zero_new_pages,
            log_stats=True,
            miss_reasons=miss_reasons,
        )
        bounds = SchedulerConfig(**sizes, watermark=watermark, max_steps_in_flight=depth, num_drafts=num_drafts)
        self.drafter = None if make_drafter is None else make_drafter(self.manager)
        connector = None if self.tiers is None else self.tiers.scheduler
        if connector is not None:
            connector.bind_kv_cache_manager(self.manager)
        self.scheduler = Scheduler(
            self.manager, bounds, RunningInputs(num_embedding_rows), drafter=self.drafter, connector=connector
        )
        self.loop = HostLoop(self.manager, self.scheduler, num_step_stats=1_000)
        self.hasher = BlockHasher(BLOCK_SIZE, seed="0") if enable_caching else None
        slots, states = np.full(num_blocks * BLOCK_SIZE, -1), np.full(num_states, -1, np.int64)
        if in_slabs:
            states = slots.reshape(num_states, -1)[:, 0]  # the same memory
        self.device = FakeDevice(slots, states, np.zeros(MAX_ROWS, np.int32))
        self.outputs: dict[str, list[int]] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.results: dict[str, GenerationResult] = {}
        self.steps: list[ScheduledStep] = []
        self._flights: deque[tuple[HostStep, Sampled]] = deque()
        self._depth = depth

    def add(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        stop_token_ids: tuple[int, ...] = (),
        n: int = 1,
        priority: int = 0,
        inputs: RequestInputs = NO_INPUTS,
    ) -> None:
        params = SamplingParams(n=n, max_tokens=max_tokens, stop_token_ids=stop_token_ids)
        samples: list[EngineRequest] = []
        for name in sample_ids(request_id, n):
            request = EngineRequest(
                request=Request(name, prompt, block_hasher=self.hasher),
                params=params,
                seed=0,
                stop_token_ids=frozenset(stop_token_ids),
                arrival=len(self.requests) + len(samples),
                stats=RequestStats(name, len(prompt), 0.0),
                first_sample=samples[0] if samples else None,
                priority=priority,
                inputs=inputs,
            )
            samples.append(request)
        self.loop.add(samples)
        for request in samples:
            self.requests[request.request_id] = request
            self.outputs[request.request_id] = []

    def step(self) -> StepOutputs:
        tiers = self.tiers
        if tiers is not None:
            self.scheduler.end_loads(*tiers.scheduler.update_connector_output(tiers.get_finished()))
        step = self.loop.begin_step()
        if tiers is not None:
            tiers.start_load_kv(self.device.pools, tiers.scheduler.build_connector_meta())
            tiers.scheduler.check_invariants()
        if step is not None:
            self.steps.append(step.scheduled)
            drafts = None if self.drafter is None else self.drafter.device_tokens
            self._flights.append((step, self.device.run(step.plan, drafts)))
        outputs = NO_OUTPUTS
        if self._flights and (step is None or len(self._flights) >= self._depth):
            done, sampled = self._flights.popleft()
            num_accepted = None if self.drafter is None else sampled.num_accepted
            read = SampledStep(sampled.token_ids, logprobs_of(sampled.token_ids), num_accepted=num_accepted)
            outputs = self.loop.end_step(done, read)
        for output in outputs:
            self.outputs[output.request_id].append(output.token_id)
            if output.result is not None:
                self.results[output.request_id] = output.result
        self.scheduler.check_invariants()
        self.manager.check_invariants()
        return outputs

    def run(self) -> dict[str, list[int]]:
        while self.scheduler.num_unfinished or self._flights:
            self.step()
        assert self.manager.usage == 0
        for name, result in self.results.items():
            assert result.output_token_ids.tolist() == self.outputs[name]
            assert list(result.logprobs) == logprobs_of(self.outputs[name]).tolist()
        return self.outputs
