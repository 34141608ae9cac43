"""Speed of an engine, and of Hugging Face, on one workload.

Flow:    LLMEngine, Workload -> [measure_engine] -> EngineRun -> kvjax.bench.report
         HuggingFaceProcess, Workload -> [measure_hugging_face] -> Speeds

Prefill is a run that ends with one new token of every prompt. The total is a run of its own, to the last token; its
decode is what comes after the moment when every request has its first one. All of them start with an empty cache.
Hugging Face tells of no such moment: its decode is the total without the prefill.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvjax.bench.hugging_face import HuggingFaceProcess
from kvjax.bench.step_parts import StepParts, StepTimer, timed_steps
from kvjax.bench.workload import Workload

if TYPE_CHECKING:
    from kvjax.engine import GenerationResult, LLMEngine


@dataclass(frozen=True)
class Speed:
    """Tokens and what they took."""

    tokens: int
    wall_s: float
    cpu_s: float  # process time, of all threads

    @property
    def tokens_per_s(self) -> float:
        """By the clock; 0 where nothing was timed."""
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def tokens_per_cpu_s(self) -> float:
        """Likewise."""
        return self.tokens / self.cpu_s if self.cpu_s > 0 else 0.0


@dataclass(frozen=True)
class Speeds:
    """Prompt tokens of prefill, new tokens of decode, both of the total; `tokens` are the new ones of each prompt."""

    prefill: Speed
    decode: Speed
    total: Speed
    tokens: list[list[int]]


@dataclass(frozen=True)
class PoolPeak:
    """The most blocks of one pool that requests held at the end of a step, the null block left out."""

    held: int
    num_blocks: int


@dataclass(frozen=True)
class EngineRun:
    """One run of everything."""

    speeds: Speeds
    parts: StepParts  # of the decoding steps
    pool_peaks: tuple[PoolPeak, ...]
    sharing: Speed  # prefill of prompts that share their start
    queried_tokens: int  # of those prompts
    hit_tokens: int  # of them, found cached
    num_draft_tokens: int = 0  # verified in the total, with speculation
    num_accepted_tokens: int = 0  # of them, those that became output


def measure_engine(engine: LLMEngine, workload: Workload) -> EngineRun:
    """Runs the workload once.

    Raises:
        ValueError: the engine has unfinished requests, or refuses a prompt.
    """
    if engine.num_unfinished:
        raise ValueError(f"expected an engine without requests, got {engine.num_unfinished} unfinished")
    num_steps = engine.step_stats[-1].step if engine.step_stats else 0
    prefill = _prefill(engine, workload.prompts)
    before_total = engine.step_stats[-1].step
    with timed_steps() as timer:
        speeds, parts = _generate(engine, workload.prompts, workload.num_new_tokens, timer)
    before_sharing = engine.step_stats[-1].step
    sharing = _prefill(engine, workload.sharing)
    steps = [step for step in engine.step_stats if step.step > num_steps]
    of_total = [step for step in steps if before_total < step.step <= before_sharing]
    of_sharing = [step for step in steps if step.step > before_sharing]
    return EngineRun(
        speeds=replace(speeds, prefill=prefill),
        parts=parts,
        pool_peaks=tuple(
            PoolPeak(max(step.pools[i].held for step in steps), pool.num_blocks - 1)
            for i, pool in enumerate(engine.plan.pools)
        ),
        sharing=sharing,
        queried_tokens=sum(step.num_queried_tokens for step in of_sharing),
        hit_tokens=sum(step.num_hit_tokens for step in of_sharing),
        num_draft_tokens=sum(step.num_draft_tokens for step in of_total),
        num_accepted_tokens=sum(step.num_accepted_tokens for step in of_total),
    )


def measure_hugging_face(process: HuggingFaceProcess, workload: Workload) -> Speeds:
    """Runs the workload's prompts once.

    Raises:
        RuntimeError: the process ended.
    """
    prompts, num_new = workload.prompts, workload.num_new_tokens
    first, whole = process.generate(prompts, 1), process.generate(prompts, num_new)
    num_prompt_tokens, num_new_tokens = sum(map(len, prompts)), num_new * len(prompts)
    return Speeds(
        prefill=Speed(num_prompt_tokens, first.wall_s, first.cpu_s),
        decode=Speed(num_new_tokens - len(prompts), whole.wall_s - first.wall_s, whole.cpu_s - first.cpu_s),
        total=Speed(num_prompt_tokens + num_new_tokens, whole.wall_s, whole.cpu_s),
        tokens=whole.tokens,
    )


def median_speeds(runs: Sequence[Speeds]) -> Speeds:
    """For each part, the run of median time; the tokens are those of the last run."""
    parts = {
        name: min(of_part, key=lambda one: abs(one.wall_s - statistics.median_low([each.wall_s for each in of_part])))
        for name in ("prefill", "decode", "total")
        for of_part in [[getattr(run, name) for run in runs]]
    }
    return Speeds(**parts, tokens=runs[-1].tokens)


def _prefill(engine: LLMEngine, prompts: Sequence[Sequence[int]]) -> Speed:
    """One new token of every prompt; the prompts' tokens count."""
    speeds, _ = _generate(engine, prompts, 1, StepTimer())
    return speeds.prefill


def _generate(
    engine: LLMEngine, prompts: Sequence[Sequence[int]], num_new_tokens: int, timer: StepTimer
) -> tuple[Speeds, StepParts]:
    """All prompts to their ends, from an empty cache. Prefill is until each has a token, parts are of the rest."""
    from kvjax.engine import SamplingParams

    engine.manager.reset_prefix_cache()
    params = SamplingParams(max_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)
    results: dict[str, GenerationResult] = {}
    started, num_tokens, num_before = set[str](), 0, 0
    wall, cpu = time.perf_counter(), time.process_time()
    first_wall, first_cpu = wall, cpu  # when each has its first token
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    while engine.num_unfinished:
        outputs = engine.step()
        num_tokens += len(outputs.request_ids)
        results |= {result.request_id: result for result in outputs.results.values()}
        if len(started) < len(prompts):
            started.update(outputs.request_ids.tolist())
            if len(started) == len(prompts):
                num_before, first_wall, first_cpu = num_tokens, time.perf_counter(), time.process_time()
                timer.reset()
    end_wall, end_cpu = time.perf_counter(), time.process_time()
    parts = timer.parts()
    engine.step()  # reads a step in flight that no request waits for
    num_prompt_tokens = sum(map(len, prompts))
    speeds = Speeds(
        prefill=Speed(num_prompt_tokens, first_wall - wall, first_cpu - cpu),
        decode=Speed(num_tokens - num_before, end_wall - first_wall, end_cpu - first_cpu),
        total=Speed(num_prompt_tokens + num_tokens, end_wall - wall, end_cpu - cpu),
        tokens=[results[request_id].output_token_ids.tolist() for request_id in ids],
    )
    return speeds, parts
