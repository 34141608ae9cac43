"""`kvjax replay`: a trace or a generated workload through the real cache managers, without a model.

Flow:    arguments -> [run] -> kvjax.replay.run_replay -> text, JSON, plots
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from kvjax.cli.arguments import byte_size, non_negative_float, non_negative_int, positive_float, positive_int
from kvjax.cli.interrupts import INTERRUPTED, interruptible
from kvjax.cli.output_files import output_file, require_matplotlib
from kvjax.cli.progress import progress
from kvjax.cli.replay_calls import make_calls
from kvjax.configs import known_models, load_model_config
from kvjax.core.eviction import FREE_ORDERS
from kvjax.core.hashing.block_hash import ALGORITHMS
from kvjax.errors import ConfigError
from kvjax.replay import (
    REPLAY_POLICIES,
    WORKLOADS,
    BatchingConfig,
    ReplayConfig,
    SpeedModel,
    TraceRequest,
    generate_workload,
    read_trace,
    result_json,
    result_text,
    run_replay,
    write_trace,
)

DEFAULT_MODEL = "llama-3-8b"
DEFAULT_MEMORY_BYTES = 52 * 2**30  # what an H100 has left beside the weights of the default model
DEFAULT_NUM_REQUESTS = 2_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax replay`."""
    parser.add_argument("trace", nargs="?", metavar="TRACE", help="JSON lines in Mooncake's format")
    parser.add_argument("--calls", metavar="FILE", help="recorded calls instead: make them again, compare answers")
    _add_workload_arguments(parser.add_argument_group("workload"))
    _add_cache_arguments(parser.add_argument_group("cache"))
    _add_speed_arguments(parser.add_argument_group("continuous batching in virtual time"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=output_file, metavar="FILE", help="write the result as JSON")
    output.add_argument(
        "--plot", type=output_file, metavar="FILE", help="PNG of hits, occupancy, queue and block lifetimes"
    )
    output.add_argument("--record", type=output_file, metavar="FILE", help="write the manager's calls, for --calls")
    output.add_argument(
        "--miss-reasons", action="store_true", help="say why prompt tokens missed; its time counts as the managers'"
    )
    output.add_argument(
        "--remember-evicted",
        type=positive_int,
        default=ReplayConfig.max_evicted_blocks,
        metavar="N",
        help=f"evicted blocks of a pool that --miss-reasons knows (default: {ReplayConfig.max_evicted_blocks:,})",
    )
    output.add_argument("--no-progress", action="store_true", help="no progress bar (there is none off a terminal)")


def _add_workload_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--generate", choices=WORKLOADS, metavar="KIND", help=f"no trace but {', '.join(WORKLOADS)}")
    group.add_argument(
        "--num-requests",
        type=positive_int,
        metavar="N",
        help=f"how many to generate (default: {DEFAULT_NUM_REQUESTS:,}) or to read (default: all)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the generated workload (default: 0)")
    group.add_argument("--write", type=output_file, metavar="FILE", help="write the workload as a trace and stop")


def _add_cache_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"{', '.join(known_models())}, a Hugging Face folder, or a config.json (default: {DEFAULT_MODEL})",
    )
    group.add_argument("--block-size", type=positive_int, metavar="N", help="tokens a block (default: the model's)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--memory", type=byte_size, metavar="BYTES", help="of one device (default: 52GiB)")
    size.add_argument("--num-blocks", type=positive_int, metavar="N", help="usable blocks, the null block not counted")
    group.add_argument(
        "--request-len",
        type=positive_int,
        metavar="N",
        help="usual request, for which several pools are balanced (default: the longest)",
    )
    group.add_argument("--dtype", help="of the cache (default: the model's)")
    group.add_argument(
        "--platform", choices=["cpu", "gpu", "tpu"], default="gpu", help="whose padding to count (default: gpu)"
    )
    group.add_argument(
        "--tensor-parallel", type=positive_int, default=1, metavar="N", help="devices that share KV heads"
    )
    group.add_argument("--no-hybrid", action="store_true", help="windowed layers keep every token")
    group.add_argument("--hash-algorithm", choices=ALGORITHMS, default="sha256_cbor", help="default: sha256_cbor")
    group.add_argument(
        "--policy",
        choices=REPLAY_POLICIES,
        default="lru",
        help="which free block to reuse next; belady looks ahead in the trace, a bound for --serial (default: lru)",
    )
    group.add_argument(
        "--retention-interval",
        type=non_negative_int,
        metavar="N",
        help="cache windows and recurrent states only where requests end or part, and every N tokens (0: nowhere else; "
        "default: everywhere)",
    )
    group.add_argument("--free-order", choices=FREE_ORDERS, default="append", help="of lru (default: append)")


