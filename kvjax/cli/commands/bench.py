"""`kvjax bench`: how fast the engine runs a model here, where a step's time goes, and Hugging Face next to it.

Flow:    arguments -> [run] -> kvjax.bench -> tables, JSON

Every figure is measured in the run that prints it. Where torch and transformers are installed, `generate` of Hugging
Face runs the same prompts in a process of its own, in turns with the engine.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kvjax.bench.floor import MachineRates, MatrixSizes, floor_speeds
from kvjax.bench.hugging_face import HuggingFaceProcess
from kvjax.bench.measure import EngineRun, Speeds, measure_engine, measure_hugging_face
from kvjax.bench.report import BenchResult, WarmUp, bench_json, bench_text
from kvjax.bench.workload import Workload
from kvjax.cli.help_text import Example, default_text
from kvjax.cli.options.fields import add_fields, add_option
from kvjax.cli.options.model import BLOCKS_HELP, add_model_arguments
from kvjax.cli.options.pool_size import ample_blocks
from kvjax.cli.options.speculation import add_speculation_arguments, read_speculation
from kvjax.cli.options.types import non_negative_int, positive_int
from kvjax.cli.running.interrupts import INTERRUPTED, interruptible
from kvjax.cli.running.output_files import STANDARD, name_of, output_file, write_json
from kvjax.cli.running.progress import progress
from kvjax.cli.running.start_up import add_start_arguments, start_jax
from kvjax.core.spec import cdiv
from kvjax.demo import demo_model_path, demo_requests
from kvjax.engine import EngineConfig, SamplingParams, SpeculativeConfig

if TYPE_CHECKING:
    from kvjax.engine import LLMEngine
    from kvjax.models import LoadedModel

EXAMPLES = (
    Example(
        "Measure the demo model alone, with short prompts.",
        "kvjax bench --batch 4 --prompt-len 64 --new-tokens 8 --runs 1 --no-hugging-face",
    ),
    Example(
        "Draft tokens from each request's own text, and keep all figures.",
        "kvjax bench --batch 2 --prompt-len 64 --new-tokens 8 --runs 1 --speculative prompt-lookup --json bench.json",
    ),
)
MAX_BUCKETS = 5
PLAIN, COMPILED = "Hugging Face generate", "HF compiled, static cache"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax bench`."""
    what = parser.add_argument_group("what to run")
    add_model_arguments(what)
    what.add_argument("--batch", type=positive_int, default=16, metavar="N", help="Run N requests at once.")
    what.add_argument("--prompt-len", type=positive_int, default=256, metavar="N", help="Give each prompt N tokens.")
    what.add_argument(
        "--new-tokens", type=positive_int, default=64, metavar="N", help="Generate N tokens for each, at least 2."
    )
    what.add_argument(
        "--shared-len",
        type=non_negative_int,
        metavar="N",
        help="Let all prompts of the prefix-cache workload begin with the same N tokens."
        f"{default_text('half of a prompt')}",
    )
    what.add_argument("--runs", type=positive_int, default=3, metavar="N", help="Measure N runs, and show the median.")
    how = parser.add_argument_group("how the engine runs")
    add_option(how, "block_size", default=None)
    add_option(how, "num_blocks", default=None, help=BLOCKS_HELP, otherwise="ample")
    own = {"max_num_batched_tokens": 512, "async_scheduling": False}
    add_fields(how, EngineConfig, *own, **own)
    add_speculation_arguments(how)
    add_start_arguments(how)
    other = parser.add_argument_group("Hugging Face")
    other.add_argument("--no-hugging-face", action="store_true", help="Measure the engine alone.")
    other.add_argument(
        "--hf-compiled",
        action="store_true",
        help="Measure torch.compile over a static cache too, which compiles for minutes.",
    )
    other.add_argument(
        "--hf-python",
        metavar="PYTHON",
        help=f"Run Hugging Face by this interpreter, with torch and transformers.{default_text('this one, if it has')}",
    )
    other.add_argument(
        "--hf-threads", type=positive_int, metavar="N", help=f"Give torch N threads.{default_text('all cores')}"
    )
    out = parser.add_argument_group("what to show")
    out.add_argument(
        "--json", type=output_file, metavar="FILE", help=f"Write the figures of every run as JSON. {STANDARD}"
    )


