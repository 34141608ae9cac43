"""`kvjax generate`: prompts to text with the reference engine, and what the cache did meanwhile.

Flow:    arguments -> [run] -> LLMEngine steps -> text as it comes -> tables, picture of the pools, PNG, JSON

Many requests run at once, but their text is printed one request after the other in the order of the prompts: the
first unfinished one live, the others as soon as it is their turn.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from kvjax.cli.generate.plot import draw_pools, title_of
from kvjax.cli.generate.prompt_inputs import read_inputs
from kvjax.cli.generate.prompts import NamedPrompt, prompts_file, read_prompts, samples_of
from kvjax.cli.generate.report import report_json, request_table, totals, totals_lines
from kvjax.cli.generate.stream import OrderedTextPrinter
from kvjax.cli.generate.token_text import token_id_text
from kvjax.cli.help_text import Example, default_text
from kvjax.cli.options.fields import add_fields, add_option, read_fields
from kvjax.cli.options.model import BLOCKS_HELP, add_model_arguments
from kvjax.cli.options.pool_size import ample_blocks, even
from kvjax.cli.options.rules import add_rules_argument, release_of
from kvjax.cli.options.sampling import add_sampling_arguments, read_sampling
from kvjax.cli.options.speculation import add_speculation_arguments, read_speculation
from kvjax.cli.options.tiers import add_tier_arguments, read_tiers
from kvjax.cli.options.types import non_negative_int, positive_int
from kvjax.cli.pictures.figures import save_figure
from kvjax.cli.running.interrupts import INTERRUPTED, interruptible
from kvjax.cli.running.output_files import (
    PLOTS,
    STANDARD,
    name_of,
    output_file,
    plot_file,
    require_matplotlib,
    write_json,
)
from kvjax.cli.running.progress import progress
from kvjax.cli.running.start_up import add_start_arguments, start_jax
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import cdiv
from kvjax.demo import demo_model_path
from kvjax.engine import EngineConfig, FinishReason, SpeculativeConfig
from kvjax.engine.front.pool_picture import pool_picture
from kvjax.errors import NeverHitsWarning, TierDataError
from kvjax.models.config import StreamingWindow
from kvjax.replay.misses import miss_table
from kvjax.text import count_of, format_bytes

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from kvjax.engine import GenerationResult, LLMEngine
    from kvjax.models import LoadedModel

DEMO_PROMPTS = "those of the demo"
EXAMPLES = (
    Example("Continue a text by the demo model.", 'kvjax generate "Once upon a time" --max-tokens 16'),
    Example(
        "Draw two samples of each prompt of a file, and keep what the cache did.",
        "kvjax generate --prompts prompts.txt --n 2 --temperature 0.8 --max-tokens 8 --quiet --json run.json",
    ),
)
SETTINGS = ("enable_prefix_caching", "sub_block_hits", "idle_state_dtype", "state_block_size", "ring_tokens")
SIZES = ("block_size", "num_blocks", "memory_bytes", "max_model_len")
RULES = ("eviction_policy",)  # what a release of vLLM decides
MAX_BUCKETS = 2  # one for decoding, one for all else: a run from the command line is short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax generate`."""
    parser.add_argument("texts", nargs="*", metavar="TEXT", help=f"Continue these prompts.{default_text(DEMO_PROMPTS)}")
    what = parser.add_argument_group("what to generate")
    add_model_arguments(what)
    what.add_argument("--prompt", action="append", metavar="TEXT", help="Continue this prompt, which may begin with -.")
    what.add_argument(
        "--prompts",
        type=prompts_file,
        metavar="FILE",
        help='Continue a prompt a line, or of .jsonl {"prompt": ... or "prompt_token_ids": ..., "name": ..., "inputs": '
        '.npz}, or of a chat "messages" and perhaps "tools". The file may be gzipped. - reads standard input, '
        "as .jsonl if it begins with {.",
    )
    what.add_argument(
        "--max-tokens", type=positive_int, default=96, metavar="N", help="Generate at most N tokens for each request."
    )
    what.add_argument(
        "--n",
        type=positive_int,
        default=1,
        metavar="N",
        help="Draw N samples of each prompt, which is computed once. Those after the first are NAME.1, NAME.2, ...",
    )
    add_sampling_arguments(parser.add_argument_group("how tokens are chosen"))
    cache = parser.add_argument_group("cache")
    add_option(cache, "block_size", default=None)
    size = cache.add_mutually_exclusive_group()
    add_option(size, "num_blocks", default=None, help=BLOCKS_HELP, otherwise="what the prompts need")
    add_option(size, "memory_bytes", default=None)
    add_fields(cache, EngineConfig, *SETTINGS, *RULES)
    add_rules_argument(cache, RULES)
    add_tier_arguments(parser.add_argument_group("tiers beyond the cache"))
    how = parser.add_argument_group("how the engine runs")
    how.add_argument(
        "--max-model-len",
        type=positive_int,
        metavar="N",
        help=f"Allow requests of at most N tokens.{default_text('what the prompts need')}",
    )
    how.add_argument(
        "--window",
        type=positive_int,
        metavar="N",
        help="Let full attention see the last N tokens only, as StreamingLLM does.",
    )
    how.add_argument(
        "--sink-tokens",
        type=non_negative_int,
        default=4,
        metavar="N",
        help="Let it see the first N too, which it needs to stay stable.",
    )
    how.add_argument(
        "--keep-prompt", action="store_true", help="Let it see the whole prompt in place of the first tokens."
    )
    own = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "async_scheduling": False}
    add_fields(how, EngineConfig, *own, **own)
    add_speculation_arguments(how)
    add_start_arguments(how)
    out = parser.add_argument_group("what to show")
    out.add_argument("-q", "--quiet", action="store_true", help="Show a progress bar, not the text.")
    out.add_argument("--miss-reasons", action="store_true", help="Say why prompt tokens were not found cached.")
    out.add_argument(
        "--json", type=output_file, metavar="FILE", help=f"Write requests, steps and totals as JSON. {STANDARD}"
    )
    out.add_argument("--plot", type=plot_file, metavar="FILE", help=f"Draw the pools over the run. {PLOTS}")


