"""What the engine gives back: tokens as they come, and a finished request as a whole.

Flow:    LLMEngine.step -> [StepOutput] -> caller;  LLMEngine.generate -> [GenerationResult] -> caller
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvjax.engine.engine_request import FinishReason
from kvjax.engine.stats import RequestStats


@dataclass(frozen=True)
class StepOutput:
    """New tokens of one request, one step's worth."""

    request_id: str
    new_token_ids: tuple[int, ...]
    new_logprobs: tuple[float, ...]  # log-probability of each token under the model, before temperature and masks
    finish_reason: FinishReason | None  # None: the request goes on


@dataclass(frozen=True)
class GenerationResult:
    """One request, ended."""

    request_id: str
    prompt_token_ids: np.ndarray  # int32[num_prompt_tokens]
    output_token_ids: np.ndarray  # int32[num_output_tokens]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    stats: RequestStats