def run(args: argparse.Namespace) -> int:
    """Measures and prints, after an interrupt the whole runs by then; 0, or that one came.

    Raises:
        ValueError: sizes that cannot be.
        ConfigError, CheckpointError: the folder holds no model that can be loaded.
        MissingExtraError: `--hf-python` lacks torch or transformers.
        RuntimeError: the process of Hugging Face ended.
    """
    from kvjax.engine import LLMEngine
    from kvjax.models import load_model

    _check_sizes(args)
    speculative = read_speculation(args)
    mesh = start_jax(args.devices, keep_compiled=not args.no_compilation_cache)
    folder = demo_model_path() if args.model is None else args.model
    model = load_model(folder, args.dtype, mesh, keep_quantised=args.keep_quantised)
    workload = _workload(args, model)
    draft_model = None if args.draft_model is None else load_model(args.draft_model, args.dtype, mesh)
    engine = LLMEngine(model, _engine_config(args, model, speculative), mesh=mesh, draft_model=draft_model)
    engine.check_request(workload.prompts[0], SamplingParams(max_tokens=args.new_tokens))
    with ExitStack() as stack:
        baselines = _baselines(args, folder, model.config.dtype, stack)
        print("\n".join(_about(args, engine, baselines)), flush=True)
        warmup = _warm_up(engine)
        floor = _floor(engine, workload)
        runs, others = _measure(args, engine, workload, baselines)
        versions = next((process.versions for process in baselines.values()), {})
    if len(runs) < args.runs:
        print(f"interrupted after {len(runs)} of {args.runs} runs")
        if not runs:
            return INTERRUPTED
    result = BenchResult(workload, warmup, runs, others, versions, floor)
    print(bench_text(result))
    if args.json is not None:
        settings = {"model": "demo" if args.model is None else str(args.model), "weights": model.config.dtype}
        settings["keep_quantised"] = args.keep_quantised
        report = {"config": settings | {"devices": args.devices, **asdict(engine.config)}, **bench_json(result)}
        report["interrupted"] = len(runs) < args.runs
        write_json(args.json, report, indent=1)
        print(f"\nReport written to {name_of(args.json)}")
    return 0 if len(runs) == args.runs else INTERRUPTED


def _check_sizes(args: argparse.Namespace) -> None:
    """Raises ValueError where a run cannot have these sizes, before a model is loaded."""
    if args.new_tokens < 2:
        raise ValueError(f"expected --new-tokens of at least 2, got {args.new_tokens}: the first is not decoded")
    if args.shared_len is not None and args.shared_len >= args.prompt_len:
        raise ValueError(f"expected --shared-len below the {args.prompt_len} of --prompt-len, got {args.shared_len}")


def _workload(args: argparse.Namespace, model: LoadedModel) -> Workload:
    """Text of the demo's conversations where the model has a tokenizer, else random tokens."""
    text: list[int] = []
    if model.tokenizer is not None:
        text = [int(token) for one in demo_requests() for token in model.tokenizer.encode(one.prompt)]
    return Workload.make(
        model.config.vocab_size,
        text,
        batch=args.batch,
        prompt_len=args.prompt_len,
        num_new_tokens=args.new_tokens,
        shared_len=args.prompt_len // 2 if args.shared_len is None else args.shared_len,
    )