def run(args: argparse.Namespace) -> int:
    """Generates and reports, after an interrupt what there is by then; 0, or that one came.

    Raises:
        ValueError: prompts, limits or sampling parameters that cannot be.
        ConfigError, CheckpointError: the folder holds no model that can be loaded.
        MissingExtraError: an optional dependency that was asked for is not installed.
    """
    for text in args.texts:
        if os.path.isfile(text):
            warnings.warn(f"the prompt {text!r} names a file; --prompts {text} reads prompts from it", stacklevel=2)
    prompts = read_prompts([*args.texts, *(args.prompt or ())], args.prompts)
    samples = samples_of(prompts, args.n)
    if args.plot is not None:
        require_matplotlib("--plot")
    speculative = read_speculation(args)
    params = read_sampling(args, len(prompts))
    model, mesh = _load(args)
    draft_model = _load_draft_model(args, mesh)
    tokens = [_tokens_of(model, prompt) for prompt in prompts]
    token_ids = [ids for ids, _ in tokens]
    inputs = [
        {"checkpoints": checkpoints, **({} if prompt.inputs is None else read_inputs(prompt.inputs))}
        for prompt, (_, checkpoints) in zip(prompts, tokens, strict=True)
    ]
    config = _engine_config(args, model, max(map(len, token_ids)) + args.max_tokens, speculative)
    engine = _make_engine(args, model, config, mesh, draft_model)
    if model.tokenizer is not None and not args.quiet:
        params = [replace(one, stream_text=True) for one in params]
    requests = list(zip(prompts, token_ids, params, inputs, strict=True))
    for prompt, ids, one, given in requests:
        engine.check_request(ids, one, prompt.name, **given)
    print("\n".join(_about(engine, args, len(samples))), flush=True)
    _warm_up(engine)
    for prompt, ids, one, given in requests:
        engine.add_request(ids, one, request_id=prompt.name, **given)
    start = time.perf_counter()
    printer = OrderedTextPrinter(samples, None if args.quiet else sys.stdout)
    results = _generate(engine, samples, printer, args.quiet)
    wall_s = time.perf_counter() - start
    if engine.connector is not None:
        _save_cache(engine)
        engine.connector.close()
    num_aborted = _num_aborted(results)
    if num_aborted:
        print(f"interrupted after {len(results) - num_aborted:,} of {count_of(len(results), 'request')}\n")
    _report(engine, results, printer.texts, wall_s, args)
    return INTERRUPTED if num_aborted else 0


def _num_aborted(results: dict[str, GenerationResult]) -> int:
    """Requests that an interrupt ended."""
    return sum(result.finish_reason is FinishReason.ABORT for result in results.values())


def _save_cache(engine: LLMEngine) -> None:
    """What the tiers do not take is said, and costs the next run its time alone."""
    try:
        engine.save_cache()
    except TierDataError as error:
        print(f"kvjax: {error}", file=sys.stderr)


