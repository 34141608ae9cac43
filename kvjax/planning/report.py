"""A plan for people (tables and words) and for programs (a JSON-ready dict).

Flow:    KVCachePlan -> [plan_table | plan_words | plan_json] -> `kvjax plan`
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from kvjax.core.spec import KVCacheSpec
from kvjax.planning.load import Load
from kvjax.planning.plan import KVCachePlan
from kvjax.planning.shape import LayerPages
from kvjax.planning.slabs import SlabShape
from kvjax.planning.summary import SCALAR_MEMORY_BYTES, GroupPlanSummary, PoolPlan
from kvjax.text import align_table, count_of, format_bytes

WORDS_WIDTH = 100


def default_lengths(max_model_len: int) -> list[int]:
    """Lengths worth asking about: powers of four from 2,048 below `max_model_len`, and `max_model_len`."""
    lengths = [2**power for power in range(11, 40, 2) if 2**power < max_model_len]
    return [*lengths, max_model_len]


def plan_table(plan: KVCachePlan, lengths: Sequence[int]) -> str:
    """Pools, groups and how many requests of each length fit, as aligned tables."""
    pools = align_table(
        ["pool", "blocks", "columns", "bytes a block", "without padding", "total", "groups"],
        [
            [
                str(pool.pool_id),
                f"{pool.num_blocks:,}",
                str(pool.num_columns),
                f"{pool.bytes_per_block:,}",
                f"{pool.real_bytes_per_block:,}",
                format_bytes(pool.total_bytes),
                _format_range(pool.group_ids),
            ]
            for pool in plan.pools
        ],
        left={6},
    )
    groups = align_table(
        ["group", "pool", "kind", "layers each", "block", "page bytes", "padded", "blocks a request"],
        [
            [
                _format_range(group_ids),
                str(group.pool_id),
                describe_kind(part.spec),
                str(len(part.layer_names)),
                str(group.spec.block_size),
                f"{part.real_page_bytes:,}",
                f"{part.page_bytes:,}",
                f"{group.request_blocks:,}",
            ]
            for group_ids, group in _runs_of_like_groups(plan.groups)
            for part in group.pages
        ],
        left={2},
    )
    fits = align_table(
        ["request length", "fit at once", "tokens kept"],
        [
            [f"{length:,}", format_requests(plan.requests_of(length)), f"{int(plan.requests_of(length) * length):,}"]
            for length in lengths
        ],
    )
    return "\n\n".join((pools, groups, fits))


def _runs_of_like_groups(groups: Sequence[GroupPlanSummary]) -> list[tuple[list[int], GroupPlanSummary]]:
    """Neighbouring groups of one pool with as many layers of each spec, as (their ids, one of them)."""
    runs: list[tuple[list[int], GroupPlanSummary]] = []
    for group in groups:
        if runs and runs[-1][1].pool_id == group.pool_id and _widths(runs[-1][1].pages) == _widths(group.pages):
            runs[-1][0].append(group.group_id)
        else:
            runs.append(([group.group_id], group))
    return runs


def _widths(pages: Sequence[LayerPages]) -> list[tuple[KVCacheSpec, int]]:
    return [(part.spec, len(part.layer_names)) for part in pages]


def _format_range(ids: Sequence[int]) -> str:
    """Consecutive ids as "3" or "0-5"."""
    return str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"


def describe_kind(spec: KVCacheSpec) -> str:
    """The kind with its window or chunk and its compression, such as "sliding_window 1,024" or "mla_attention / 4".

    And the first tokens that stay: "sliding_window 1,024 + 4".
    """
    seen = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or spec.rswa_window
    ratio = getattr(spec, "tokens_per_state", 1)
    first = f" + {spec.num_sink_tokens:,}" if spec.num_sink_tokens else ""
    return spec.kind + (f" {seen:,}" if seen else "") + first + (f" / {ratio}" if ratio > 1 else "")


def format_requests(requests: float) -> str:
    """Requests to one decimal; from 100 on whole ones, rounded down."""
    return f"{requests:,.1f}" if requests < 100 else f"{int(requests):,}"


def plan_words(plan: KVCachePlan) -> str:
    """Why the numbers are what they are, a paragraph per decision."""
    parts = [_budget_words(plan), *(_pool_words(plan, pool) for pool in plan.pools), _fit_words(plan)]
    if plan.slabs is not None:
        parts.insert(1, _slab_words(plan, plan.slabs))
    if plan.parallel.num_devices > 1:
        parts.insert(1, _parallel_words(plan))
    if plan.config.shared_layers:
        parts.append(
            f"{len(plan.config.shared_layers)} more layers have no pages of their own: they read those of other layers."
        )
    if plan.platform == "tpu":
        parts.append(_scalar_memory_words(plan))
    return "\n".join(textwrap.fill(part, WORDS_WIDTH, break_on_hyphens=False) for part in parts)


def _budget_words(plan: KVCachePlan) -> str:
    if plan.memory_bytes is None:
        return f"The number of blocks was given; they take {format_bytes(plan.used_bytes)} on each device."
    if plan.slabs is not None:
        block = "a slab"
    else:
        block = "a block" if len(plan.pools) == 1 else "a block of the pools that grow with a request's length"
    rest = f"; the other {format_bytes(plan.unused_bytes)} are less than {block}" if plan.unused_bytes else ""
    return f"Of {format_bytes(plan.memory_bytes)} on each device the cache takes {format_bytes(plan.used_bytes)}{rest}."


def _slab_words(plan: KVCachePlan, slabs: SlabShape) -> str:
    """How the pools share the memory, and what whole blocks leave of it."""
    blocks = " or ".join(f"{count:,} of pool {pool_id}" for pool_id, count in enumerate(slabs.blocks_per_slab))
    waste = " or ".join(f"{share:.1%}" for share in slabs.waste)
    return (
        f"The pools share {plan.num_slabs:,} slabs of {format_bytes(slabs.bytes_per_slab)}, one of them for the null "
        f"blocks. A slab is {blocks} blocks at a time, which leave {waste} of it; it changes hands when what it holds "
        "is worth less than what another pool needs room for. Numbers of blocks below are those of a pool that has all."
    )


def _parallel_words(plan: KVCachePlan) -> str:
    parallel, words = plan.parallel, []
    if parallel.tensor > 1:
        words.append(
            f"Tensor parallelism over {parallel.tensor} devices splits the KV heads; with fewer heads than devices "
            "each head lies on several."
        )
    if parallel.page_context > 1:
        words.append(f"Context parallelism over {parallel.page_context} ranks splits the tokens of every page.")
    if parallel.context > 1:
        words.append(
            f"Context parallelism over {parallel.context} ranks splits the tokens of a head: a block id stands for "
            f"{parallel.context} times the tokens of its page."
        )
    if parallel.data > 1:
        total = format_requests(parallel.data * plan.concurrency)
        words.append(
            f"Each of {parallel.data} replicas has requests and a cache of its own: together {total} requests of "
            f"{plan.max_model_len:,} tokens fit."
        )
    words.append("All bytes here are one device's, all other numbers of requests one replica's.")
    return " ".join(words)


def _scalar_memory_words(plan: KVCachePlan) -> str:
    """What block tables take of the scalar memory that kernels read them from."""
    widest = max(plan.groups, key=lambda group: group.table_bytes)
    rows = widest.rows_in_scalar_memory
    words = (
        f"A kernel reads a group's block table from {format_bytes(SCALAR_MEMORY_BYTES)} of scalar memory. The widest, "
        f"of group {widest.group_id}, takes {format_bytes(widest.table_bytes)} for a request of "
        f"{plan.max_model_len:,} tokens: {rows:,} such requests fit in one launch."
    )
    return words if rows else words + " Take larger blocks, or leave this table in HBM."


def _pool_words(plan: KVCachePlan, pool: PoolPlan) -> str:
    groups = [plan.groups[group_id] for group_id in pool.group_ids]
    widest = max(groups, key=lambda group: len(group.layer_names))
    pages = " or ".join(f"{part.page_bytes:,} bytes{_padding_words(part)}" for part in widest.pages)
    words = [
        f"Pool {pool.pool_id}: a page holds {widest.spec.block_size} tokens of one layer in {pages}; "
        f"a block is one page in each of {pool.num_columns} columns, "
        f"{pool.bytes_per_block:,} bytes; {pool.num_blocks:,} blocks, one of them the null block."
    ]
    if len(groups) > 1:
        words.append(_sharing_words(groups))
    if pool.reserved_blocks:
        words.append(f"{pool.reserved_blocks:,} blocks hold the layers' own attention sinks.")
    if pool.in_flight_blocks:
        words.append(
            f"{pool.in_flight_blocks:,} blocks are set aside for {plan.max_in_flight_tokens:,} tokens in flight, which "
            "windowed layers hold until their step ends."
        )
    return " ".join(words)


def _padding_words(part: LayerPages) -> str:
    if part.page_bytes == part.real_page_bytes:
        return ""
    return f" ({part.real_page_bytes:,} without the device's padding)"


def _sharing_words(groups: Sequence[GroupPlanSummary]) -> str:
    layers = " + ".join(str(len(group.layer_names)) for group in groups)
    return (
        f"Its {len(groups)} groups ({layers} layers) have block tables of their own and draw from one free list; "
        "layer i of each group uses column i."
    )


def _fit_words(plan: KVCachePlan) -> str:
    blocks = " + ".join(f"{pool.request_blocks:,} blocks of pool {pool.pool_id}" for pool in plan.pools)
    usable = " and ".join(f"{pool.free_blocks:,}" for pool in plan.pools)
    if plan.slabs is not None:
        usable = f"{plan.num_slabs - 1:,} slabs"
    words = (
        f"A request of {plan.max_model_len:,} tokens holds {blocks}; {usable} are free for requests, "
        f"so {format_requests(plan.concurrency)} of them fit at once. Requests that share a prefix take less. The "
        f"block tables of one such request are {format_bytes(plan.table_bytes_per_request)} on the device."
    )
    if len(plan.pools) > 1:
        words += f" {_balance_words(plan)}"
    return words


def _balance_words(plan: KVCachePlan) -> str:
    """For what load several pools are sized, what they then keep, and what the other choice would keep."""
    if plan.slabs is not None:
        return f"With {load_words(plan.load)}, {_kept_words(plan, plan)}."
    words = f"The pools are balanced for {load_words(plan.load)}: {_kept_words(plan, plan)}."
    other = other_balance(plan)
    if other is not None:
        words += f" Balanced for {load_words(other.load)}, {_kept_words(other, plan)}."
    return words


def other_balance(plan: KVCachePlan) -> KVCachePlan | None:
    """The plan for longest requests that all run, or for the usual load if this one is for those; None: no choice."""
    if plan.memory_bytes is None or len(plan.pools) == 1 or plan.slabs is not None:
        return None
    running = Load(plan.max_model_len, max_running=None)
    return plan.balanced_for(running if plan.load.max_running else Load())


def load_words(load: Load) -> str:
    """The load in words, for a text in which "balanced for" stands before it."""
    if load.max_running is None:
        return f"requests of {load.tokens_per_checkpoint:,} tokens that all run"
    return (
        f"a checkpoint (states, ends of windows) for every {load.tokens_per_checkpoint:,} tokens, with at most "
        f"{count_of(load.max_running, 'request')} running"
    )


def _kept_words(plan: KVCachePlan, asked: KVCachePlan) -> str:
    """What an idle cache keeps."""
    kept = plan.kept
    return (
        f"an idle cache keeps {kept.tokens:,} tokens and {kept.checkpoints:,} checkpoints, and "
        f"{format_requests(plan.requests_of(asked.load.tokens_per_checkpoint))} requests of "
        f"{asked.load.tokens_per_checkpoint:,} tokens fit at once"
    )


def _balance_json(plan: KVCachePlan) -> dict[str, Any]:
    return {"load": vars(plan.load), "kept": vars(plan.kept), "num_blocks": [pool.num_blocks for pool in plan.pools]}


def plan_json(plan: KVCachePlan, lengths: Sequence[int]) -> dict[str, Any]:
    """The plan as JSON values. Bytes are one device's."""
    return {
        "platform": plan.platform,
        "tensor_parallel": plan.parallel.tensor,
        "data_parallel": plan.parallel.data,
        "decode_context_parallel": plan.parallel.decode_context,
        "prefill_context_parallel": plan.parallel.prefill_context,
        "page_context_parallel": plan.parallel.page_context,
        "num_devices": plan.parallel.num_devices,
        "hybrid": plan.hybrid,
        "max_model_len": plan.max_model_len,
        "balances": [_balance_json(one) for one in (plan, other_balance(plan)) if one is not None],
        "max_in_flight_tokens": plan.max_in_flight_tokens,
        "memory_bytes": plan.memory_bytes,
        "used_bytes": plan.used_bytes,
        "unused_bytes": plan.unused_bytes,
        "concurrency": plan.concurrency,
        "resident_tokens": plan.resident_tokens,
        "table_bytes_per_request": plan.table_bytes_per_request,
        "shared_layers": dict(plan.config.shared_layers),
        "slabs": None if plan.slabs is None else {"num_slabs": plan.num_slabs, **vars(plan.slabs)},
        "requests_that_fit": {str(length): plan.requests_of(length) for length in lengths},
        "pools": [
            {
                "pool_id": pool.pool_id,
                "num_blocks": pool.num_blocks,
                "num_columns": pool.num_columns,
                "bytes_per_block": pool.bytes_per_block,
                "real_bytes_per_block": pool.real_bytes_per_block,
                "total_bytes": pool.total_bytes,
                "request_blocks": pool.request_blocks,
                "in_flight_blocks": pool.in_flight_blocks,
                "reserved_blocks": pool.reserved_blocks,
                "group_ids": list(pool.group_ids),
            }
            for pool in plan.pools
        ],
        "groups": [
            {
                "group_id": group.group_id,
                "pool_id": group.pool_id,
                "kind": group.spec.kind,
                "sliding_window": getattr(group.spec, "sliding_window", None),
                "attention_chunk_size": getattr(group.spec, "attention_chunk_size", None),
                "rswa_window": group.spec.rswa_window,
                "block_size": group.spec.block_size,
                "page_bytes": group.page_bytes,
                "real_page_bytes": group.real_page_bytes,
                "request_blocks": group.request_blocks,
                "table_bytes": group.table_bytes,
                "rows_in_scalar_memory": group.rows_in_scalar_memory,
                "layer_names": list(group.layer_names),
                "pages": [
                    {
                        "kind": describe_kind(part.spec),
                        "page_bytes": part.page_bytes,
                        "real_page_bytes": part.real_page_bytes,
                        "layer_names": list(part.layer_names),
                    }
                    for part in group.pages
                ],
            }
            for group in plan.groups
        ],
    }
