"""A prompt looked up and computed as a scheduler would: what tests of repeated prompts are driven by."""

from __future__ import annotations

from kvjax.core import KVCacheManager, Request


def compute_prompt(manager: KVCacheManager, request: Request, budget: int) -> int:
    """Computes a new request's prompt behind its hit, in steps of at most `budget` tokens; the tokens of the hit."""
    blocks, hit = manager.get_computed_blocks(request)
    num_new = manager.limit_step(request, min(request.num_tokens - hit, budget), hit, blocks)
    assert manager.allocate_slots(request, num_new, hit, blocks) is not None
    request.num_computed_tokens = hit + num_new
    while left := request.num_tokens - request.num_computed_tokens:
        manager.new_step_starts()
        num_new = manager.limit_step(request, min(left, budget))
        assert manager.allocate_slots(request, num_new) is not None
        request.num_computed_tokens += num_new
    return hit
