"""Arguments that `kvjax replay` and `kvjax route` share: the requests, the cache, the speed of a step.

Flow:    [add_*_arguments] -> argparse.Namespace -> [trace_of, config_of] -> kvjax.replay
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvjax.cli.options.rules import add_rules_argument, release_of
from kvjax.cli.options.types import (
    add_fields,
    byte_size,
    interval,
    non_negative_float,
    positive_float,
    positive_int,
    read_fields,
)
from kvjax.configs import known_models, load_model_config
from kvjax.core.hashing.block_hash import ALGORITHMS
from kvjax.errors import ConfigError
from kvjax.planning import Load
from kvjax.replay import (
    REPLAY_POLICIES,
    WORKLOADS,
    BatchingConfig,
    ReplayConfig,
    ReplayTierConfig,
    SpeedModel,
    TraceReading,
    TraceRequest,
    generate_workload,
    read_trace,
)
from kvjax.replay.readers.reading import AS_IT_SAYS, DEFAULT_USERS
from kvjax.replay.readers.values import UNITS
from kvjax.replay.trace import cut_tails

DEFAULT_MODEL = "llama-3-8b"
DEFAULT_MEMORY_BYTES = 52 * 2**30  # what an H100 has left beside the weights of the default model
DEFAULT_NUM_REQUESTS = 2_000
# Options that say what is cached and evicted, and their fields of `ReplayConfig`, which have the defaults.
CACHING_RULES = {
    "policy": "eviction_policy",
    "retention_interval": "retention_interval",
}


def add_workload_arguments(group: argparse._ArgumentGroup) -> None:
    """Which requests."""
    group.add_argument("--generate", choices=WORKLOADS, metavar="KIND", help=f"no trace but {', '.join(WORKLOADS)}")
    group.add_argument(
        "--num-requests",
        type=positive_int,
        metavar="N",
        help=f"how many to generate (default: {DEFAULT_NUM_REQUESTS:,}) or to read (default: all)",
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of the generated workload (default: 0)")
    add_reading_arguments(group)


def add_reading_arguments(group: argparse._ActionsContainer) -> None:
    """What a trace file may not say itself, for `reading_of`."""
    group.add_argument(
        "--hash-block-size", type=positive_int, metavar="N", help="tokens of a trace's hash id (default: what fits)"
    )
    group.add_argument(
        "--time-unit", choices=UNITS, help="of a trace's timestamps (default: s if any has a fraction, else ms)"
    )
    group.add_argument(
        "--whole-blocks",
        action="store_true",
        help="cut prompts to whole hash blocks and a token of their own: what a trace says is shared, no more",
    )
    group.add_argument(
        "--users",
        type=positive_int,
        metavar="N",
        help=f"sessions at once, of a trace of sessions (default: {DEFAULT_USERS})",
    )
    group.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="its tokenizer.json cuts a trace's texts (default: 4 bytes a token)",
    )


def reading_of(args: argparse.Namespace) -> TraceReading:
    """How to read the trace.

    Raises:
        ConfigError: a folder without a tokenizer.json, or with a bad one.
        MissingExtraError: there is one, but tokenizers is not installed.
    """
    tokenizer = None
    if args.tokenizer is not None:
        from kvjax.models.tokenizer import Tokenizer

        tokenizer = Tokenizer.from_folder(args.tokenizer)
        if tokenizer is None:
            raise ConfigError(f"expected --tokenizer FOLDER with a tokenizer.json, got none in {args.tokenizer!r}")
    return TraceReading(args.hash_block_size, args.time_unit, args.users, tokenizer)


def add_cache_arguments(group: argparse._ArgumentGroup) -> None:
    """Which cache."""
    group.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"{', '.join(known_models())}, a Hugging Face folder, or a config.json (default: {DEFAULT_MODEL})",
    )
    group.add_argument("--block-size", type=positive_int, metavar="N", help="tokens a block (default: the model's)")
    size = group.add_mutually_exclusive_group()
    size.add_argument("--memory", type=byte_size, metavar="BYTES", help="of one device (default: 52GiB)")
    size.add_argument("--num-blocks", type=positive_int, metavar="N", help="usable blocks, the null block not counted")
    add_load_arguments(group, "what the trace says")
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
        default=argparse.SUPPRESS,
        help="which free block to reuse next; belady looks ahead in the trace, a bound for --serial "
        f"(default: {ReplayConfig.eviction_policy})",
    )
    group.add_argument(
        "--retention-interval",
        type=interval,
        default=argparse.SUPPRESS,
        metavar="N",
        help="keep windows, chunks and recurrent states where requests end or part, and every N tokens (0: nowhere "
        f"else; auto: 512 or more; all: everywhere; default: {ReplayConfig.retention_interval or 'all'})",
    )
    add_rules_argument(group, CACHING_RULES)


def add_tier_arguments(group: argparse._ArgumentGroup) -> None:
    """What lies beyond the cache, and how fast it is."""
    tiers = ReplayTierConfig()
    group.add_argument("--host-memory", type=byte_size, metavar="BYTES", help="for blocks that the cache evicts")
    group.add_argument("--disk-memory", type=byte_size, metavar="BYTES", help="of a disk below it")
    group.add_argument("--write-through", action="store_true", help="blocks go there once computed, not when evicted")
    for name, default in (("host", tiers.host_bytes_per_s), ("disk", tiers.disk_bytes_per_s)):
        group.add_argument(
            f"--{name}-gb-per-s",
            type=positive_float,
            default=default / 1e9,
            metavar="X",
            help=f"default: {default / 1e9:g}",
        )
    for name, latency in (("host", tiers.host_latency_s), ("disk", tiers.disk_latency_s)):
        group.add_argument(
            f"--{name}-latency-us",
            type=non_negative_float,
            default=latency * 1e6,
            metavar="X",
            help=f"default: {latency * 1e6:g}",
        )


def add_speed_arguments(group: argparse._ArgumentGroup) -> None:
    """How fast a step is, and how much fits in one."""
    add_fields(group, BatchingConfig)
    add_fields(group, SpeedModel)


def trace_of(args: argparse.Namespace) -> tuple[Sequence[TraceRequest], str | None]:
    """The trace that the arguments name, and as what a file was read, which is printed too.

    Raises:
        ConfigError: neither or both of a trace and --generate, an option of the other, or a bad tokenizer.
        TraceError: a trace of an unknown form, or a bad line of it.
    """
    if (args.trace is None) == (args.generate is None):
        given = "none" if args.trace is None else "both"
        raise ConfigError(f"expected a TRACE or --generate {{{','.join(WORKLOADS)}}}, got {given}")
    if args.generate is not None:
        for name in vars(AS_IT_SAYS):
            if getattr(args, name) is not None:
                raise ConfigError(f"expected --{name.replace('_', '-')} with a TRACE, got --generate")
        trace, read_as = generate_workload(args.generate, args.num_requests or DEFAULT_NUM_REQUESTS, args.seed), None
    else:
        told: list[str] = []
        trace = read_trace(args.trace, args.num_requests, reading_of(args), told.append)
        print(*told)
        read_as = told[0]
    return cut_tails(trace) if args.whole_blocks else trace, read_as


def add_load_arguments(group: argparse._ActionsContainer, default: str) -> None:
    """What several pools are to be balanced for, for `load_of_arguments`; `default` says what without them."""
    load = group.add_mutually_exclusive_group()
    load.add_argument(
        "--tokens-per-checkpoint",
        type=positive_int,
        metavar="N",
        help=f"balance several pools to keep a state, or the end of a window, for every N tokens (default: {default})",
    )
    load.add_argument(
        "--request-len", type=positive_int, metavar="N", help="balance them to run most requests of N tokens at once"
    )


def load_of_arguments(args: argparse.Namespace) -> Load | None:
    """What they are to be balanced for; None: not said."""
    if args.request_len is not None:
        return Load(args.request_len, max_running=None)
    return None if args.tokens_per_checkpoint is None else Load(args.tokens_per_checkpoint)


def tiers_of(args: argparse.Namespace) -> ReplayTierConfig | None:
    """What lies beyond the cache; None: nothing.

    Raises:
        ConfigError: blocks that are to be written to nothing.
    """
    if not args.host_memory and not args.disk_memory:
        if args.write_through:
            raise ConfigError("expected --host-memory or --disk-memory BYTES with --write-through, got neither")
        return None
    return ReplayTierConfig(
        host_bytes=args.host_memory or 0,
        disk_bytes=args.disk_memory or 0,
        write_through=args.write_through,
        host_bytes_per_s=args.host_gb_per_s * 1e9,
        host_latency_s=args.host_latency_us / 1e6,
        disk_bytes_per_s=args.disk_gb_per_s * 1e9,
        disk_latency_s=args.disk_latency_us / 1e6,
    )


def config_of(args: argparse.Namespace) -> ReplayConfig:
    """The cache and its speed, of one replica.

    Raises:
        ConfigError: a bad model, or --rules with an option that they decide.
    """
    memory = DEFAULT_MEMORY_BYTES if args.memory is None and args.num_blocks is None else args.memory
    return ReplayConfig(
        specs=load_model_config(args.model).kv_cache_specs(args.block_size, args.dtype),
        num_blocks=args.num_blocks,
        memory_bytes=memory,
        load=load_of_arguments(args),
        hash_algorithm=args.hash_algorithm,
        release=release_of(args, CACHING_RULES),
        **{field: getattr(args, name) for name, field in CACHING_RULES.items() if name in args},
        platform=args.platform,
        tensor_parallel=args.tensor_parallel,
        hybrid=not args.no_hybrid,
        speed=read_fields(args, SpeedModel),
        batching=read_fields(args, BatchingConfig),
    )