def _engine_config(args: argparse.Namespace, model: LoadedModel, speculative: SpeculativeConfig | None) -> EngineConfig:
    block_size = args.block_size or model.config.default_block_size
    longest = args.prompt_len + args.new_tokens
    max_model_len = max(min(cdiv(longest, block_size) * block_size, model.config.max_model_len), longest)
    num_tokens = max(args.max_num_batched_tokens, args.batch)
    num_blocks = args.num_blocks or ample_blocks(
        model,
        block_size=args.block_size,
        max_model_len=max_model_len,
        max_num_seqs=args.batch,
        max_in_flight_tokens=num_tokens * (2 if args.async_scheduling else 1),
    )
    return EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        max_num_seqs=args.batch,
        max_num_batched_tokens=num_tokens,
        async_scheduling=args.async_scheduling,
        max_buckets=MAX_BUCKETS,
        speculative=speculative,
    )


def _baselines(args: argparse.Namespace, folder: Path, dtype: str, stack: ExitStack) -> dict[str, HuggingFaceProcess]:
    """Hugging Face with the same weights, by how it runs; none where not wanted, or not installed and not asked for."""
    if args.no_hugging_face:
        return {}
    if args.hf_python is None and not all(importlib.util.find_spec(name) for name in ("torch", "transformers")):
        return {}
    start = partial(
        HuggingFaceProcess,
        folder,
        python=args.hf_python or sys.executable,
        dtype=dtype,
        num_threads=args.hf_threads or _num_cores(),
    )
    names = {PLAIN: False, COMPILED: True} if args.hf_compiled else {PLAIN: False}
    return {name: stack.enter_context(start(compiled=compiled)) for name, compiled in names.items()}


def _floor(engine: LLMEngine, workload: Workload) -> Speeds | None:
    """The machine's floor for the model's matrices; None where not every token passes all of them."""
    sizes = MatrixSizes.of(engine.model.module)
    if sizes is None:
        return None
    rates = MachineRates.measure(engine.model.config.dtype)
    specs = engine.model.config.kv_cache_specs(engine.config.block_size).values()
    return floor_speeds(workload, sizes, specs, rates, engine.config.max_num_batched_tokens)


def _num_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _about(args: argparse.Namespace, engine: LLMEngine, baselines: Mapping[str, HuggingFaceProcess]) -> list[str]:
    model, config = engine.model.config, engine.config
    name = "the demo model" if args.model is None else str(args.model)
    lines = [
        f"Model   {name}: {model.architecture}, {model.num_layers} layers, {model.dtype}",
        f"Work    {args.batch} requests of {args.prompt_len} prompt and {args.new_tokens} new tokens; steps of at most "
        f"{config.max_num_batched_tokens} tokens, {'two in flight' if config.async_scheduling else 'one at a time'}, "
        f"{args.devices} device{'s' if args.devices > 1 else ''}; median of {args.runs}",
    ]
    if config.speculative is not None:
        how = "by prompt lookup" if args.draft_model is None else f"by {args.draft_model}"
        lines.append(f"Drafts  at most {config.num_drafts} a request and step, {how}")
    if not baselines and not args.no_hugging_face:
        lines.append("HF      not compared: torch and transformers are not installed here (see --hf-python)")
    return lines


def _warm_up(engine: LLMEngine) -> WarmUp:
    from kvjax.device import count_compilations

    start = time.perf_counter()
    with count_compilations() as programs, progress("Compiling", engine.num_buckets, "shape") as advance:
        engine.warmup(advance)
    return WarmUp(engine.num_buckets, time.perf_counter() - start, programs.num_programs, programs.num_cached)


def _measure(
    args: argparse.Namespace, engine: LLMEngine, workload: Workload, baselines: Mapping[str, HuggingFaceProcess]
) -> tuple[list[EngineRun], dict[str, list[Speeds]]]:
    """The runs of all, in turns; a first run of each is not counted."""
    runs: list[EngineRun] = []
    others: dict[str, list[Speeds]] = {name: [] for name in baselines}
    with interruptible() as should_stop, progress("Measuring", args.runs + 1, "run") as advance:
        for number in range(args.runs + 1):
            mine = measure_engine(engine, workload)
            theirs = {name: measure_hugging_face(process, workload) for name, process in baselines.items()}
            if should_stop():
                break
            if number:
                runs.append(mine)
                for name, speeds in theirs.items():
                    others[name].append(speeds)
            advance(1)
    return runs, others
