"""vLLM's scheduler with its own manager and with kvjax's, in turns in one process: `schedule()` and admissions.

Usage:   DIR/python scripts/vllm_bench.py [--json FILE], by the wrapper that vllm_conformance.sh writes
Flow:    vLLM's Scheduler, twice -> [decoding steps in turns; prompts in turns] -> medians

A step is `schedule()` of all requests, one decoded token each; prompts differ in length so that every step fills blocks
of some. What is timed is vLLM's whole `schedule()`, of which the manager is a part, and apart from it the manager's
calls alone (`allocate_slots` of all requests). An admission is the manager's part of one prompt: looked up, allocated,
freed; of its tokens the first half is hit, or none.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_host_cases.vllm_side import (  # sets vLLM's platform, so it comes first
    block_hasher,
    config_of,
    make_manager,
    make_request,
    random_hashes,
    supported,
)

# isort: split
import vllm
from bench_host_cases.case import time_us
from bench_host_cases.prompts import admit_and_free
from bench_host_cases.shapes import BLOCK_SIZE, FULL, HEADS
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.structured_output import StructuredOutputManager

import kvjax.adapters.vllm
from kvjax.core import KVCacheSpec, SlidingWindowSpec

MANAGERS = ("vllm", "kvjax")
NAMES = count()  # of requests
PROMPT = 256
KINDS: dict[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "hybrid": (FULL, *[SlidingWindowSpec(**HEADS, sliding_window=128)] * 5),
}


def make_scheduler(specs: tuple[KVCacheSpec, ...], num_requests: int, num_blocks: int) -> Any:
    """vLLM's, with the manager that is installed."""
    most_tokens = num_requests * (PROMPT + BLOCK_SIZE) + 1
    model = ModelConfig(model="facebook/opt-125m", dtype="float16", seed=42, skip_tokenizer_init=True)
    scheduling = SchedulerConfig(
        max_num_seqs=num_requests,
        max_num_batched_tokens=most_tokens,
        max_model_len=2048,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=False,
    )
    caching = supported(CacheConfig, block_size=BLOCK_SIZE, enable_prefix_caching=True, cache_dtype="auto")
    caching.num_gpu_blocks = num_blocks
    config = VllmConfig(scheduler_config=scheduling, model_config=model, cache_config=caching)
    return supported(
        scheduler_module.Scheduler,
        vllm_config=config,
        kv_cache_config=config_of(specs, num_blocks),
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
        log_stats=True,
        structured_output_manager=StructuredOutputManager(config),
    )


@contextmanager
def manager_of(name: str) -> Iterator[None]:
    """While it lasts, vLLM's scheduler makes that manager."""
    if name == "kvjax":
        kvjax.adapters.vllm.install()
    try:
        yield
    finally:
        kvjax.adapters.vllm.uninstall()


