"""Requests served greedily with drafts that are verified: of each emitted token the logits that it was drawn from."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import BlockHasher, KVCacheManager, Request, StepDrafts
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_builder import build_step_plan
from kvjax.device import UpdateStep
from tests.device.serving import nan_pages


def greedy(logits: jax.Array, sampling: Any) -> tuple[jax.Array, None]:
    """A sample_fn: the best token."""
    return jnp.argmax(logits, axis=-1), None


class DraftingServer:
    """Decodes all requests in every step, each with drafts out of the right tokens and wrong ones.

    Half of the steps have their drafts on the device, behind the sampled tokens of the step before. Now and then a
    request is preempted, and starts again from what the cache has of it.
    """

    def __init__(
        self, step: UpdateStep, config: KVCacheConfig, hash_block_size: int, max_model_len: int, seed: int
    ) -> None:
        self.step, self.num_drafts = step, step.buckets.max_num_drafts
        self.manager = KVCacheManager(config, max_model_len, hash_block_size)
        self.pages = nan_pages(config, step)
        self.hasher = BlockHasher(hash_block_size, "xxhash_cbor", seed="0")
        self.rng = np.random.default_rng(seed)
        self.logits: dict[str, list[np.ndarray]] = {}
        self.num_accepted = self.num_rejected = self.num_hit = 0

    def run(self, prompts: dict[str, list[int]], answers: dict[str, list[int]]) -> None:
        """Serves the prompts until each has as many tokens as its answer; the answers tell which drafts are right."""
        requests = [Request(name, prompt, block_hasher=self.hasher) for name, prompt in prompts.items()]
        self.logits = {name: [] for name in prompts}
        for request in requests:
            self.start(request)
        while running := [r for r in requests if len(self.logits[r.request_id]) < len(answers[r.request_id])]:
            if self.rng.random() < 0.2:
                stopped = running[int(self.rng.integers(len(running)))]
                self.manager.free(stopped)
                stopped.num_computed_tokens = 0
                self.start(stopped)
                continue
            self.decode(running, answers)
        for request in requests:
            assert request.token_ids.tolist() == prompts[request.request_id] + answers[request.request_id]
            self.manager.free(request)
        self.manager.check_invariants()

    def start(self, request: Request) -> None:
        """Computes all tokens of a request, in steps that recurrent groups can take, and the next one."""
        self.manager.new_step_starts()
        hit, num_hit = self.manager.get_computed_blocks(request)
        self.num_hit += num_hit
        count = self.manager.limit_step(request, request.num_tokens - num_hit, num_hit)
        assert self.manager.allocate_slots(request, count, num_hit, hit) is not None
        request.num_computed_tokens = num_hit
        while True:
            plan = build_step_plan(self.manager, np.array([request.row]), np.array([count]))
            output = self.step(self.pages, plan)
            self.pages = output.pages
            request.num_computed_tokens += count
            self.manager.new_step_starts()
            left = request.num_tokens - request.num_computed_tokens
            if not left:
                break
            count = self.manager.limit_step(request, left)
            assert self.manager.allocate_slots(request, count) is not None
        self.read(plan.rows, plan.logits_starts, output, {request.row: (request, [])})

    def decode(self, running: list[Request], answers: dict[str, list[int]]) -> None:
        rows = np.array([request.row for request in running])
        lines = [self.draw(request, answers[request.request_id]) for request in running]
        counts = np.array([len(line) for line in lines])
        ids = np.full((len(lines), self.num_drafts), -7)
        for line, drafts in zip(ids, lines, strict=True):
            line[: len(drafts)] = drafts
        previous, drafts = None, StepDrafts(counts, ids)
        if self.rng.random() < 0.5:
            first = self.step.buckets.max_num_requests
            behind = np.full(self.step.num_previous, 3, np.int32)
            behind[first : first + ids.size] = ids.ravel()
            previous = jax.device_put(behind, self.step.placement.replicated)
            source = first + np.arange(ids.size, dtype=np.int32).reshape(ids.shape)
            drafts = StepDrafts(counts, np.zeros_like(ids), np.where(ids >= 0, source, -1))
        self.manager.new_step_starts()
        assert self.manager.plan_step(rows, 1 + counts).num_planned == rows.size
        plan = build_step_plan(self.manager, rows, 1 + counts, drafts=drafts)
        output = self.step(self.pages, plan, previous=previous)
        self.pages = output.pages
        self.manager.request_table.advance(plan.rows, plan.num_new_tokens)
        self.read(plan.rows, plan.logits_starts, output, {r.row: (r, d) for r, d in zip(running, lines, strict=True)})

    def read(
        self, rows: np.ndarray, starts: np.ndarray, output: Any, parts: dict[int, tuple[Request, list[int]]]
    ) -> None:
        """Compares what the device accepted with what it should, and settles."""
        rejected = []
        for i, row in enumerate(rows.tolist()):
            request, drafts = parts[row]
            tokens = np.asarray(output.tokens)[starts[i] : starts[i + 1]].tolist()
            right = [draft == token for draft, token in zip(drafts, tokens, strict=False)]
            accepted = right.index(False) if False in right else len(right)
            assert int(output.num_accepted[i]) == accepted
            assert int(output.sampled[i]) == tokens[accepted]
            self.logits[request.request_id] += list(np.asarray(output.logits)[starts[i] :][: accepted + 1])
            request.append_output_token_ids(tokens[: accepted + 1])
            rejected.append(len(drafts) - accepted)
            self.num_accepted, self.num_rejected = self.num_accepted + accepted, self.num_rejected + rejected[-1]
        self.manager.settle_drafts(rows, rejected)
        assert not any(copies.sources.size for copies in self.manager.take_page_copies())

    def draw(self, request: Request, answer: list[int]) -> list[int]:
        """Drafts that are mostly right, and never more than the answer has tokens left."""
        done = len(self.logits[request.request_id])
        count = int(self.rng.integers(0, min(self.num_drafts, len(answer) - done - 1) + 1))
        return [token if self.rng.random() < 0.75 else 1 - min(token, 1) for token in answer[done:][:count]]
