"""Requests run through the manager, its plans and the compiled step, greedily: logits of every generated token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import BlockHasher, KVCacheManager, Request
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_builder import build_step_plan
from kvjax.core.step.step_plan import StepPlan
from kvjax.device import KVPages, UpdateStep
from kvjax.device.pages.kv_pages import page_shapes


def nan_pages(config: KVCacheConfig, step: UpdateStep) -> KVPages:
    """Pages that hold NaN (127 where dtypes have none) but for the null page."""

    def unnamed(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        values = np.full(leaf.shape, np.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 127)
        values[0] = 0
        return jax.device_put(jnp.asarray(values, leaf.dtype), leaf.sharding)

    return jax.tree.map(unnamed, page_shapes(config, step.placement))


class Server:
    """Runs requests together, greedily; every step takes what the manager's groups let it take of `budget` tokens."""

    def __init__(
        self, step: UpdateStep, hash_block_size: int, max_model_len: int, config: KVCacheConfig | None = None
    ) -> None:
        self.step, self.config = step, step.kv_cache_config if config is None else config
        self.manager = KVCacheManager(self.config, max_model_len, hash_block_size=hash_block_size)
        self.pages = nan_pages(self.config, step)
        self.hasher = BlockHasher(hash_block_size, "xxhash_cbor", seed="0")
        self.plans: list[StepPlan] = []
        self.logits: dict[str, list[np.ndarray]] = {}
        self.tokens: dict[str, list[int]] = {}  # with the generated ones

    def run(self, prompts: dict[str, list[int]], num_tokens: int, budget: int = 12) -> dict[str, int]:
        """Generates `num_tokens` for each prompt; gives the tokens that each request found computed."""
        requests = [Request(name, prompt, block_hasher=self.hasher) for name, prompt in prompts.items()]
        hits = {}
        self.manager.new_step_starts()
        for request in requests:
            blocks, hit = self.manager.get_computed_blocks(request)
            count = self.manager.limit_step(request, min(budget, request.num_tokens - hit), hit)
            assert self.manager.allocate_slots(request, count, hit, blocks) is not None
            request.num_computed_tokens = hits[request.request_id] = hit
            self.logits[request.request_id] = []
            self.tokens[request.request_id] = list(prompts[request.request_id])
        counts = [self._count(request, budget) for request in requests]
        while any(counts):
            self._step([(r, n) for r, n in zip(requests, counts, strict=True) if n])
            self.manager.new_step_starts()
            counts = []
            for request in requests:
                done = len(self.logits[request.request_id]) == num_tokens
                counts.append(0 if done else self._count(request, budget))
                if counts[-1]:
                    assert self.manager.allocate_slots(request, counts[-1]) is not None
        for request in requests:
            self.manager.free(request)
        self.manager.check_invariants()
        return hits

    def _count(self, request: Request, budget: int) -> int:
        return self.manager.limit_step(request, min(budget, request.num_tokens - request.num_computed_tokens))

    def _step(self, scheduled: list[tuple[Request, int]]) -> None:
        rows, counts = (np.array(x) for x in zip(*((r.row, n) for r, n in scheduled), strict=True))
        plan = build_step_plan(self.manager, rows, counts)
        self.plans.append(plan)
        output = self.step(self.pages, plan)
        self.pages = output.pages
        for request, count in scheduled:
            request.num_computed_tokens += count
        lines = np.searchsorted(plan.query_start_loc, plan.logits_indices, side="right") - 1
        by_id = {request.request_id: request for request, _ in scheduled}
        for line, logits in zip(lines, np.asarray(output.logits), strict=False):
            request = by_id[plan.request_ids[line]]
            self.logits[request.request_id].append(logits)
            self.tokens[request.request_id].append(int(logits.argmax()))
            request.append_output_token_ids(int(logits.argmax()))
