"""A serving loop on `kvjax.core` and `kvjax.device` alone: what a scheduler of your own calls, and in which order.

    python examples/serving_loop.py          answers the demo's prompts with the demo model

Flow:    prompts -> [Server.add] -> [Server.serve]: lookup, slots, plan, dispatch; read, append, free -> tokens by id

Prompts find what others have cached, run in chunks beside requests that decode, and the host plans a step while the
device computes the one before. `StepsInFlight` keeps what that takes: tokens that are sampled and not read, and rows
that a step in flight still names. The manager admits by worst case (`reserve=True`), so nobody is preempted. Left out
for length: preemption, forks, recurrent layers (`KVCacheManager.limit_step`), sampling other than greedy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import (
    BlockHasher,
    KVCacheConfig,
    KVCacheManager,
    Request,
    StepsInFlight,
    build_step_plan,
    logits_requests,
)
from kvjax.device import Buckets, create_pages, make_update_step

BLOCK_SIZE, MAX_SEQS, MAX_STEP_TOKENS, MAX_MODEL_LEN, MAX_IN_FLIGHT = 16, 8, 64, 512, 2


class Server:
    """One model, one cache; used from one thread."""

    def __init__(self, model: Any, config: KVCacheConfig, eos_token_ids: Sequence[int]) -> None:
        most = MAX_IN_FLIGHT * MAX_STEP_TOKENS
        self.manager = KVCacheManager(config, MAX_MODEL_LEN, BLOCK_SIZE, reserve=True, max_in_flight_tokens=most)
        self.flights = StepsInFlight(self.manager.request_table)
        limits = {"max_num_seqs": MAX_SEQS, "max_model_len": MAX_MODEL_LEN, "block_size": BLOCK_SIZE}
        buckets = Buckets.default(max_num_batched_tokens=MAX_STEP_TOKENS, **limits, max_buckets=2)
        self.step = make_update_step(model, config, buckets, sample_fn=greedy)
        self.pages = create_pages(config)
        self.eos_token_ids = eos_token_ids
        self.hasher = BlockHasher(BLOCK_SIZE, seed="an example")
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.sampled: deque[jax.Array] = deque()  # int32[MAX_SEQS] of each step in flight, still on the device
        self.outputs: dict[str, list[int]] = {}

    def add(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Queues a request."""
        self.waiting.append(Request(request_id, prompt, block_hasher=self.hasher, max_tokens=max_tokens))

    def serve(self) -> dict[str, list[int]]:
        """Runs until nothing waits or runs; output tokens by request."""
        while self.waiting or self.running or self.flights:
            is_busy = self.dispatch()
            if self.flights and (not is_busy or len(self.flights) == MAX_IN_FLIGHT):
                self.read()
        return self.outputs

    def dispatch(self) -> bool:
        """Plans the next step and hands it to the device; whether there was anything to compute."""
        self.manager.new_step_starts()
        rows, num_new = self.schedule_running()
        admitted, their_new = self.admit(MAX_STEP_TOKENS - int(num_new.sum()))
        rows, num_new = np.concatenate((rows, admitted)), np.concatenate((num_new, their_new))
        if not rows.size:
            return False
        plan = build_step_plan(self.manager, rows, num_new, last_token_source=self.flights.token_source(rows))
        previous = self.sampled[-1] if self.sampled else None
        output = self.step(self.pages, plan, previous=previous)  # the pages are donated: go on with the output's
        self.flights.start(plan.rows, plan.num_new_tokens, plan.rows[logits_requests(plan)])
        self.pages = output.pages
        self.sampled.append(output.sampled)
        return True

    def schedule_running(self) -> tuple[np.ndarray, np.ndarray]:  # int64[n] rows, int64[n] new tokens
        """A token or a chunk of the prompt for each running request, first come, first served."""
        rows = np.array([request.row for request in self.running], np.int64)
        last = np.array([request.num_prompt_tokens + (request.max_tokens or 0) for request in self.running], np.int64)
        left = self.flights.num_left(rows)
        left[self.manager.request_table.num_computed_tokens[rows] + left >= last] = 0  # its last token is in flight
        num_new = np.clip(MAX_STEP_TOKENS - (np.cumsum(left) - left), 0, left)
        rows, num_new = rows[num_new > 0], num_new[num_new > 0]
        planned = self.manager.plan_step(rows, num_new, num_in_flight_tokens=self.flights.num_unread(rows))
        assert planned.num_planned == rows.size  # who was admitted has all blocks reserved; else: preempt somebody
        return rows, num_new

    def admit(self, budget: int) -> tuple[np.ndarray, np.ndarray]:  # likewise
        """Waiting requests, in order, while tokens, seats and blocks last."""
        rows, num_new = [], []
        while self.waiting and budget and len(self.running) < MAX_SEQS:
            request = self.waiting[0]
            blocks, num_cached = self.manager.get_computed_blocks(request)
            count = min(request.num_tokens - num_cached, budget)
            if self.manager.allocate_slots(request, count, num_cached, blocks) is None:
                break  # it does not fit now
            request.num_computed_tokens = num_cached
            self.running.append(self.waiting.popleft())
            rows.append(request.row)
            num_new.append(count)
            budget -= count
        return np.array(rows, np.int64), np.array(num_new, np.int64)

    def read(self) -> None:
        """Waits for the oldest step; its tokens go to their requests, those that end free their blocks."""
        rows, tokens = self.flights.read(), np.asarray(self.sampled.popleft())
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=False):  # `sampled` is padded
            request = self.manager.request_table.requests[row]
            if request is None:
                continue  # it ended while this step was in flight
            request.append_output_token_ids(token)
            if token in self.eos_token_ids or request.num_output_tokens == request.max_tokens:
                self.manager.free(request)
                self.running.remove(request)
                self.outputs[request.request_id] = request.output_token_ids.tolist()


def greedy(logits: jax.Array, sampling: None) -> tuple[jax.Array, None]:  # [N, V] -> int32[N]
    """The best token of each row, inside the compiled step."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), None


def main() -> None:
    """Serves the demo's prompts."""
    from kvjax.demo import demo_model_path, demo_requests
    from kvjax.models import load_model
    from kvjax.planning import plan_kv_cache

    model = load_model(demo_model_path(), "float32")
    assert model.tokenizer is not None
    plan = plan_kv_cache(
        model.config.kv_cache_specs(BLOCK_SIZE),
        num_blocks=600,
        max_model_len=MAX_MODEL_LEN,
        max_in_flight_tokens=MAX_IN_FLIGHT * MAX_STEP_TOKENS,
        platform=jax.default_backend(),
    )
    server = Server(model.module, plan.config, model.config.eos_token_ids)
    for request in demo_requests():
        server.add(request.name, model.tokenizer.encode(request.prompt), max_tokens=48)
    for name, tokens in server.serve().items():
        print(f"--- {name}\n{model.tokenizer.decode(tokens)}\n")
    server.manager.check_invariants()


if __name__ == "__main__":
    main()
