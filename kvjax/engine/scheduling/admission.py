"""Whether the first waiting request may start: room beside the watermark, and no lookup that would fail again.

Flow:    Scheduler, first waiting request -> [Admission] -> blocks, or a refusal that is remembered

The first waiting request is looked up when it may fit. Once refused, it is looked up again when a pool has more free
blocks than it had then, when a running request has stopped, or after `RETRY_STEPS` steps (its prefix may be cached).
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core import KVCacheBlocks, KVCacheManager
from kvjax.engine.requests.engine_request import EngineRequest

RETRY_STEPS = 32  # a lookup of 128k tokens takes half as long as a step of 1,024 requests, so these cost 2 %


@dataclass(frozen=True)
class Refusal:
    """The first waiting request did not fit."""

    request: EngineRequest
    num_free_blocks: tuple[int, ...]  # per pool
    step: int  # number of the step


class Admission:
    """Admissions into one manager's pools. `refusal` is the last one, until something has changed."""

    def __init__(self, manager: KVCacheManager, watermark: float) -> None:
        self.refusal: Refusal | None = None
        self._manager = manager
        self._watermarks = [int(watermark * pool.num_blocks) for pool in manager.kv_cache_config.pools]

    def is_refused(self, request: EngineRequest, step: int) -> bool:
        """Whether the request was refused, and nothing has happened before step `step` that could let it in."""
        refusal = self.refusal
        if refusal is None or refusal.request is not request or step >= refusal.step + RETRY_STEPS:
            return False
        return all(now <= then for now, then in zip(self._num_free_blocks(), refusal.num_free_blocks, strict=True))

    def refuse(self, request: EngineRequest, step: int) -> None:
        """Remembers that the request did not fit."""
        self.refusal = Refusal(request, self._num_free_blocks(), step)

    def allocate(
        self,
        engine_request: EngineRequest,
        num_new_tokens: int,
        num_hit: int,
        blocks: KVCacheBlocks,
        *,
        is_first: bool,  # nothing runs: then the watermark holds nobody up
        num_external_tokens: int = 0,  # behind the hit, to be loaded
    ) -> bool:
        """Allocates a request's first blocks if it fits, beside what the watermark keeps free."""
        if not is_first and not self._leaves_watermark(engine_request, blocks, num_hit):
            return False
        allocated = self._manager.allocate_slots(
            engine_request.request,
            num_new_tokens,
            num_hit,
            blocks,
            num_external_computed_tokens=num_external_tokens,
            delay_cache_blocks=num_external_tokens > 0,
            num_encoder_tokens=engine_request.inputs.num_encoder_tokens,
            full_sequence_must_fit=True,
        )
        return allocated is not None

    def note_misses(self, engine_request: EngineRequest) -> None:
        """Keeps what the last lookup found out of a request that is admitted for the first time."""
        reasons = self._manager.miss_reasons
        if reasons is not None and reasons.last is not None and engine_request.stats.num_cached_tokens is None:
            engine_request.stats.num_missed_tokens = reasons.last.num_missed_tokens

    def _leaves_watermark(self, engine_request: EngineRequest, hit: KVCacheBlocks, num_hit_tokens: int) -> bool:
        """Whether every pool keeps its watermark free after all of the request's tokens have their blocks."""
        return self._manager.can_admit(
            engine_request.request,
            num_hit_tokens,
            hit,
            kept_free=self._watermarks,
            num_encoder_tokens=engine_request.inputs.num_encoder_tokens,
        )

    def _num_free_blocks(self) -> tuple[int, ...]:
        return tuple([pool.num_free_blocks for pool in self._manager.block_pools])


__all__ = ["RETRY_STEPS", "Admission", "Refusal"]
