"""vLLM's scheduler with its own manager and with kvjax's, in turns in one process: `schedule()`, admissions, hits.

Usage:   DIR/python scripts/vllm_bench.py [--trace FILE] [--json FILE], by the wrapper that vllm_conformance.sh writes
Flow:    vLLM's Scheduler, twice -> [decoding steps in turns; a trace's prompts] -> medians, hit tokens

A step is `schedule()` of all requests, one decoded token each; prompts differ in length so that every step fills blocks
of some. What is timed is vLLM's whole `schedule()`, of which the manager is a part, and apart from it the manager's
calls alone (`allocate_slots` of all requests). An admission is the manager's part of one prompt: looked up, allocated,
freed; of its tokens the first half is hit, or none.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform

vllm.platforms._current_platform = CpuPlatform()

from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.utils.hashing import sha256  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.core.sched import scheduler as scheduler_module  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.v1.structured_output import StructuredOutputManager  # noqa: E402

import kvjax.adapters.vllm  # noqa: E402

VLLM_MANAGER = scheduler_module.KVCacheManager
NAMES = count()  # of requests
BLOCK_SIZE = 16
PROMPT = 256
HEADS = {"block_size": BLOCK_SIZE, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
KINDS = {
    "full": lambda: [FullAttentionSpec(**HEADS)],
    "hybrid": lambda: [FullAttentionSpec(**HEADS)] + [SlidingWindowSpec(**HEADS, sliding_window=128) for _ in range(5)],
}


def supported(call: Any, **arguments: Any) -> Any:
    """Calls with those of the arguments that this release's `call` takes."""
    known = inspect.signature(call).parameters
    return call(**{name: value for name, value in arguments.items() if name in known})


