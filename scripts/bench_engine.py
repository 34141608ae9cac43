"""Times the host side of the engine on a CPU: one step by part, and how compile time grows with layers.

    python scripts/bench_engine.py step              256 decoding requests of the demo model
    python scripts/bench_engine.py compile           a Llama of 4, 8 and 32 small layers
    python scripts/bench_engine.py --json FILE       both

Flow:    demo model, LLMEngine -> [bench_engine] -> table on the terminal, `--json FILE`

A step's parts are thread time of the engine's thread (`time.thread_time`): jax computes on threads of its own, and
the engine's sleeps while it waits for tokens. That this is so is measured first: a call of a long program must take
little thread time. A part's figure is the median over steps; a part within another counts in itself only. `malloc` is
the first 2 KiB that the thread allocates once the device is done, where the allocator does what it put off while jax
freed memory; it is asked for by a probe, and paid in `update` otherwise. Each compile is a process of its own without a
persistent cache; the figures are the least of `--runs`, wall time and CPU time of all threads from a built model to a
step that has been dispatched once.

The yardstick (2,048 random adds by `np.subtract.at`) tells machines apart: 80 us where the project's bars were set.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np

from kvjax.bench.step_parts import StepTimer
from kvjax.cli.output_files import output_file

YARDSTICK_US = 80.0
DEMO = Path(__file__).resolve().parents[1] / "kvjax" / "demo" / "model"
LAYERS = (4, 8, 32)
PARTS = ("schedule", "plan", "prepare", "pad", "jit", "pack", "dispatch", "read", "malloc", "update", "other")
SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class EngineStep:
    """Medians of one engine step in microseconds of the engine's thread; `wall_us` and `other_cpu_us` beside them."""

    num_requests: int
    parts_us: dict[str, float]
    total_us: float
    least_us: float  # of any step
    scaled_us: float  # the total on a machine whose yardstick is 80 us
    wall_us: float
    other_cpu_us: float  # of jax's threads, which compute
    yardstick_us: float


@dataclass(frozen=True)
class CompileTime:
    """What it takes until a bucket of a model with so many layers has run once."""

    num_layers: int
    seconds: float
    cpu_seconds: float  # of all threads: what a busy machine does not change


def yardstick_us() -> float:
    """The shortest of many adds at 2,048 random places."""
    places = np.random.default_rng(0).permutation(4096)[:2048]
    counts = np.zeros(4096, np.int32)

    def add() -> float:
        start = time.perf_counter()
        np.subtract.at(counts, places, 1)
        return (time.perf_counter() - start) * 1e6

    return min(add() for _ in range(2000))


def check_asynchronous() -> None:
    """Raises RuntimeError where calls of a compiled program compute on the caller's thread.

    On a busy machine a caller that waits may help with one call, so the one of five in which it helped least counts.
    """
    size = 1024
    square = jax.jit(lambda x: (x @ x) @ (x @ x))
    x = jax.block_until_ready(square(np.eye(size, dtype=np.float32)))

    def share_of_caller() -> float:
        start, thread_start = time.perf_counter(), time.thread_time()
        jax.block_until_ready(square(x))
        return (time.thread_time() - thread_start) / (time.perf_counter() - start)

    share = min(share_of_caller() for _ in range(5))
    if share > 0.2:
        raise RuntimeError(
            f"expected jax to compute on other threads, but the caller's thread worked for {share:.0%} of a program; "
            "leave jax_cpu_enable_async_dispatch on"
        )


def demo_engine(num_requests: int, *, async_scheduling: bool) -> Any:
    """An engine of the demo model with `num_requests` requests, all past their prompts."""
    from kvjax.engine import EngineConfig, LLMEngine, SamplingParams

    config = EngineConfig(
        num_blocks=64 * num_requests,
        max_model_len=512,
        max_num_seqs=num_requests,
        max_num_batched_tokens=8 * num_requests,
        async_scheduling=async_scheduling,
    )
    engine = LLMEngine.from_folder(DEMO, config)
    rng = np.random.default_rng(0)
    for _ in range(num_requests):
        prompt = rng.integers(3, engine.model.config.vocab_size, 64).astype(np.int32)
        engine.add_request(prompt, SamplingParams(max_tokens=448, ignore_eos=True))
    while len(engine.step()) < num_requests:
        pass
    for _ in range(4):
        engine.step()
    return engine


def time_parts(engine: Any) -> StepTimer:
    """Times the parts of `engine`'s steps from here on."""
    from kvjax.device import DeviceBatch
    from kvjax.engine import host_loop

    timer, runner = StepTimer(PARTS), engine._runner
    timer.wrap("schedule", engine.scheduler, "schedule")
    timer.wrap("plan", host_loop, "build_step_plan")
    timer.wrap("prepare", engine._loop, "begin_step")
    timer.wrap("pad", DeviceBatch, "from_plan")
    for program in runner.update_step._programs.by_shapes.values():
        timer.wrap("jit", program, "run")
    timer.wrap("pack", runner.update_step, "_programs")
    timer.wrap("dispatch", runner, "dispatch")
    timer.wrap("read", runner, "read")
    timer.wrap("update", engine._loop, "end_step")
    engine._loop.end_step = _after(timer.wrapped("malloc", allocate), engine._loop.end_step)
    timer.wrap("other", engine, "step")
    return timer


def allocate() -> None:
    """Allocates as much as int64s of 256 requests take."""
    np.empty(2048, np.uint8)


