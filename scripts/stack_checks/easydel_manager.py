"""EasyDeL's own cache manager from an unpacked wheel, and kvjax's, for the same requests.

Flow:    path -> [make_pair] -> (EasyDeL's CacheManager, kvjax's); random calls -> [answers] -> what each call gave
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from kvjax.adapters.easydel import CacheManager
from scripts.stack_checks.checkouts import module_of

_CORE = "easydel.inference.esurge"
_STANDS_IN = (
    "eformer",
    "eformer.pytree",
    "easydel.inference.sampling_params",
    f"{_CORE}.engine_types",
    f"{_CORE}.logger",
)
PAGE_SIZE, NUM_PAGES, MAX_MODEL_LEN, WINDOW = 4, 40, 96, 10


@dataclass
class Engine:
    """What managers read of EasyDeL's `EngineRequest`."""

    request_id: str
    all_token_ids: list[int]
    status: Any
    num_computed_tokens: int = 0
    sampling_params: Any = field(default_factory=lambda: SimpleNamespace(prompt_logprobs=None))

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.all_token_ids)


def make_pair(root: Path, kind: str) -> tuple[Any, CacheManager, Any]:
    """The stack's manager, kvjax's, and the status of a running request."""
    interface = module_of(root, f"{_CORE}.core.interface", _STANDS_IN)
    manager = module_of(root, f"{_CORE}.core.manager", _STANDS_IN)
    heads = {"page_size": PAGE_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": np.float32, "use_mla": False}
    groups = [interface.CacheGroupSpec(interface.FullAttentionSpec(**heads), ["0"])]
    if kind == "hybrid":
        groups.append(interface.CacheGroupSpec(interface.SlidingWindowSpec(**heads, sliding_window=WINDOW), ["1"]))
    status = manager.EngineRequestStatus.RUNNING
    return (
        manager.CacheManager(NUM_PAGES, groups, MAX_MODEL_LEN),
        CacheManager(NUM_PAGES, groups, MAX_MODEL_LEN),
        status,
    )


def answers(manager: Any, status: Any, seed: int, num_shards: int) -> Iterator[Any]:
    """What random calls give, one by one; a call's arguments depend on the answers before."""
    random = np.random.default_rng(seed)
    documents = [random.integers(0, 5, MAX_MODEL_LEN).tolist() for _ in range(3)]
    running: list[Engine] = []
    hints: dict[str, int] = {}
    for number in range(150):
        move = random.choice(["start", "decode", "free", "prefix"], p=[0.3, 0.4, 0.25, 0.05])
        draw = random.integers(0, 1 << 30, 4).tolist()
        if move == "start":
            tokens = documents[draw[0] % 3][: 1 + draw[1] % 40] + [draw[2] % 5] * (1 + draw[3] % 8)
            request = Engine(str(number), tokens, status)
            hints[request.request_id] = draw[3] % num_shards
            shards = {"dp_shard_hint": draw[3] % num_shards, "data_parallel_size": num_shards}
            pages, hit = manager.get_computed_pages(request, **shards)
            count = max(1, (request.num_tokens - hit) // (1 + draw[0] % 2))
            made = manager.allocate_slots(request, count, hit, pages, **shards)
            yield hit, pages.get_page_ids(), made is not None
            if made is None:
                manager.free(request)
                manager.free_page_hashes(request)
                continue
            request.num_computed_tokens = hit + count
            running.append(request)
        elif running and move == "decode":
            for request in list(running):
                if request.num_computed_tokens >= MAX_MODEL_LEN - 2:
                    continue
                if request.num_computed_tokens == request.num_tokens:
                    request.all_token_ids.append(draw[0] % 5)
                new = request.num_tokens - request.num_computed_tokens
                shards = {"dp_shard_hint": hints[request.request_id], "data_parallel_size": num_shards}
                made = manager.allocate_slots(request, new, **shards)
                yield made is not None
                if made is None:
                    running.remove(request)
                    manager.free(request)
                else:
                    request.num_computed_tokens += new
        elif running and move == "free":
            request = running.pop(draw[0] % len(running))
            yield manager.get_page_ids(request.request_id)
            manager.free(request)
            manager.free_page_hashes(request)
        elif running:
            yield manager.get_num_common_prefix_pages(running[0], len(running))
        yield manager.page_pool.get_num_free_pages()
    for request in running:
        manager.free(request)
    yield manager.page_pool.get_num_free_pages(), manager.reset_prefix_cache()
