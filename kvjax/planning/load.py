"""The load that several pools are balanced for: how many tokens a cache should keep for each checkpoint.

Flow:    measured traffic, or `USUAL_TOKENS` -> [Load] -> CacheShape.needs_of -> `planning.sizing`

A hit needs all tokens before it in caches that keep everything (full attention, latents), and one checkpoint in those
that forget: a state, the end of a window. Both were last used at the same time, so none should be evicted before the
other, and the best split of the bytes keeps tokens and checkpoints in the proportion in which traffic uses them:

    tokens per checkpoint = tokens in the cache that the last n requests used / checkpoints that they used

where n is as large as the memory holds. What that is depends on the traffic (docs/capacity.md): less than 1,000 in
short chats, 4,000 to 15,000 with agents, documents and conversations, twice as many in sessions of coding agents.
"""

from __future__ import annotations

from dataclasses import dataclass

USUAL_TOKENS = 8_192  # on a conversation trace at most 16 % fewer hits than the best, most often less than 1 %
USUAL_RUNNING = 256


@dataclass(frozen=True)
class Load:
    """Requests that leave a checkpoint each, and the tokens that go with it."""

    tokens_per_checkpoint: int = USUAL_TOKENS
    max_running: int | None = USUAL_RUNNING  # requests that run at once, and hold what runs need; None: all

    def __post_init__(self) -> None:
        for name in ("tokens_per_checkpoint", "max_running"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")


__all__ = ["USUAL_RUNNING", "USUAL_TOKENS", "Load"]
