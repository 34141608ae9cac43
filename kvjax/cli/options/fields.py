"""Options that stand for fields of dataclasses: their names and texts, once for all commands.

Flow:    OPTIONS, a dataclass -> [add_fields] -> argparse.Namespace -> [read_fields] -> the dataclass's arguments

Only what is given is in the namespace, under the field's name, so that the dataclass has the default.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from kvjax.cli.options.types import (
    byte_size,
    interval,
    non_negative_float,
    positive_float,
    positive_int,
)
from kvjax.core.eviction import EVICTION_POLICIES
from kvjax.core.hashing.block_hash import ALGORITHMS
from kvjax.planning.states.idle_states import IDLE_STATE_DTYPES


@dataclass(frozen=True)
class Option:
    """How a command line says a field."""

    help: str
    flag: str = ""  # empty: the field's name; "--no-..." makes the field False
    type: Callable[[str], Any] | None = None  # None: text, or a flag where the default is a bool
    metavar: str | None = None
    choices: Collection[str] | None = None
    unit: Fraction = Fraction(1)  # of the option, in the field's
    is_either: bool = False  # --name or --no-name; neither leaves it to the command


GIGA, MICRO = Fraction(10**9), Fraction(1, 10**6)

OPTIONS = {
    # The cache.
    "block_size": Option("tokens a block (default: the model's)", type=positive_int),
    "memory_bytes": Option("of the cache on one device, such as 56GiB or 80GB", "--memory", byte_size),
    "num_blocks": Option("blocks of every pool, null block included", type=positive_int),
    "dtype": Option("of the cache, such as bfloat16 or float8_e4m3fn (default: the model's)"),
    "platform": Option("whose padding to count", choices=("cpu", "gpu", "tpu")),
    "tensor_parallel": Option("devices that share the KV heads", type=positive_int),
    "decode_context_parallel": Option(
        "of the tensor-parallel devices with the same heads, those that share the tokens", type=positive_int
    ),
    "prefill_context_parallel": Option("further devices that share the tokens", type=positive_int),
    "data_parallel": Option("replicas, each with its own requests", type=positive_int),
    "hybrid": Option("windowed layers keep every token and share the full layers' table", "--no-hybrid"),
    "one_memory": Option(
        "kinds of layers whose pages differ in size share the memory, or have a part each (default: they share it, "
        "where the policy allows it and nothing says how to split)",
        is_either=True,
    ),
    "idle_state_dtype": Option(
        "of recurrent states that are only cached, with a scale a head (default: as requests run on them)",
        choices=IDLE_STATE_DTYPES,
    ),
    "state_block_size": Option(
        "recurrent states can be hit every N tokens, or at the next multiple of all other blocks; vLLM's rules have "
        "blocks of their own",
        type=positive_int,
        metavar="N",
    ),
    "ring_tokens": Option(
        "pages of recurrent states keep what up to N tokens add to a state, so that most decoding steps write none and "
        "drafts need no states of their own (default: every step writes its states)",
        type=positive_int,
        metavar="N",
    ),
    "hash_algorithm": Option("of block hashes", choices=ALGORITHMS),
    "eviction_policy": Option("which free block to use next", "--policy", choices=EVICTION_POLICIES),
    "retention_interval": Option(
        "keep windows, chunks and recurrent states where requests end or part, and every N tokens; 0: nowhere else, "
        "auto: 512 or more, all: everywhere",
        type=interval,
        metavar="N",
    ),
    "enable_prefix_caching": Option("compute every prompt from its start", "--no-prefix-caching"),
    "sub_block_hits": Option("let a prefix hit end inside a block, whose page is then copied"),
    # Steps.
    "max_num_seqs": Option("requests that run at once", type=positive_int),
    "max_num_batched_tokens": Option("tokens of a step", type=positive_int),
    "max_in_flight_tokens": Option("most tokens that steps in flight add", type=positive_int),
    "prefill_tokens_per_s": Option("tokens of prompts", type=non_negative_float),
    "step_overhead_ms": Option("every step", type=non_negative_float),
    "decode_base_ms": Option("a step that decodes: reading the weights once", type=non_negative_float),
    "decode_us_per_request": Option("each decoding request", type=non_negative_float),
    "decode_ns_per_kv_token": Option("each token that decoding requests attend to", type=non_negative_float),
    "async_scheduling": Option("start a step before reading the last", "--async"),
    # Tiers beyond the cache, and links between replicas.
    "host_bytes": Option("for blocks that the cache evicts", "--host-memory", byte_size),
    "disk_bytes": Option("most bytes of them on disk", "--disk-memory", byte_size),
    "disk_folder": Option("folder for them, kept from run to run", "--disk-cache", str, "DIR"),
    "write_through": Option("blocks go there once computed, not when evicted"),
    "host_bytes_per_s": Option("of each direction", "--host-gb-per-s", positive_float, unit=GIGA),
    "host_latency_s": Option("of a transfer", "--host-latency-us", non_negative_float, unit=MICRO),
    "disk_bytes_per_s": Option("reading", "--disk-gb-per-s", positive_float, unit=GIGA),
    "disk_latency_s": Option("of a read", "--disk-latency-us", non_negative_float, unit=MICRO),
    "shares_disk": Option("one --disk-memory for all replicas, with its one bandwidth", "--shared-disk"),
    "bytes_per_s": Option("of a device's link between replicas", "--transfer-gb-per-s", positive_float, unit=GIGA),
    "latency_s": Option("of a transfer", "--transfer-latency-us", non_negative_float, unit=MICRO),
    # Sampling.
    "temperature": Option("0 is greedy", type=non_negative_float),
    "top_p": Option("nucleus of this probability", type=float),
    "top_k": Option("only so many best tokens; 0: all", type=int),
    "min_p": Option("only tokens of at least so many times the best one's probability", type=float),
    "presence_penalty": Option("taken from logits of tokens in the output", type=float),
    "frequency_penalty": Option("taken as often as they are in the output", type=float),
    "repetition_penalty": Option(
        "divides positive logits of tokens in prompt or output, multiplies negative ones", type=float
    ),
    "ignore_eos": Option("go on after the model's end token"),
}
METAVARS: dict[Any, str] = {positive_int: "N", int: "N", byte_size: "BYTES"}


def flag_of(name: str) -> str:
    """The option of a field, or of an argument of that name."""
    option = OPTIONS.get(name)
    return option.flag if option and option.flag else f"--{name.replace('_', '-')}"


def add_option(
    group: argparse._ActionsContainer, name: str, default: Any = argparse.SUPPRESS, shown: Any = None, **changes: Any
) -> None:
    """The option of `OPTIONS` for a field, with `changes`; `shown` is what its help says is the default."""
    option, flag = replace(OPTIONS[name], **changes), flag_of(name)
    if option.is_either:
        group.add_argument(flag, dest=name, action=argparse.BooleanOptionalAction, default=default, help=option.help)
        return
    if flag.startswith("--no-") or isinstance(shown, bool):
        action = "store_false" if flag.startswith("--no-") else "store_true"
        group.add_argument(flag, dest=name, action=action, default=default, help=option.help)
        return
    told = "" if shown is None or (shown == 0 and option.type is byte_size) else f" (default: {_text(shown, option)})"
    group.add_argument(
        flag,
        dest=name,
        type=_reader(option),
        choices=option.choices,
        metavar=option.metavar or (None if option.choices or option.type is None else METAVARS.get(option.type, "X")),
        default=default,
        help=option.help + told,
    )


def add_fields(group: argparse._ActionsContainer, of: type, *names: str, **defaults: Any) -> None:
    """An option for each of these fields of a dataclass, or for all. `defaults` are a command's own."""
    for one in fields(of):
        if not names or one.name in names:
            default = defaults.get(one.name, argparse.SUPPRESS)
            add_option(group, one.name, default, defaults.get(one.name, one.default))


def read_fields(args: argparse.Namespace, of: type, *names: str) -> dict[str, Any]:
    """The values of these fields of a dataclass, or of all, that are given or have a command's own default."""
    own = [one.name for one in fields(of) if not names or one.name in names]
    return {name: getattr(args, name) for name in own if name in args}


def _text(value: Any, option: Option) -> str:
    return value if isinstance(value, str) else f"{float(Fraction(value) / option.unit):,g}"


def _reader(option: Option) -> Callable[[str], Any]:
    read = option.type or str
    if option.unit == 1:
        return read
    return lambda text: float(Fraction(read(text)) * option.unit)


__all__ = ["add_fields", "add_option", "flag_of", "read_fields"]
