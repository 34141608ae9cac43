"""Arguments of `kvjax replay`, some of them of `kvjax plan`: the requests, the cache, the speed of a step.

Flow:    [add_*_arguments] -> argparse.Namespace -> [trace_of, config_of] -> kvjax.replay
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from kvjax.cli.help_text import default_text
from kvjax.cli.options.fields import add_fields, add_option, read_fields
from kvjax.cli.options.rules import add_rules_argument, release_of
from kvjax.cli.options.types import integer, positive_int
from kvjax.configs import known_models, load_model_config
from kvjax.core import KVCacheSpec
from kvjax.errors import ConfigError
from kvjax.planning import Load
from kvjax.planning.states.deployed_specs import deployed_specs
from kvjax.planning.states.state_blocks import STATE_BLOCK_SIZE
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
from kvjax.replay.requests.trace import cut_tails

DEFAULT_MODEL = "llama-3-8b"
DEFAULT_MEMORY_BYTES = 52 * 2**30  # what an H100 has left beside the weights of the default model
DEFAULT_NUM_REQUESTS = 2_000
CACHE = ("hash_algorithm", "platform", "tensor_parallel", "hybrid", "one_memory")
CACHING_RULES = ("eviction_policy", "retention_interval")  # what is cached and evicted
TIERS = (
    "host_bytes",
    "disk_bytes",
    "write_through",
    "host_bytes_per_s",
    "host_latency_s",
    "disk_bytes_per_s",
    "disk_latency_s",
)


def add_workload_arguments(group: argparse._ArgumentGroup) -> None:
    """Which requests."""
    group.add_argument("--generate", choices=WORKLOADS, metavar="KIND", help="Generate requests of this kind.")
    group.add_argument(
        "--num-requests",
        type=positive_int,
        metavar="N",
        help=f"Generate N requests, or read the first N of a trace. [default: {DEFAULT_NUM_REQUESTS:,}, or the whole "
        "trace]",
    )
    group.add_argument("--seed", type=integer, default=0, metavar="N", help="Generate requests from this seed.")
    add_reading_arguments(group)


def add_reading_arguments(group: argparse._ActionsContainer) -> None:
    """What a trace file may not say itself, for `reading_of`."""
    group.add_argument(
        "--hash-block-size",
        type=positive_int,
        metavar="N",
        help=f"Let each hash id of a trace stand for N tokens.{default_text('what fits')}",
    )
    group.add_argument(
        "--time-unit",
        choices=UNITS,
        help=f"Read a trace's timestamps in this unit.{default_text('s if any has a fraction, else ms')}",
    )
    group.add_argument(
        "--whole-blocks",
        action="store_true",
        help="Cut prompts to whole hash blocks and a token of their own, so that they share what the trace says alone.",
    )
    group.add_argument(
        "--users",
        type=positive_int,
        metavar="N",
        help=f"Run N sessions at once, of a trace of sessions.{default_text(DEFAULT_USERS)}",
    )
    group.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help=f"Cut a trace's texts by the tokenizer.json of this folder.{default_text('4 bytes a token')}",
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
        help=f"Take the cache of this model: {', '.join(known_models())}, a Hugging Face folder, or a config.json.",
    )
    add_option(group, "block_size", default=None)
    size = group.add_mutually_exclusive_group()
    add_option(size, "memory_bytes", otherwise="52GiB")
    add_option(size, "num_blocks")
    add_load_arguments(group, "what the trace says")
    add_option(group, "dtype", default=None)
    add_option(group, "idle_state_dtype", default=None)
    add_option(group, "state_block_size", default=STATE_BLOCK_SIZE)
    add_fields(group, ReplayConfig, *CACHE)
    add_option(
        group,
        "eviction_policy",
        shown=ReplayConfig.eviction_policy,
        choices=REPLAY_POLICIES,
        help="Choose the next free block by this policy. belady looks ahead in the trace, a bound for --serial.",
    )
    add_fields(group, ReplayConfig, "retention_interval")
    add_rules_argument(group, CACHING_RULES)


def add_tier_arguments(group: argparse._ArgumentGroup) -> None:
    """What lies beyond the cache, and how fast it is."""
    add_fields(group, ReplayTierConfig, *TIERS)


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
        help="Balance several pools to keep a state, or the end of a window, for every N tokens."
        f"{default_text(default)}",
    )
    load.add_argument(
        "--request-len",
        type=positive_int,
        metavar="N",
        help="Balance several pools to run most requests of N tokens at once instead.",
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
    given = read_fields(args, ReplayTierConfig, *TIERS)
    if "host_bytes" in given or "disk_bytes" in given:
        return ReplayTierConfig(**given)
    if "write_through" in given:
        raise ConfigError("expected --host-memory or --disk-memory BYTES with --write-through, got neither")
    return None


def specs_of(args: argparse.Namespace, model: str) -> dict[str, KVCacheSpec]:
    """The cache of every layer of a model.

    Raises:
        ConfigError: a bad model.
    """
    keeps_all = args.rules is not None or getattr(args, "retention_interval", 0) is None
    return deployed_specs(
        load_model_config(model).kv_cache_specs(args.block_size, args.dtype),
        state_block_size=None if keeps_all else args.state_block_size,
        idle_state_dtype=args.idle_state_dtype,
    )


def config_of(args: argparse.Namespace) -> ReplayConfig:
    """The cache and its speed, of one replica.

    Raises:
        ConfigError: a bad model, or --rules with an option that they decide.
    """
    sizes = read_fields(args, ReplayConfig, "memory_bytes", "num_blocks") or {"memory_bytes": DEFAULT_MEMORY_BYTES}
    return ReplayConfig(
        specs=specs_of(args, args.model),
        load=load_of_arguments(args),
        release=release_of(args, CACHING_RULES),
        **sizes,
        **read_fields(args, ReplayConfig, *CACHE, *CACHING_RULES),
        speed=SpeedModel(**read_fields(args, SpeedModel)),
        batching=BatchingConfig(**read_fields(args, BatchingConfig)),
    )