class Decoding:
    """A scheduler whose requests are past their prompts."""

    def __init__(self, manager: str, kind: str, num_requests: int) -> None:
        specs = KINDS[kind]
        num_blocks = 2 + len(specs) * num_requests * (PROMPT // BLOCK_SIZE + 12)
        with manager_of(manager):
            self.scheduler = make_scheduler(specs, num_requests, num_blocks)
        self.manager = self.scheduler.kv_cache_manager
        hasher = block_hasher()
        for i in range(num_requests):
            tokens = [(i * 7919 + k) % 50_000 for k in range(PROMPT + i % BLOCK_SIZE)]
            self.scheduler.add_request(make_request(f"r{i}", tokens, hasher=hasher))
        for _ in range(3):
            self.step()
        assert len(self.scheduler.running) == num_requests

    def step(self) -> float:
        """Microseconds of `schedule()`."""
        start = time.perf_counter_ns()
        output = self.scheduler.schedule()
        end = time.perf_counter_ns()
        names = list(output.num_scheduled_tokens)
        result = supported(
            ModelRunnerOutput,
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=[[5] for _ in names],
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        self.scheduler.update_from_output(output, result)
        return (end - start) / 1e3

    def allocate(self) -> float:
        """Microseconds of `allocate_slots` of every running request, before a step that then finds its slots there."""
        allocate, running = self.manager.allocate_slots, self.scheduler.running
        start = time.perf_counter_ns()
        for request in running:
            allocate(request, 1, num_lookahead_tokens=0)
        end = time.perf_counter_ns()
        self.step()
        return (end - start) / 1e3


def in_turns(calls: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians of what the calls give, collector off."""
    gc.collect()
    gc.disable()
    samples = [{name: call() for name, call in calls.items()} for _ in range(rounds)]
    gc.enable()
    return {name: round(median(sample[name] for sample in samples), 1) for name in calls}


def bench_decoding(kind: str, num_requests: int, num_steps: int) -> dict[str, Any]:
    """Medians in microseconds; the two schedulers step in turns."""
    both = {name: Decoding(name, kind, num_requests) for name in MANAGERS}
    result: dict[str, Any] = {"case": f"schedule/{kind}/{num_requests}", "steps": num_steps}
    for part, call in (("schedule", Decoding.step), ("allocate", Decoding.allocate)):
        medians = in_turns({name: partial(call, decoding) for name, decoding in both.items()}, num_steps)
        result |= {f"{name}_{part}_us": value for name, value in medians.items()}
        result[f"{part}_ratio"] = round(medians["vllm"] / medians["kvjax"], 3)
    return result


class Admissions:
    """A manager that prompts pass through, one at a time."""

    def __init__(self, manager: str, kind: str, num_tokens: int, num_hit: int) -> None:
        with manager_of(manager):
            made = scheduler_module.KVCacheManager
        num_blocks = 8 * len(KINDS[kind]) * num_tokens // BLOCK_SIZE
        self.manager = make_manager(made, KINDS[kind], num_blocks, 2 * num_tokens)
        self.num_tokens, self.shared = num_tokens, random_hashes(num_hit // BLOCK_SIZE)
        for _ in range(3):
            self.admit()

    def admit(self) -> float:
        """Microseconds of CPU time of lookup, allocation and free of a new prompt."""
        own = random_hashes(self.num_tokens // BLOCK_SIZE - len(self.shared))
        hashes = [bytes(bytearray(value)) for value in self.shared] + own  # objects that Python has not hashed
        request = make_request(f"p{next(NAMES)}", [0] * self.num_tokens, hashes)
        return time_us(partial(admit_and_free, self.manager, request))


def bench_admissions(kind: str, num_tokens: int, num_hit: int, rounds: int) -> dict[str, Any]:
    """Medians in microseconds; the two managers admit in turns."""
    medians = in_turns({name: Admissions(name, kind, num_tokens, num_hit).admit for name in MANAGERS}, rounds)
    case = {"case": f"admit/{kind}/{num_tokens}/{num_hit}", "rounds": rounds}
    return (
        case
        | {f"{name}_us": value for name, value in medians.items()}
        | {"ratio": round(medians["vllm"] / medians["kvjax"], 3)}
    )


def main() -> int:
    """Measures, prints, writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_024)
    parser.add_argument("--steps", type=int, default=48, help="of each case; 0: none")
    parser.add_argument("--rounds", type=int, default=200, help="prompts of each admission; 0: none")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    results: dict[str, Any] = {"vllm": vllm.__version__, "admissions": [], "decoding": []}
    for kind in KINDS if options.rounds else ():
        for num_tokens in (64, 512, 8_192):
            for num_hit in (0, num_tokens // 2):
                results["admissions"].append(bench_admissions(kind, num_tokens, num_hit, options.rounds))
                print(results["admissions"][-1], flush=True)
    for kind in KINDS if options.steps else ():
        results["decoding"].append(bench_decoding(kind, options.requests, options.steps))
        print(results["decoding"][-1], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