def _after(first: Callable[[], object], method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, with `first` called before each call."""

    def called(*args: Any, **kwargs: Any) -> Any:
        first()
        return method(*args, **kwargs)

    return called


def measure_step(num_requests: int, num_steps: int, *, async_scheduling: bool) -> EngineStep:
    """Medians over `num_steps` decoding steps."""
    check_asynchronous()
    engine = demo_engine(num_requests, async_scheduling=async_scheduling)
    timer = time_parts(engine)
    samples: dict[str, list[float]] = defaultdict(list)
    gc.collect()
    for _ in range(num_steps):
        timer.reset()
        process = time.process_time()
        outputs = engine.step()
        process_us = (time.process_time() - process) * 1e6
        if len(outputs) != num_requests:
            raise AssertionError(f"expected a token of {num_requests} requests, got {len(outputs)}")
        parts = timer.parts()
        samples["wall"].append(parts.step_wall_us)
        samples["other"].append(process_us - parts.step_cpu_us)
        samples["total"].append(parts.step_cpu_us)
        for part, part_us in parts.cpu_us.items():
            samples[f"part {part}"].append(part_us)
    us = {name: round(median(values), 1) for name, values in samples.items()}
    yardstick = yardstick_us()
    return EngineStep(
        num_requests=num_requests,
        parts_us={name.removeprefix("part "): value for name, value in us.items() if name.startswith("part ")},
        total_us=us["total"],
        least_us=round(min(samples["total"]), 1),
        scaled_us=round(us["total"] * YARDSTICK_US / yardstick, 1),
        wall_us=us["wall"],
        other_cpu_us=us["other"],
        yardstick_us=round(yardstick, 1),
    )


def compile_here(num_layers: int) -> CompileTime:
    """Compiles one bucket of a small Llama in this process and runs it once."""
    from flax import nnx

    from kvjax.device import Bucket, Buckets, create_pages, make_update_step
    from kvjax.engine.sampler import sample
    from kvjax.engine.sampling_table import SamplingTable
    from kvjax.models import ModelConfig, build_model
    from kvjax.planning import plan_kv_cache

    jax.config.update("jax_enable_compilation_cache", False)
    config = ModelConfig.from_dict(SMALL_LLAMA | {"num_hidden_layers": num_layers})
    plan = plan_kv_cache(
        config.kv_cache_specs(16, "float32"),
        max_model_len=512,
        num_blocks=64,
        max_in_flight_tokens=64,
        platform="cpu",
    )
    model = build_model(config, dtype="float32", rngs=nnx.Rngs(0))
    buckets = Buckets((Bucket(64, 8, 32),), page_counts=(8,))
    pages = create_pages(plan.config)
    sampling = SamplingTable().empty_batch()
    start, cpu_start = time.perf_counter(), time.process_time()
    step = make_update_step(model, plan.config, buckets, sample_fn=sample)
    done: list[tuple[float, float]] = []
    step.warmup(pages, sampling=sampling, on_compiled=lambda _: done.append((time.perf_counter(), time.process_time())))
    return CompileTime(num_layers, round(done[0][0] - start, 3), round(done[0][1] - cpu_start, 3))


def measure_compile(num_layers: int, runs: int) -> CompileTime:
    """The shortest of `runs` processes."""
    command = [sys.executable, str(Path(__file__).resolve()), "compile-here", "--layers", str(num_layers)]
    times = []
    for _ in range(runs):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        times.append(CompileTime(**json.loads(done.stdout.splitlines()[-1])))
    return CompileTime(num_layers, min(one.seconds for one in times), min(one.cpu_seconds for one in times))


def print_step(step: EngineStep) -> None:
    """The table of parts."""
    print(f"one decoding step of {step.num_requests} requests of the demo model, CPU time of the engine's thread")
    for part, us in step.parts_us.items():
        print(f"  {part:10} {us:9,.1f} us")
    print(f"  {'total':10} {step.total_us:9,.1f} us, the least {step.least_us:,.1f} us")
    print(
        f"  {'scaled':10} {step.scaled_us:9,.1f} us, the total were the yardstick 80 us and not {step.yardstick_us:.1f}"
    )
    print(f"  wall {step.wall_us:,.0f} us, CPU time of jax's threads {step.other_cpu_us:,.0f} us")


def print_compiles(compiles: list[CompileTime]) -> None:
    """Seconds, and their ratio to the fewest layers."""
    first = compiles[0]
    for one in compiles:
        print(
            f"  {one.num_layers:3} layers compile in {one.seconds:6.2f} s ({one.seconds / first.seconds:4.2f} times "
            f"{first.num_layers} layers), {one.cpu_seconds:6.2f} s of CPU ({one.cpu_seconds / first.cpu_seconds:4.2f})"
        )


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("all", "step", "compile", "compile-here"), default="all")
    parser.add_argument("--requests", type=int, default=256, help="that decode (default %(default)s)")
    parser.add_argument("--steps", type=int, default=60, help="to take the medians of (default %(default)s)")
    parser.add_argument("--runs", type=int, default=3, help="processes of each compile (default %(default)s)")
    parser.add_argument("--layers", type=int, default=LAYERS[0], help="of compile-here, which measures in this process")
    parser.add_argument("--async-scheduling", action="store_true", help="start a step before the last is read")
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    options = parser.parse_args(arguments)
    for name in ("requests", "steps", "runs", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"expected --{name} of at least 1, got {getattr(options, name)}")
    if options.what == "compile-here":
        print(json.dumps(asdict(compile_here(options.layers))))
        return 0
    results: dict[str, Any] = {}
    if options.what in ("all", "step"):
        step = measure_step(options.requests, options.steps, async_scheduling=options.async_scheduling)
        print_step(step)
        results["step"] = asdict(step)
    if options.what in ("all", "compile"):
        compiles = [measure_compile(num_layers, options.runs) for num_layers in LAYERS]
        print_compiles(compiles)
        results["compile"] = [asdict(one) for one in compiles]
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
