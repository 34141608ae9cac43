"""Clients of an AsyncLLMEngine that come, cancel, time out and leave at random, for a minute.

    python scripts/soak_async.py                       500 clients, 60 seconds, seed 0
    python scripts/soak_async.py --clients 50 --seconds 5 --seed 7 --json FILE

Flow:    demo model -> tokens of a synchronous run -> [soak] -> counts and memory on the terminal, `--json FILE`

Each client sends one request after another: a prompt, a seed and a length drawn from the cases, and a way to read them:
to the end, slowly, as one result, with a timeout, cancelled, closed or dropped in the middle. What it got must be the
first tokens of the synchronous run for the same case: in float32, since in bfloat16 logits that are nearly equal may
change places with the requests that share a step. The laws of the engine are checked every 50 steps, and at the
end no block is held. Exit status 1: something was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np

from kvjax.cli.running.output_files import output_file
from kvjax.demo import demo_model_path, demo_requests
from kvjax.engine import AsyncLLMEngine, EngineConfig, LLMEngine, SamplingParams, StepOutputs
from kvjax.models import load_model

CHECK_STEPS = 50
NUM_SEEDS = 4
WAYS = ("read", "read slowly", "complete", "time out", "cancel", "close", "drop")


@dataclass(frozen=True)
class Case:
    """One request, and what must come of it."""

    prompt: np.ndarray  # int32[num_prompt_tokens]
    params: SamplingParams
    tokens: list[int]


@dataclass
class Report:
    """What happened."""

    seed: int
    num_clients: int
    seconds: float = 0.0
    num_requests: int = 0
    num_complete: int = 0  # read to the end
    num_left: int = 0  # cancelled, timed out, closed or dropped
    num_tokens: int = 0
    num_wrong: int = 0  # requests with other tokens than those of the synchronous run
    num_errors: int = 0
    num_steps: int = 0
    num_checks: int = 0
    num_preemptions: int = 0
    num_callers_most: int = 0  # that waited for room at once
    by_way: Counter[str] = field(default_factory=Counter)
    rss_mb: list[float] = field(default_factory=list)  # after every tenth of the time

    @property
    def is_good(self) -> bool:
        """Whether every law held."""
        return not self.num_wrong and not self.num_errors


class Soak:
    """Clients over one engine."""

    def __init__(
        self,
        engine: LLMEngine,
        prompts: Sequence[np.ndarray],
        *,
        seed: int,
        num_clients: int,
        max_requests: int | None = None,
        max_tokens: int = 32,
    ) -> None:
        self._engine = engine
        self._front = AsyncLLMEngine(engine, max_requests=max_requests)
        self._rng = np.random.default_rng(seed)
        self._report = Report(seed, num_clients)
        self._cases = self._make_cases(prompts, max_tokens)
        self._num_clients = num_clients
        self._until = 0.0

    async def run(self, seconds: float = 60.0, rounds: float = math.inf) -> Report:
        """Runs the clients; what happened. Afterwards the engine has no requests.

        Each client sends one request after another, `rounds` of them or until `seconds` are over.
        """
        report, step = self._report, self._engine.step
        start = time.monotonic()
        self._until = start + seconds
        self._engine.step = self._checked_step  # type: ignore[method-assign]
        try:
            async with self._front as front:
                watcher = asyncio.create_task(self._watch(seconds))
                await asyncio.gather(*(self._client(rounds) for _ in range(self._num_clients)))
                watcher.cancel()
                while front.stats.num_requests:
                    await asyncio.sleep(0.01)
                report.num_steps = front.stats.num_steps
        finally:
            self._engine.step = step  # type: ignore[method-assign]
        self._engine.check_invariants()
        report.seconds = time.monotonic() - start
        report.num_preemptions = sum(stats.num_preemptions for stats in self._engine.step_stats)
        report.num_errors += bool(self._engine.manager.usage)
        return report

    def _make_cases(self, prompts: Sequence[np.ndarray], max_tokens: int) -> list[Case]:
        """Every prompt at some seeds, half of them greedy, with the tokens of the engine itself, one after another."""
        cases = []
        for i, prompt in enumerate(prompts):
            for seed in range(NUM_SEEDS):
                params = SamplingParams(
                    max_tokens=int(self._rng.integers(1, max_tokens + 1)), temperature=0.8 * (seed % 2), seed=seed + i
                )
                [result] = self._engine.generate([prompt], params)
                cases.append(Case(prompt, params, result.output_token_ids.tolist()))
        return cases

    def _checked_step(self) -> StepOutputs:
        outputs = LLMEngine.step(self._engine)
        if not self._front.stats.num_steps % CHECK_STEPS:
            self._engine.check_invariants()
            self._report.num_checks += 1
        return outputs

    async def _watch(self, seconds: float) -> None:
        for _ in range(10):
            await asyncio.sleep(seconds / 10)
            gc.collect()
            self._report.rss_mb.append(_rss_mb())
            self._report.num_callers_most = max(self._report.num_callers_most, self._front.stats.num_callers)

    async def _client(self, rounds: float) -> None:
        rng, report = self._rng, self._report
        num_sent = 0
        while (left := self._until - time.monotonic()) > 0 and num_sent < rounds:
            num_sent += 1
            await asyncio.sleep(min(rng.exponential(0.05), left))
            case = self._cases[rng.integers(len(self._cases))]
            way = WAYS[rng.integers(len(WAYS))]
            report.by_way[way] += 1
            report.num_requests += 1
            tokens: list[int] = []
            is_whole = False
            try:
                is_whole = await self._request(case, way, tokens)
            except TimeoutError:
                pass
            except Exception as error:
                print(f"{way}: {error!r}", file=sys.stderr)
                report.num_errors += 1
            report.num_complete += is_whole
            report.num_left += not is_whole
            report.num_tokens += len(tokens)
            if tokens != (expected := case.tokens if is_whole else case.tokens[: len(tokens)]):
                print(f"{way}: expected {expected}, got {tokens}", file=sys.stderr)
                report.num_wrong += 1

    async def _request(self, case: Case, way: str, tokens: list[int]) -> bool:
        """Sends a request and reads it in some way; whether to the end."""
        rng, front = self._rng, self._front
        seconds = rng.exponential(0.3)
        if way == "time out":
            async with asyncio.timeout(seconds):
                return await self._read(case, tokens)
        if way == "cancel":
            task = asyncio.create_task(self._read(case, tokens))
            await asyncio.wait([task], timeout=seconds)
            task.cancel()
            [outcome] = await asyncio.gather(task, return_exceptions=True)
            return outcome is True
        if way == "complete":
            [result] = await front.complete(case.prompt, case.params, priority=int(rng.integers(3)))
            tokens += result.output_token_ids.tolist()
            return True
        if way in ("close", "drop"):
            return await self._read_some(case, way, tokens)
        return await self._read(case, tokens, 0.01 if way == "read slowly" else 0.0)

    async def _read(self, case: Case, tokens: list[int], pause: float = 0.0) -> bool:
        async for output in self._front.generate(case.prompt, case.params):
            tokens += output.token_ids
            if pause:
                await asyncio.sleep(self._rng.exponential(pause))
        return True

    async def _read_some(self, case: Case, way: str, tokens: list[int]) -> bool:
        outputs, count = self._front.generate(case.prompt, case.params), self._rng.integers(1, 8)
        async for output in outputs:
            tokens += output.token_ids
            if len(tokens) >= count:
                break
        if way == "close":
            await outputs.aclose()
        return tokens == case.tokens


def demo_engine() -> LLMEngine:
    """The demo model with room for some 20 requests at once: the others wait, and some are preempted."""
    config = EngineConfig(
        num_blocks=400,
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=64,
        max_buckets=1,
        async_scheduling=True,
    )
    return LLMEngine(load_model(demo_model_path(), "float32"), config)


def _rss_mb() -> float:
    """Memory of this process; its most so far where the system does not tell the present."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return pages * resource.getpagesize() / 2**20


def main() -> int:
    """Runs the clients and prints what happened."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-requests", type=int, default=256, help="in the engine at once; others wait")
    parser.add_argument("--json", type=output_file, metavar="FILE")
    args = parser.parse_args()
    engine = demo_engine()
    engine.warmup()
    encode = engine.model.tokenizer.encode  # type: ignore[union-attr]
    prompts = [np.array(encode(request.prompt)[-160:], np.int32) for request in demo_requests()]
    soak = Soak(engine, prompts, seed=args.seed, num_clients=args.clients, max_requests=args.max_requests)
    report = asyncio.run(soak.run(args.seconds))
    for name, value in vars(report).items():
        print(f"{name:18} {dict(value) if isinstance(value, Counter) else value}")
    growth = report.rss_mb[-1] - report.rss_mb[0]
    print(f"memory grew by {growth:+.1f} MB between a tenth of the time and the end")
    if args.json:
        args.json.write_text(json.dumps(vars(report)))
    print("all laws held" if report.is_good else "WRONG")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
