"""Cases of a whole decoding step of the engine's host side, tokens in and out; the device is a list of tokens.

Timed are scheduling, the step's plan, its padding to a bucket, sampling inputs, the request table's fence, and the
tokens' way to their requests, statistics included. The baseline does the same with an object per block, request and
token, in loops over requests.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from bench_host_cases.case import BenchCase, sample_us
from bench_host_cases.plain_side import PlainDecoding, PlainRequest
from bench_host_cases.shapes import NUM_STEPS, SHAPES, VOCABULARY, Shape
from bench_host_cases.step_inputs import NUM_REQUESTS, PlainInputs, buckets_of
from kvjax.core import BlockHasher, KVCacheManager, Request
from kvjax.device.inputs.batch import DeviceBatch, pick_bucket
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvjax.engine.step.host_loop import HostLoop
from kvjax.engine.step.sampled_step import SampledStep

NUM_TIMED = 48
NUM_AT_ONCE = NUM_REQUESTS // 4  # prompts in one step, so that pools need room for the windows of few before they slide
FIRST_TOKEN = 10  # smaller ids are stop tokens
STOP_TOKENS = frozenset({2, 3})


class Engine:
    """`NUM_REQUESTS` requests in a host loop, past their prompts; none ends while steps are timed."""

    def __init__(self, shape: Shape) -> None:
        self.rng = np.random.default_rng(0)
        num_tokens = NUM_AT_ONCE * shape.most_tokens
        self.buckets = buckets_of(shape, num_tokens)
        config = shape.config(NUM_REQUESTS + NUM_AT_ONCE)
        max_model_len = shape.most_tokens + 1
        manager = KVCacheManager(config, max_model_len, shape.hash_block_size, max_num_reqs=NUM_REQUESTS)
        limits = SchedulerConfig(
            max_num_seqs=NUM_REQUESTS, max_num_batched_tokens=num_tokens, max_model_len=max_model_len
        )
        self.loop = HostLoop(
            manager, Scheduler(manager, limits), num_step_stats=NUM_STEPS, pick_shape=self.buckets.pick
        )
        self._add(shape)
        while self.loop.scheduler.num_waiting:
            self._prefill()
        self.step(self.tokens(), self.logprobs())

    def _add(self, shape: Shape) -> None:
        hasher = BlockHasher(shape.hash_block_size, seed="bench")
        for i in range(NUM_REQUESTS):
            prompt = self.rng.integers(FIRST_TOKEN, VOCABULARY, shape.prompt + i % shape.spread).astype(np.int32)
            request = EngineRequest(
                request=Request(f"r{i}", prompt, block_hasher=hasher),
                params=SamplingParams(max_tokens=NUM_STEPS),
                seed=i,
                stop_token_ids=STOP_TOKENS,
                arrival=i,
                stats=RequestStats(f"r{i}", prompt.size, 0.0),
            )
            self.loop.add([request])

    def _prefill(self) -> None:
        step = self.loop.begin_step()
        if step is None or not step.scheduled.admitted or step.scheduled.num_preemptions:
            raise AssertionError("the pool is too small")
        self.loop.end_step(step, SampledStep(self.tokens(), self.logprobs()))

    def tokens(self) -> np.ndarray:
        return self.rng.integers(FIRST_TOKEN, VOCABULARY, NUM_REQUESTS).astype(np.int32)

    def logprobs(self) -> np.ndarray:
        return -self.rng.random(NUM_REQUESTS, np.float32)

    def step(self, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        step = self.loop.begin_step()
        assert step is not None
        DeviceBatch.from_plan(step.plan, pick_bucket(step.plan, self.buckets))
        outputs = self.loop.end_step(step, SampledStep(token_ids, logprobs))
        if len(outputs) != NUM_REQUESTS or outputs.results:
            raise AssertionError("expected a token of each request, and none to end")


def engine_step_samples(shape: Shape) -> list[float]:
    engine = Engine(shape)
    drawn: list[tuple[np.ndarray, np.ndarray]] = []
    return sample_us(
        lambda: engine.step(*drawn.pop()), NUM_TIMED, lambda: drawn.append((engine.tokens(), engine.logprobs()))
    )


@dataclass
class PlainOutput:
    """One token of one request."""

    name: str
    token_id: int
    logprob: float


class PlainEngine:
    """The plain manager, the plain inputs, and loops over requests for everything else."""

    def __init__(self, shape: Shape) -> None:
        self.decoding, self.inputs = PlainDecoding(shape, NUM_REQUESTS), PlainInputs(shape)
        rng = np.random.default_rng(0)
        self.tokens = rng.integers(FIRST_TOKEN, VOCABULARY, NUM_REQUESTS).tolist()
        self.logprobs = rng.random(NUM_REQUESTS).tolist()
        self.outputs: dict[str, list[int]] = {request.name: [] for request in self.decoding.requests}
        self.kept: dict[str, list[float]] = {request.name: [] for request in self.decoding.requests}

    def step(self) -> list[PlainOutput]:
        manager, scheduled = self.decoding.manager, []
        for request in self.decoding.requests:
            request.num_tokens += 1
            if manager.allocate_slots(request, request.num_tokens - request.num_computed_tokens) is not None:
                scheduled.append(request)
        sampling = [np.array(values, np.float32) for values in zip(*[(1.0, 1.0, 0, 7) for _ in scheduled], strict=True)]
        if len([*self.inputs(), *sampling]) < len(sampling):
            raise AssertionError("no inputs")
        for request in scheduled:
            request.num_computed_tokens = request.num_tokens
        return [self.update(*line) for line in zip(scheduled, self.tokens, self.logprobs, strict=True)]

    def update(self, request: PlainRequest, token_id: int, logprob: float) -> PlainOutput:
        tokens = self.outputs[request.name]
        tokens.append(token_id)
        self.kept[request.name].append(logprob)
        if token_id in STOP_TOKENS or len(tokens) > VOCABULARY:
            raise AssertionError("expected no request to end")
        return PlainOutput(request.name, token_id, logprob)


def plain_engine_step_samples(shape: Shape) -> list[float]:
    return sample_us(PlainEngine(shape).step, 4)


def cases() -> list[BenchCase]:
    names = {"full": f"engine_step/{NUM_REQUESTS}", "hybrid": f"engine_step/hybrid/{NUM_REQUESTS}"}
    return [
        BenchCase(name, partial(engine_step_samples, SHAPES[shape]), partial(plain_engine_step_samples, SHAPES[shape]))
        for shape, name in names.items()
    ]