def config_of(specs: list[Any], num_blocks: int) -> Any:
    groups = [KVCacheGroupSpec([f"layers.{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def make_scheduler(specs: list[Any], num_requests: int, num_blocks: int) -> Any:
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


def make_request(name: str, token_ids: list[int], max_tokens: int, is_hashed: bool = True) -> Any:
    return supported(
        Request,
        request_id=name,
        prompt_token_ids=token_ids,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        pooling_params=None,
        eos_token_id=None,
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256) if is_hashed else None,
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
        specs = KINDS[kind]()
        num_blocks = 2 + len(specs) * num_requests * (PROMPT // BLOCK_SIZE + 12)
        with manager_of(manager):
            self.scheduler = make_scheduler(specs, num_requests, num_blocks)
        self.manager = self.scheduler.kv_cache_manager
        for i in range(num_requests):
            tokens = [(i * 7919 + k) % 50_000 for k in range(PROMPT + i % BLOCK_SIZE)]
            self.scheduler.add_request(make_request(f"r{i}", tokens, 1_000))
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


def bench_decoding(kind: str, num_requests: int, num_steps: int) -> dict[str, Any]:
    """Medians in microseconds; the two schedulers step in turns."""
    both = {name: Decoding(name, kind, num_requests) for name in ("vllm", "kvjax")}
    result: dict[str, Any] = {"case": f"schedule/{kind}/{num_requests}", "steps": num_steps}
    gc.collect()
    gc.disable()
    for part in ("schedule", "allocate"):
        samples: dict[str, list[float]] = {name: [] for name in both}
        for _ in range(num_steps):
            for name, decoding in both.items():
                samples[name].append(decoding.step() if part == "schedule" else decoding.allocate())
        for name, values in samples.items():
            result[f"{name}_{part}_us"] = round(median(values), 1)
    gc.enable()
    result["schedule_ratio"] = round(result["vllm_schedule_us"] / result["kvjax_schedule_us"], 3)
    result["allocate_ratio"] = round(result["vllm_allocate_us"] / result["kvjax_allocate_us"], 3)
    return result


class Admissions:
    """A manager that prompts pass through, one at a time."""

    def __init__(self, manager: str, kind: str, num_tokens: int, num_hit: int) -> None:
        specs = KINDS[kind]()
        with manager_of(manager):
            make = scheduler_module.KVCacheManager
        sizes = {"max_model_len": 2 * num_tokens, "hash_block_size": BLOCK_SIZE, "scheduler_block_size": BLOCK_SIZE}
        num_blocks = 8 * len(specs) * num_tokens // BLOCK_SIZE
        known = inspect.signature(VLLM_MANAGER).parameters
        sizes = {name: size for name, size in sizes.items() if name in known}
        self.manager = make(config_of(specs, num_blocks), **sizes)
        self.num_tokens, self.num_hit = num_tokens, num_hit
        self.shared = [os.urandom(32) for _ in range(num_hit // BLOCK_SIZE)]
        for _ in range(3):
            self.admit()

    def admit(self) -> list[float]:
        """Microseconds of CPU time of lookup, allocation and free of a new prompt."""
        request = make_request(f"p{next(NAMES)}", [0] * self.num_tokens, 1, is_hashed=False)
        own = [os.urandom(32) for _ in range((self.num_tokens - self.num_hit) // BLOCK_SIZE)]
        request.block_hashes[:] = [bytes(bytearray(value)) for value in self.shared] + own
        times = [time.thread_time_ns()]
        blocks, num_computed, *_ = self.manager.get_computed_blocks(request)
        times.append(time.thread_time_ns())
        if self.manager.allocate_slots(request, self.num_tokens - num_computed, num_computed, blocks) is None:
            raise AssertionError("a prompt does not fit")
        times.append(time.thread_time_ns())
        self.manager.free(request)
        times.append(time.thread_time_ns())
        return [(end - start) / 1e3 for start, end in pairwise(times)]


def bench_admissions(kind: str, num_tokens: int, num_hit: int, rounds: int) -> dict[str, Any]:
    """Medians in microseconds; the two managers admit in turns."""
    both = {name: Admissions(name, kind, num_tokens, num_hit) for name in ("vllm", "kvjax")}
    samples: dict[str, list[list[float]]] = {name: [] for name in both}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, admissions in both.items():
            samples[name].append(admissions.admit())
    gc.enable()
    result: dict[str, Any] = {"case": f"admit/{kind}/{num_tokens}/{num_hit}", "rounds": rounds}
    for name, values in samples.items():
        parts = [round(median(part), 1) for part in zip(*values, strict=True)]
        result |= dict(zip((f"{name}_look_up_us", f"{name}_allocate_us", f"{name}_free_us"), parts, strict=True))
        result[f"{name}_us"] = round(median(sum(value) for value in values), 1)
    result["ratio"] = round(result["vllm_us"] / result["kvjax_us"], 3)
    return result


def replay_hits(manager: str, lines: list[dict[str, Any]], num_blocks: int) -> dict[str, Any]:
    """Hit tokens of a trace's prompts, one request at a time, blocks of 512 tokens, and the time of it."""
    size = 512
    spec = FullAttentionSpec(**HEADS | {"block_size": size})
    with manager_of(manager):
        make = scheduler_module.KVCacheManager
    longest = max(line["input_length"] for line in lines) + 1
    arguments = {"max_model_len": longest, "hash_block_size": size, "enable_caching": True, "log_stats": True}
    if "scheduler_block_size" in inspect.signature(VLLM_MANAGER).parameters:
        arguments["scheduler_block_size"] = size
    cache = make(config_of([spec], num_blocks), **arguments)
    hits = queries = 0
    start = time.perf_counter()
    for i, line in enumerate(lines):
        request = make_request(f"r{i}", [0] * line["input_length"], 1, is_hashed=False)
        full = line["hash_ids"][: line["input_length"] // size]
        request.block_hashes[:] = [value.to_bytes(32, "big") for value in full]
        blocks, num_tokens, *_ = cache.get_computed_blocks(request)
        if cache.allocate_slots(request, request.num_tokens - num_tokens, num_tokens, blocks) is None:
            raise AssertionError("a prompt does not fit")
        cache.free(request)
        hits += num_tokens
        queries += request.num_tokens
    seconds = time.perf_counter() - start
    return {
        "manager": manager,
        "num_blocks": num_blocks,
        "queries": queries,
        "hits": hits,
        "seconds": round(seconds, 2),
    }


def main() -> int:
    """Measures, prints, writes; 1 if hits differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=1_024)
    parser.add_argument("--steps", type=int, default=48, help="0: only the trace")
    parser.add_argument("--rounds", type=int, default=200, help="prompts of each admission; 0: none")
    parser.add_argument("--trace", type=Path, help="JSON lines of input_length and hash_ids of 512 tokens (Mooncake)")
    parser.add_argument("--json", type=Path, help="write the results there")
    options = parser.parse_args()
    init_none_hash(sha256)
    results: dict[str, Any] = {"vllm": vllm.__version__, "admissions": [], "decoding": [], "trace": []}
    for kind in KINDS if options.rounds else ():
        for num_tokens in (64, 512, 8_192):
            for num_hit in (0, num_tokens // 2):
                results["admissions"].append(bench_admissions(kind, num_tokens, num_hit, options.rounds))
                print(results["admissions"][-1], flush=True)
    for kind in KINDS if options.steps else ():
        results["decoding"].append(bench_decoding(kind, options.requests, options.steps))
        print(results["decoding"][-1], flush=True)
    if options.trace is not None:
        lines = [json.loads(line) for line in options.trace.read_text().splitlines()]
        for num_blocks in (10_000, 50_000):
            for name in ("vllm", "kvjax"):
                results["trace"].append(replay_hits(name, lines, num_blocks))
                print(results["trace"][-1], flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    pairs = zip(results["trace"][::2], results["trace"][1::2], strict=True)
    return int(any(own["hits"] != ours["hits"] for own, ours in pairs))


if __name__ == "__main__":
    raise SystemExit(main())