def _load(args: argparse.Namespace) -> tuple[LoadedModel, Mesh | None]:
    """The model, and the mesh that its heads are split over."""
    from kvjax.models import load_model

    mesh = start_jax(args.devices, keep_compiled=not args.no_compilation_cache)
    folder = demo_model_path() if args.model is None else args.model
    streaming = None
    if args.window is None and args.keep_prompt:
        raise ValueError("expected --window N with --keep-prompt, got none")
    if args.window is not None:
        streaming = StreamingWindow(size=args.window, num_sink_tokens=args.sink_tokens, keeps_prompt=args.keep_prompt)
    model = load_model(
        folder,
        args.dtype,
        mesh,
        max_model_len=args.max_model_len,
        streaming=streaming,
        keep_quantised=args.keep_quantised,
    )
    return model, mesh


def _tokens_of(model: LoadedModel, prompt: NamedPrompt) -> tuple[Sequence[int], Sequence[int]]:
    """The tokens of a prompt, and the checkpoints of a chat."""
    from kvjax.models import chat_prompt

    if prompt.token_ids is not None:
        return prompt.token_ids, ()
    if prompt.chat is not None:
        return chat_prompt(model, **prompt.chat)
    if model.tokenizer is None:
        raise ValueError(
            f"expected prompt_token_ids in a .jsonl file, got the text {prompt.text[:40]!r}: {model.no_tokenizer}"
        )
    return model.tokenizer.encode(prompt.text), ()


def _load_draft_model(args: argparse.Namespace, mesh: Mesh | None) -> LoadedModel | None:
    from kvjax.models import load_model

    return None if args.draft_model is None else load_model(args.draft_model, args.dtype, mesh)


def _engine_config(
    args: argparse.Namespace, model: LoadedModel, longest: int, speculative: SpeculativeConfig | None = None
) -> EngineConfig:
    """The engine's settings for requests of at most `longest` tokens."""
    block_size = args.block_size or model.config.default_block_size
    max_model_len = args.max_model_len or min(even(cdiv(longest, block_size)) * block_size, model.config.max_model_len)
    return EngineConfig(
        block_size=block_size,
        num_blocks=None if args.memory_bytes else args.num_blocks or _ample_blocks(args, model, max_model_len),
        memory_bytes=args.memory_bytes,
        max_model_len=max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=max(args.max_num_batched_tokens, args.max_num_seqs),
        **read_fields(args, EngineConfig, *SETTINGS, *RULES),
        release=release_of(args, RULES),
        miss_reasons=args.miss_reasons,
        seed=args.seed,
        async_scheduling=args.async_scheduling,
        max_buckets=MAX_BUCKETS,
        speculative=speculative,
        tiers=read_tiers(args),
    )


def _ample_blocks(args: argparse.Namespace, model: LoadedModel, max_model_len: int) -> int:
    in_flight = max(args.max_num_batched_tokens, args.max_num_seqs) * (2 if args.async_scheduling else 1)
    sizes = {"block_size": args.block_size, "max_model_len": max_model_len, "max_num_seqs": args.max_num_seqs}
    return ample_blocks(model, **sizes, max_in_flight_tokens=in_flight)


def _make_engine(
    args: argparse.Namespace,
    model: LoadedModel,
    config: EngineConfig,
    mesh: Mesh | None,
    draft_model: LoadedModel | None,
) -> LLMEngine:
    """The engine. That no prompt can ever hit is only said of sizes that were chosen."""
    from kvjax.engine import LLMEngine

    with warnings.catch_warnings():
        if all(getattr(args, name) is None for name in SIZES):
            warnings.simplefilter("ignore", NeverHitsWarning)
        return LLMEngine(model, config, mesh=mesh, draft_model=draft_model)


def _local_layers(engine: LLMEngine) -> Iterator[str]:
    """How many layers have a cache other than full attention's, by kind."""
    counts = Counter[str]()
    for group in engine.plan.config.kv_cache_groups:
        spec = group.kv_cache_spec
        window = f" with a window of {spec.sliding_window}" if isinstance(spec, SlidingWindowSpec) else None
        if window is not None and spec.num_sink_tokens:
            window += f" and the first {spec.num_sink_tokens}"
        if spec.rswa_window is not None:
            window = f" with the prompt and a window of {spec.rswa_window}"
        counts[window or f" of kind {spec.kind}"] += len(group.layer_names) * (spec.kind != "full_attention")
    return (f"{count}{words}" for words, count in counts.items() if count)


