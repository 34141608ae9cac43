"""Replays a trace over models with one memory, parts and equal pages; prints the hits beside free exchange of bytes.

Flow:    trace, models, sizes of memory -> [compare] -> Markdown table, JSON

    python scripts/compare_memories.py mooncake_conversation.jsonl --json memories.json

One request at a time, prompts cut to whole hash blocks, percent of prompt tokens. Columns:

    one memory       slabs that change hands, the default
    parts            pools of their own, split for this very trace
    best of 20       the best of twenty fixed splits, from a checkpoint for 60 tokens to one for 120,000
    equal pages      blocks of as many tokens as fill a state, all of one size and in one order: vLLM's way
    free exchange    LRU over bytes without pages, checkpoints at ends of blocks alone
    of it            one memory's share of free exchange

A model of one pool has one figure for the first four. Results are kept in the JSON file after every run, and what is
there already is not run again: delete it to start anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path

import numpy as np

from kvjax.cli.options.replay import add_reading_arguments, reading_of
from kvjax.cli.options.types import int_list, positive_int
from kvjax.configs import load_model_config
from kvjax.core.kinds.retention import default_interval
from kvjax.planning import Load, with_state_blocks
from kvjax.planning.slabs import common_columns
from kvjax.planning.states.state_blocks import STATE_BLOCK_SIZE
from kvjax.replay import ReplayConfig, TraceRequest, read_trace, run_replay
from kvjax.replay.bounds import CacheCosts, PromptTree, free_exchange
from kvjax.replay.bounds.pieces import CHECKPOINT_TOKENS
from kvjax.replay.replay import plan_cache
from kvjax.replay.requests.trace import cut_tails

MODELS = (
    "qwen3-next-80b-a3b,kimi-linear-48b-a3b,granite-4.0-h-small,nemotron-3-nano-30b-a3b,jamba-1.5-mini,jamba-1.5-large,"
    "gemma-3-27b,gemma-3n-e4b,gpt-oss-120b,llama-4-scout,deepseek-v4-flash"
)
SPLITS = np.geomspace(60, 120_000, 20).astype(int).tolist()  # tokens a checkpoint
COLUMNS = ("one memory", "parts", "best of 20", "equal pages", "free exchange")


class Memories:
    """Hit tokens by model, GB and column, in a file."""

    def __init__(self, path: Path, trace: Sequence[TraceRequest]) -> None:
        self._path, self._trace = path, trace
        self._known: dict[str, int] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def rate(self, model: str, gigabytes: int, column: str) -> float:
        """Percent of prompt tokens, run if it is not there yet."""
        key = f"{len(self._trace)} requests, {model}, {gigabytes} GB, {column}"
        if key not in self._known:
            print(f"running {key}", file=sys.stderr)
            self._known[key] = self._hit_tokens(model, gigabytes * 10**9, column)
            self._path.write_text(json.dumps(self._known, indent=2) + "\n", encoding="utf-8")
        return 100 * self._known[key] / sum(request.input_length for request in self._trace)

    def _hit_tokens(self, model: str, memory_bytes: int, column: str) -> int:
        own = load_model_config(model).kv_cache_specs()
        specs = with_state_blocks(own, STATE_BLOCK_SIZE)
        config = ReplayConfig(specs, memory_bytes=memory_bytes, serial=True, hash_algorithm="xxhash_cbor")
        if column == "free exchange":
            return _free_exchange(self._trace, config)
        if column == "parts":
            config = replace(config, one_memory=False)
        if column == "equal pages":
            equal = load_model_config(model).kv_cache_specs(lcm(*(spec.block_size for spec in own.values())))
            config = replace(config, specs=equal, one_memory=True)
            slabs = plan_cache(self._trace, config).slabs
            assert slabs is not None
            assert set(slabs.blocks_per_slab) == {1}
        if column == "best of 20":
            return max(_replayed(self._trace, replace(config, load=Load(tokens))) for tokens in SPLITS)
        return _replayed(self._trace, config)


def _replayed(trace: Sequence[TraceRequest], config: ReplayConfig) -> int:
    return run_replay(trace, config).recorder.hit_tokens


def _free_exchange(trace: Sequence[TraceRequest], config: ReplayConfig) -> int:
    costs = CacheCosts.of(plan_cache(trace, config), config.hash_block_size)
    assert config.memory_bytes is not None
    if CHECKPOINT_TOKENS % config.block_size == 0:
        return free_exchange(PromptTree.of(trace), costs, config.memory_bytes)
    tree = PromptTree.of(in_blocks(trace, config.block_size), default_interval(config.block_size))
    return free_exchange(tree, costs, config.memory_bytes)


def in_blocks(trace: Sequence[TraceRequest], block_size: int) -> list[TraceRequest]:
    """The trace by hashes of `block_size` tokens, prompts cut to whole ones and a token of their own.

    A prefix of whole blocks is known by the hash block that has its last token.
    """
    numbers: dict[tuple[int, int], int] = {}  # (place, hash block) -> hash id
    for request in trace:
        for place, hash_id in enumerate(_ids_at_ends(request, block_size)):
            numbers.setdefault((place, hash_id), len(numbers))
    return [
        replace(
            request,
            input_length=len(ids) * block_size + 1,
            hash_ids=(*(numbers[place, hash_id] for place, hash_id in enumerate(ids)), own),
            hash_block_size=block_size,
        )
        for own, request in enumerate(trace, len(numbers))
        for ids in [_ids_at_ends(request, block_size)]
    ]


def _ids_at_ends(request: TraceRequest, block_size: int) -> list[int]:
    """The hash blocks with the last token of each whole block that the prompt may hit."""
    ends = range(block_size, request.input_length, block_size)
    return [request.hash_ids[(end - 1) // request.hash_block_size] for end in ends]


def columns_of(model: str) -> tuple[str, ...]:
    """Which columns are runs of their own; one stands for those of a model whose pools share no slabs."""
    config = load_model_config(model)
    specs = config.kv_cache_specs()
    if common_columns(specs, "gpu", hybrid=True) is not None:
        return COLUMNS
    num_pools = len({spec.page_layout("gpu") for spec in specs.values()})
    return ("parts", "free exchange") if num_pools == 1 else ("parts", "best of 20", "free exchange")


def table(memories: Memories, models: Sequence[str], sizes: Sequence[int]) -> str:
    """In Markdown, a row for each model and size."""
    lines = ["| model | GB | " + " | ".join(COLUMNS) + " | of it |", "| --- " + "| ---: " * 7 + "|"]
    for model in models:
        for gigabytes in sizes:
            own = columns_of(model)
            rates = {column: memories.rate(model, gigabytes, column) for column in own}
            cells = [f"{rates[column]:.2f}" if column in rates else "" for column in COLUMNS]
            used = rates[own[0]] / rates["free exchange"]
            lines.append(f"| {model} | {gigabytes} | " + " | ".join(cells) + f" | {100 * used:.1f} % |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", help="of any form of docs/guide/traces.md")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="results, kept after every run")
    parser.add_argument("--num-requests", type=positive_int, default=1_500, metavar="N", help="default: %(default)s")
    parser.add_argument("--memory", type=int_list, default=[100, 200, 400], metavar="GB,GB", help="on one device")
    parser.add_argument("--models", default=MODELS, metavar="A,B", help="default: %(default)s")
    add_reading_arguments(parser)
    options = parser.parse_args(arguments)
    trace = cut_tails(read_trace(options.trace, options.num_requests, reading_of(options)))
    print(table(Memories(options.json, trace), options.models.split(","), options.memory))
    return 0


if __name__ == "__main__":
    sys.exit(main())
