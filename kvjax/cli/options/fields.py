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

from kvjax.cli.help_text import default_text
from kvjax.cli.options.types import (
    byte_size,
    folder,
    integer,
    interval,
    non_negative_float,
    number,
    positive_float,
    positive_int,
)
from kvjax.core.eviction import EVICTION_POLICIES
from kvjax.core.hashing.block_hash import ALGORITHMS
from kvjax.planning.states.idle_states import IDLE_STATE_DTYPES
from kvjax.planning.states.state_blocks import STATE_BLOCK_SIZE


@dataclass(frozen=True)
class Option:
    """How a command line says a field."""

    help: str  # a sentence
    flag: str = ""  # empty: the field's name; "--no-..." makes the field False
    type: Callable[[str], Any] | None = None  # None: text, or a flag where the default is a bool
    metavar: str | None = None
    choices: Collection[str] | None = None
    unit: Fraction = Fraction(1)  # of the option, in the field's
    otherwise: str = ""  # what holds where the field is None, in words
    is_either: bool = False  # --name or --no-name; neither leaves it to the command


GIGA, MICRO = Fraction(10**9), Fraction(1, 10**6)

OPTIONS = {
    # The cache.
    "block_size": Option("Cut the cache into blocks of N tokens.", type=positive_int, otherwise="the model's"),
    "memory_bytes": Option(
        "Give the cache BYTES of memory on each device, such as 56GiB or 80GB.", "--memory", byte_size
    ),
    "num_blocks": Option(
        "Give every pool N blocks instead, the null block among them, which holds no tokens.", type=positive_int
    ),
    "dtype": Option("Store the cache in this dtype, such as bfloat16 or float8_e4m3fn.", otherwise="the model's"),
    "platform": Option("Count the padding of this platform's memory.", choices=("cpu", "gpu", "tpu")),
    "tensor_parallel": Option("Share the KV heads among N devices.", type=positive_int, otherwise="1"),
    "decode_context_parallel": Option(
        "Share the tokens among N of the tensor-parallel devices, which have the same heads then.",
        type=positive_int,
        otherwise="1",
    ),
    "prefill_context_parallel": Option(
        "Take N times as many devices, which share the tokens.", type=positive_int, otherwise="1"
    ),
    "data_parallel": Option("Run N replicas, each with requests of its own.", type=positive_int, otherwise="1"),
    "hybrid": Option("Let windowed layers keep every token, and share the full layers' table.", "--no-hybrid"),
    "one_memory": Option(
        "Let kinds of layers whose pages differ in size share the memory, or give each a part of its own.",
        otherwise="they share it, where the policy allows it and nothing says how to split",
        is_either=True,
    ),
    "idle_state_dtype": Option(
        "Store recurrent states that are only cached in this dtype, with a scale for each head.",
        choices=IDLE_STATE_DTYPES,
        otherwise="as requests run on them",
    ),
    "state_block_size": Option(
        "Let prefixes end at recurrent states every N tokens, or at the next multiple of all other blocks. Rules of "
        "vLLM have blocks of their own.",
        type=positive_int,
        otherwise=str(STATE_BLOCK_SIZE),
    ),
    "ring_tokens": Option(
        "Let pages of recurrent states keep what up to N tokens add to a state, so that most decoding steps write no "
        "state and drafts need none of their own.",
        type=positive_int,
        otherwise="every step writes its states",
    ),
    "hash_algorithm": Option("Hash blocks by this algorithm.", choices=ALGORITHMS),
    "eviction_policy": Option("Choose the next free block by this policy.", "--policy", choices=EVICTION_POLICIES),
    "retention_interval": Option(
        "Keep windows, chunks and recurrent states where requests end or part, and every N tokens besides. 0 keeps "
        "them nowhere else, auto every 512 tokens or more, all everywhere.",
        type=interval,
        metavar="N",
    ),
    "enable_prefix_caching": Option("Compute every prompt from its start.", "--no-prefix-caching"),
    "sub_block_hits": Option("Let a prefix hit end inside a block, whose page is then copied."),
    # Steps.
    "max_num_seqs": Option("Run at most N requests at once.", type=positive_int),
    "max_num_batched_tokens": Option("Compute at most N tokens in a step.", type=positive_int),
    "max_in_flight_tokens": Option("Expect steps in flight to add at most N tokens.", type=positive_int),
    "prefill_tokens_per_s": Option("Compute X tokens of prompts in a second.", type=positive_float),
    "step_overhead_ms": Option("Add X milliseconds to every step.", type=non_negative_float),
    "decode_base_ms": Option(
        "Add X milliseconds to a step that decodes, for reading the weights once.", type=non_negative_float
    ),
    "decode_us_per_request": Option("Add X microseconds for each request that decodes.", type=non_negative_float),
    "decode_ns_per_kv_token": Option(
        "Add X nanoseconds for each token that decoding requests attend to.", type=non_negative_float
    ),
    "async_scheduling": Option("Start a step before the last one is read.", "--async"),
    # Tiers beyond the cache, and links between replicas.
    "host_bytes": Option("Keep blocks that the cache evicts in BYTES of host memory.", "--host-memory", byte_size),
    "disk_bytes": Option("Keep at most BYTES of evicted blocks on disk.", "--disk-memory", byte_size),
    "disk_folder": Option("Keep evicted blocks in this folder, from run to run.", "--disk-cache", folder, "DIR"),
    "write_through": Option("Write blocks to the tiers once they are computed, not when they are evicted."),
    "host_bytes_per_s": Option(
        "Copy X GB a second to host memory, and as much from it.", "--host-gb-per-s", positive_float, unit=GIGA
    ),
    "host_latency_s": Option(
        "Add X microseconds to each such copy.", "--host-latency-us", non_negative_float, unit=MICRO
    ),
    "disk_bytes_per_s": Option("Read X GB a second from disk.", "--disk-gb-per-s", positive_float, unit=GIGA),
    "disk_latency_s": Option(
        "Add X microseconds to each read from disk.", "--disk-latency-us", non_negative_float, unit=MICRO
    ),
    "shares_disk": Option("Let all replicas share one --disk-memory and its one bandwidth.", "--shared-disk"),
    "bytes_per_s": Option(
        "Send X GB a second over a device's link between replicas.", "--transfer-gb-per-s", positive_float, unit=GIGA
    ),
    "latency_s": Option(
        "Add X microseconds to each transfer between replicas.", "--transfer-latency-us", non_negative_float, unit=MICRO
    ),
    # Sampling.
    "temperature": Option("Divide logits by X before a token is drawn. 0 takes the best one.", type=non_negative_float),
    "top_p": Option("Draw from the likeliest tokens whose probabilities add up to X.", type=number),
    "top_k": Option("Draw from the N likeliest tokens. 0 draws from all.", type=integer),
    "min_p": Option("Draw from tokens of at least X times the likeliest one's probability.", type=number),
    "presence_penalty": Option("Take X from the logits of tokens in the output.", type=number),
    "frequency_penalty": Option("Take X from a token's logit as often as it is in the output.", type=number),
    "repetition_penalty": Option(
        "Divide positive logits of tokens in prompt or output by X, and multiply negative ones.", type=number
    ),
    "ignore_eos": Option("Go on after the model's end token."),
}
METAVARS: dict[Any, str] = {positive_int: "N", integer: "N", byte_size: "BYTES"}


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
        action = argparse.BooleanOptionalAction
        group.add_argument(
            flag, dest=name, action=action, default=default, help=option.help + _default_of(None, option)
        )
        return
    if flag.startswith("--no-") or isinstance(shown, bool):
        store = "store_false" if flag.startswith("--no-") else "store_true"
        group.add_argument(flag, dest=name, action=store, default=default, help=option.help)
        return
    group.add_argument(
        flag,
        dest=name,
        type=_reader(option),
        choices=option.choices,
        metavar=option.metavar or (None if option.choices or option.type is None else METAVARS.get(option.type, "X")),
        default=default,
        help=option.help + _default_of(shown, option),
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


def _default_of(value: Any, option: Option) -> str:
    """The end of a help text: the default in the option's unit, or in words; nothing where there is none."""
    if value is None or (value == 0 and option.type is byte_size):
        return default_text(option.otherwise) if option.otherwise else ""
    return default_text(value if isinstance(value, str) else float(Fraction(value) / option.unit))


def _reader(option: Option) -> Callable[[str], Any]:
    read = option.type or str
    if option.unit == 1:
        return read
    return lambda text: float(Fraction(read(text)) * option.unit)


__all__ = ["add_fields", "add_option", "flag_of", "read_fields"]