def _about(engine: LLMEngine, args: argparse.Namespace, num_requests: int) -> Iterator[str]:
    """What runs, in a few lines."""
    model, config = engine.model.config, engine.config
    layers = ", ".join([f"{model.num_layers} layers", *_local_layers(engine)])
    name = "the demo model" if args.model is None else str(args.model)
    yield f"Model   {name}: {model.architecture}, {layers}, vocabulary {model.vocab_size:,}"
    caching = "on" if config.enable_prefix_caching else "off"
    caching += ", also inside blocks" if config.sub_block_hits else ""
    caching += f", {config.eviction_policy} eviction" if config.eviction_policy != EngineConfig.eviction_policy else ""
    caching += f", rules of vLLM {config.release}" if config.release is not None else ""
    for pool in engine.plan.pools:
        sizes = sorted({engine.plan.groups[i].spec.block_size for i in pool.group_ids})
        yield (
            f"Pool {pool.pool_id}  {pool.num_blocks - 1:,} blocks of {' or '.join(map(str, sizes))} tokens for "
            f"{len(pool.group_ids)} block tables, {format_bytes(pool.total_bytes)} a device; prefix caching {caching}"
        )
    yield (
        f"Engine  {count_of(num_requests, 'request')}, {config.max_num_seqs} at once, "
        f"{config.max_num_batched_tokens} tokens a step, {args.devices} device{'s' if args.devices > 1 else ''}"
    )
    if config.speculative is not None:
        how = "by prompt lookup" if args.draft_model is None else f"by {args.draft_model}"
        yield f"Drafts  at most {config.num_drafts} a request and step, {how}"


def _warm_up(engine: LLMEngine) -> None:
    from kvjax.device import count_compilations

    start = time.perf_counter()
    with count_compilations() as programs, progress("Compiling", engine.num_buckets, "shape") as advance:
        engine.warmup(advance)
    seconds, num_compiled = time.perf_counter() - start, programs.num_programs - programs.num_cached
    print(
        f"Warm-up {count_of(engine.num_buckets, 'step shape')} in {seconds:.1f} s: {num_compiled} programs compiled, "
        f"{programs.num_cached} taken from the compilation cache\n",
        flush=True,
    )


def _generate(
    engine: LLMEngine, samples: Sequence[NamedPrompt], printer: OrderedTextPrinter, quiet: bool
) -> dict[str, GenerationResult]:
    """Results by name, in the order of the prompts and their samples; an interrupt aborts what is unfinished then."""
    results: dict[str, GenerationResult] = {}
    with (
        interruptible() as should_stop,
        progress("Generating", len(samples), "request", enabled=quiet) as advance,
    ):
        while len(results) < len(samples) and not should_stop():
            for output in engine.step():
                if engine.model.tokenizer is None:
                    printer.push(output.request_id, token_id_text([output.token_id]))
                elif output.text is not None:
                    printer.push(output.request_id, output.text)
                if output.result is not None:
                    results[output.request_id] = output.result
                    printer.end(output.request_id, _text_of(output.result))
                    advance(1)
    if len(results) < len(samples):
        for sample in samples:
            if sample.name not in results:
                results[sample.name] = engine.abort(sample.name)
                printer.end(sample.name, _text_of(results[sample.name]))
        engine.step()  # reads a step in flight, so that the steps' sums are the requests'
    return {sample.name: results[sample.name] for sample in samples}


def _text_of(result: GenerationResult) -> str:
    return token_id_text(result.output_token_ids) if result.text is None else result.text


def _report(
    engine: LLMEngine,
    results: dict[str, GenerationResult],
    texts: dict[str, str],
    wall_s: float,
    args: argparse.Namespace,
) -> None:
    steps = list(engine.step_stats)
    print(request_table(results), end="\n\n")
    sums = totals(results, steps, wall_s)
    print("\n".join(totals_lines(sums)))
    if args.miss_reasons:
        print("", miss_table(sums["hit_tokens"], sums["missed_tokens"]), sep="\n")
    for pool in engine.plan.pools:
        print(f"\nPool {pool.pool_id} over time", *pool_picture(steps, pool.pool_id), sep="\n")
    if args.plot is not None:
        title = title_of(sums["requests"], sums["token_hit_rate"], _num_aborted(results))
        save_figure(draw_pools(steps, title), args.plot)
        print(f"\nPlot written to {args.plot}")
    if args.json is not None:
        config = {"model": "demo" if args.model is None else str(args.model), **asdict(engine.config)}
        report = report_json(results, texts, steps, wall_s, config)
        write_json(args.json, report, indent=1)
        print(f"Report written to {name_of(args.json)}")
