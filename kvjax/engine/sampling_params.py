"""How one request's tokens are chosen: greedy, or drawn at a temperature from the top k and top p.

Flow:    caller -> [SamplingParams] -> SamplingTable (host, by row) -> sampler (jit)
Source:  vLLM SamplingParams (names and defaults)
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

MAX_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks of the sampler.

    `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 keep every token. A request without a `seed` gets one from the
    engine's seed and its place in the order of submission. A request ends with the first of `max_tokens` tokens, a
    token of `stop_token_ids`, or the model's end-of-sequence token unless `ignore_eos`; the token that ends it is
    part of the output. `n` samples of a prompt are as many requests, of the seeds `seed`, `seed + 1`, ...; the prompt
    is computed once for those that find room when it is.

    Raises:
        ValueError: a value is outside its range.
    """

    n: int = 1
    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if operator.index(self.n) < 1:
            raise ValueError(f"expected n >= 1, got {self.n}")
        if operator.index(self.max_tokens) < 1:
            raise ValueError(f"expected max_tokens >= 1, got {self.max_tokens}")
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"expected a finite temperature >= 0 (0 is greedy), got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"expected top_p in (0, 1], got {self.top_p}")
        if operator.index(self.top_k) < 0:
            raise ValueError(f"expected top_k >= 0 (0 keeps every token), got {self.top_k}")
        if self.seed is not None and not 0 <= operator.index(self.seed) <= MAX_SEED:
            raise ValueError(f"expected seed in [0, {MAX_SEED}], got {self.seed}")
        object.__setattr__(self, "stop_token_ids", tuple(operator.index(token) for token in self.stop_token_ids))
