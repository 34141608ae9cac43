"""What the engine gives back: tokens as they come, and an ended request as a whole.

Flow:    LLMEngine.step -> [StepOutput] -> caller; its last for a request brings the [GenerationResult]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvjax.engine.engine_request import FinishReason
from kvjax.engine.stats import RequestStats


@dataclass(frozen=True)
class GenerationResult:
    """One request, ended."""

    request_id: str
    prompt_token_ids: np.ndarray  # int32[num_prompt_tokens]
    output_token_ids: np.ndarray  # int32[num_output_tokens]
    logprobs: tuple[float, ...]  # log-probability of each output token under the model, before temperature and masks
    finish_reason: FinishReason
    stats: RequestStats


@dataclass(frozen=True)
class StepOutput:
    """A request's new token of one step."""

    request_id: str
    token_id: int
    logprob: float
    result: GenerationResult | None  # None: the request goes on
