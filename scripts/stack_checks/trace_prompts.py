"""Prompts of a trace through a prefix cache and its slots with sglang-jax's surface, one at a time, in chunks.

Flow:    Mooncake lines -> [serve_prompts] -> the cache and the allocator, called as the stack's scheduler calls them

A token here stands for `UNIT` of the trace's: so a prompt has as many pages as with pages of 128 tokens, and is quick.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvjax.configs import load_model_config
from scripts.stack_checks.served_requests import Served, ServedRequests

UNIT = 32
PAGE, CHUNK, HASHED = 128 // UNIT, 2048 // UNIT, 512 // UNIT


def pool_sizes(model: str, memory_bytes: int, window_share: float) -> tuple[int, int, int]:
    """Pages, window pages and the window, with as many window tokens for each token (`swa_full_tokens_ratio`)."""
    specs = list(load_model_config(model).kv_cache_specs().values())
    token_bytes = {spec: spec.page_size_bytes / spec.block_size for spec in specs}
    windows = [spec for spec in specs if spec.kind == "sliding_window"]
    full_bytes = sum(token_bytes[spec] for spec in specs if spec.kind != "sliding_window")
    num_tokens = memory_bytes / (full_bytes + window_share * sum(token_bytes[spec] for spec in windows))
    pages = int(num_tokens) // (PAGE * UNIT)
    return pages, int(pages * window_share), windows[0].sliding_window // UNIT  # type: ignore[attr-defined]


def serve_prompts(served: ServedRequests, lines: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Tokens hit and tokens of the prompts, cut to whole hash ids and a token of their own."""
    hit = total = 0
    for number, line in enumerate(lines):
        ids = line["hash_ids"][: line["input_length"] // (HASHED * UNIT)]
        tokens = [*np.repeat(ids, HASHED).tolist(), -number - 1]
        if served.rows.req_to_token.shape[1] < len(tokens):
            served.rows.req_to_token = np.zeros((1, len(tokens)), np.int32)
        hit += _serve(served, tokens)
        total += len(tokens) - 1
    return hit * UNIT, total * UNIT


def _serve(served: ServedRequests, tokens: list[int]) -> int:
    cache, allocator, classes = served.cache, served.allocator, served.classes
    req = Served(tokens, None, None, 0)
    match = cache.match_prefix(classes["MatchPrefixParams"](key=classes["RadixKey"](tokens[:-1], None, None), req=req))
    req.prefix_indices, req.last_node = match.device_indices, match.last_device_node
    hit = req.cache_protected_len = req.last_matched_prefix_len = len(match.device_indices)
    req.swa_uuid_for_lock = cache.inc_lock_ref(req.last_node).swa_uuid_for_lock
    served.rows.write((0, slice(0, hit)), match.device_indices)
    while (start := len(req.prefix_indices)) < len(tokens):
        end = min(start + CHUNK, len(tokens))
        needed = end - start + PAGE
        short = [needed - allocator.full_available_size(), needed - allocator.swa_available_size()]
        if max(short) > 0:
            cache.evict(
                classes["EvictParams"](
                    num_tokens=max(short[0], 0), swa_num_tokens=max(short[1], 0), dp_rank=0, recurrent_num=0
                )
            )
        last = int(req.prefix_indices[-1]) if start else -1
        slots = allocator.alloc_extend([start], [end], [last], end - start)
        served.rows.write((0, slice(start, end)), slots)
        req.fill_ids, req.kv_committed_len = tokens[:end], end
        cache.cache_unfinished_req(req)
    cache.cache_finished_req(req)
    return hit


__all__ = ["pool_sizes", "serve_prompts"]