def _add_speed_arguments(group: argparse._ArgumentGroup) -> None:
    speed, batching = SpeedModel(), BatchingConfig()
    group.add_argument(
        "--serial", action="store_true", help="instead: look up, allocate and free one request at a time"
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive_int,
        default=batching.max_num_batched_tokens,
        metavar="N",
        help=f"token budget of a step (default: {batching.max_num_batched_tokens:,})",
    )
    group.add_argument(
        "--max-num-seqs",
        type=positive_int,
        default=batching.max_num_seqs,
        metavar="N",
        help=f"requests that run at once (default: {batching.max_num_seqs})",
    )
    group.add_argument(
        "--prefill-tokens-per-s",
        type=positive_float,
        default=speed.prefill_tokens_per_s,
        metavar="X",
        help=f"default: {speed.prefill_tokens_per_s:,.0f}",
    )
    for name, help_text in (
        ("step_overhead_ms", "every step"),
        ("decode_base_ms", "a step that decodes: reading the weights"),
        ("decode_us_per_request", "each decoding request"),
        ("decode_ns_per_kv_token", "each token that decoding requests attend to"),
    ):
        default = getattr(speed, name)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=non_negative_float,
            default=default,
            metavar="X",
            help=f"{help_text} (default: {default:g})",
        )


def run(args: argparse.Namespace) -> int:
    """Replays and prints the result, or what there is of it when an interrupt comes; 0, or that it came.

    Raises:
        TraceError: a bad line of the trace.
        ConfigError: neither or both of a trace and --generate, or a bad model.
        MemoryBudgetError: the cache does not hold the longest request.
        MissingExtraError: --plot without matplotlib.
        CallLogError: --calls with a file of none, or an answer that differs.
    """
    if args.calls is not None:
        if args.trace is not None or args.generate is not None:
            raise ConfigError("expected --calls without a TRACE or --generate, got both: a record has its own requests")
        return make_calls(args.calls, with_progress=not args.no_progress)
    trace = _trace(args)
    if args.write is not None:
        write_trace(trace, args.write)
        print(f"wrote {len(trace):,} requests, {sum(r.input_length for r in trace):,} prompt tokens, to {args.write}")
        return 0
    if args.plot is not None:
        require_matplotlib("--plot")  # before minutes of work
    config = _config(args)
    with (
        interruptible() as should_stop,
        progress("Replaying", len(trace), "request", enabled=not args.no_progress) as advance,
    ):
        result = run_replay(trace, config, advance, args.record, should_stop)
    print(result_text(result))
    if args.json is not None:
        args.json.write_text(json.dumps(_source(args) | result_json(result), indent=2) + "\n", encoding="utf-8")
    if args.plot is not None:
        from kvjax.cli.replay_plot import plot_replay

        plot_replay(result, args.plot, title=f"{Path(args.trace).name if args.trace else args.generate}, {args.model}")
    return 0 if result.is_complete else INTERRUPTED


def _trace(args: argparse.Namespace) -> Sequence[TraceRequest]:
    if (args.trace is None) == (args.generate is None):
        given = "none" if args.trace is None else "both"
        raise ConfigError(f"expected a TRACE or --generate {{{','.join(WORKLOADS)}}}, got {given}")
    if args.generate is not None:
        return generate_workload(args.generate, args.num_requests or DEFAULT_NUM_REQUESTS, args.seed)
    return read_trace(args.trace, args.num_requests)


def _source(args: argparse.Namespace) -> dict[str, str | int | None]:
    return {"trace": args.trace, "generate": args.generate, "seed": args.seed, "model": args.model}


def _config(args: argparse.Namespace) -> ReplayConfig:
    memory = DEFAULT_MEMORY_BYTES if args.memory is None and args.num_blocks is None else args.memory
    return ReplayConfig(
        specs=load_model_config(args.model).kv_cache_specs(args.block_size, args.dtype),
        num_blocks=args.num_blocks,
        memory_bytes=memory,
        request_len=args.request_len,
        hash_algorithm=args.hash_algorithm,
        free_order=args.free_order,
        eviction_policy=args.policy,
        explain_misses=args.miss_reasons,
        max_evicted_blocks=args.remember_evicted,
        retention_interval=args.retention_interval,
        serial=args.serial,
        platform=args.platform,
        tensor_parallel=args.tensor_parallel,
        hybrid=not args.no_hybrid,
        speed=SpeedModel(
            prefill_tokens_per_s=args.prefill_tokens_per_s,
            step_overhead_ms=args.step_overhead_ms,
            decode_base_ms=args.decode_base_ms,
            decode_us_per_request=args.decode_us_per_request,
            decode_ns_per_kv_token=args.decode_ns_per_kv_token,
        ),
        batching=BatchingConfig(args.max_num_batched_tokens, args.max_num_seqs),
    )
