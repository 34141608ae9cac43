"""How many tokens of a step each request takes: first come first served, and where recurrent states must be kept.

Flow:    Scheduler: tokens left, budget -> [StepShares] -> new tokens of each request
Source:  `KVCacheManager.limit_step`; forks of requests with states: ARCHITECTURE.md, "Forks"

In models with recurrent layers a step takes of a prompt what ends where a block of states ends. A state holds all
tokens before it, so the first of several samples stops before its prompt's last token, where the others are forked;
that token each computes for itself.

A prompt that the rest of a step's tokens does not take to the end of a block waits. Only more urgent requests are in
its way, and unless some of a lower `priority` come, none comes to be, so it goes on when they have ended at the latest.
Steps with room for a block beside a token of each other request make nobody wait for that long.
"""

from __future__ import annotations

import numpy as np

from kvjax.core import KVCacheBlocks, KVCacheManager
from kvjax.engine.requests.engine_request import EngineRequest


class StepShares:
    """The rules of one manager; without recurrent groups a share costs three numpy calls."""

    def __init__(self, manager: KVCacheManager, max_num_batched_tokens: int) -> None:
        """Rules for steps of at most so many tokens.

        Raises:
            ValueError: a step has no room for a block of recurrent states.
        """
        least = manager.state_block_size
        if max_num_batched_tokens < least:
            raise ValueError(
                f"expected max_num_batched_tokens of at least {least}, the tokens of a block of recurrent states, got "
                f"{max_num_batched_tokens}; without prefix caching steps may be smaller"
            )
        self._manager = manager
        self._has_states = manager.state_block_size > 1 or not manager.knows_tokens_in_flight

    def of_running(
        self,
        requests: np.ndarray,  # object[rows of the table] EngineRequest
        rows: np.ndarray,  # int64[n] in order of urgency
        num_left: np.ndarray,  # int64[n] tokens that each could compute
        budget: int,
    ) -> np.ndarray:  # int64[n]
        """Tokens that running requests take."""
        if not self._has_states or not (prompts := (num_left > 1).nonzero()[0]).size:
            return _first_come(num_left, budget)
        counts, ones_before = num_left.copy(), np.cumsum(num_left == 1)
        num_taken = 0  # by prompts
        for place in prompts.tolist():
            available = max(budget - num_taken - ones_before.item(place), 0)
            counts[place] = self.of_one(requests[rows[place]], min(num_left.item(place), available))
            num_taken += counts.item(place)
        return _first_come(counts, budget)

    def of_one(
        self, engine_request: EngineRequest, num_new: int, num_hit: int = 0, hit: KVCacheBlocks | None = None
    ) -> int:
        """How many of `num_new` tokens a step takes; a request that starts comes with its hit."""
        if not self._has_states:
            return num_new
        request, size = engine_request.request, self._manager.state_block_size
        computed = request.num_computed_tokens + num_hit
        num_new = self._manager.limit_step(request, num_new, num_hit, hit)
        fork = request.num_prompt_tokens - 1
        if engine_request.has_other_samples and computed < fork < computed + num_new:
            last_state = fork // size * size
            return (last_state if computed < last_state else fork) - computed
        return num_new

    def is_at_fork(self, first: EngineRequest) -> bool:
        """Whether other samples can start from what the first sample of their prompt has computed.

        Not where a vector stands for the prompt's last token, which each computes for itself: its row may be gone.
        """
        num_prompt_tokens = first.request.num_prompt_tokens
        end = num_prompt_tokens if self._manager.knows_tokens_in_flight else num_prompt_tokens - 1
        if num_prompt_tokens == 1 or first.inputs.num_embeds_from(num_prompt_tokens - 1):
            return False
        return first.has_computed_just(end)


def _first_come(num_tokens: np.ndarray, budget: int) -> np.ndarray:  # int64[n]
    """`num_tokens`, cut so that they sum to at most `budget`, first come first served."""
    if int(np.add.reduce(num_tokens)) <= budget:
        return num_tokens
    before = np.cumsum(num_tokens) - num_tokens
    return np.clip(budget - before, 0, num_tokens)
