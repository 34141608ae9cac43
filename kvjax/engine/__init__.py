"""A small reference engine: continuous batching over the paged, prefix-cached KV of `kvjax.core` and `kvjax.device`.

The engine itself needs jax and is loaded when first asked for; settings and statistics do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvjax.engine.requests.request_inputs import MultimodalInput
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.stats import PoolUse, RequestStats, StepStats
from kvjax.engine.requests.token_matcher import TokenMatcher
from kvjax.engine.scheduling.speculation import SpeculativeConfig
from kvjax.engine.step.config import EngineConfig

if TYPE_CHECKING:
    from kvjax.engine.front.async_llm_engine import AsyncEngineStats, AsyncLLMEngine, RequestOutput
    from kvjax.engine.front.async_process_front import AsyncProcessFront
    from kvjax.engine.front.llm_engine import LLMEngine
    from kvjax.engine.front.process_front import ProcessFront
    from kvjax.engine.requests.outputs import (
        FinishReason,
        GenerationResult,
        PromptLogprobs,
        StepOutputs,
        TokenOutput,
        TopLogprobs,
    )
    from kvjax.engine.requests.owed_request import OwedRequest
    from kvjax.engine.requests.token_stream import StreamOutput, TokenStream

_HOME_OF = {
    "AsyncEngineStats": "front.async_llm_engine",
    "AsyncLLMEngine": "front.async_llm_engine",
    "AsyncProcessFront": "front.async_process_front",
    "RequestOutput": "front.async_llm_engine",
    "FinishReason": "requests.outputs",
    "GenerationResult": "requests.outputs",
    "LLMEngine": "front.llm_engine",
    "OwedRequest": "requests.owed_request",
    "ProcessFront": "front.process_front",
    "PromptLogprobs": "requests.outputs",
    "TokenOutput": "requests.outputs",
    "StepOutputs": "requests.outputs",
    "StreamOutput": "requests.token_stream",
    "TokenStream": "requests.token_stream",
    "TopLogprobs": "requests.outputs",
}

__all__ = [
    "AsyncEngineStats",
    "AsyncLLMEngine",
    "AsyncProcessFront",
    "EngineConfig",
    "FinishReason",
    "GenerationResult",
    "LLMEngine",
    "MultimodalInput",
    "OwedRequest",
    "PoolUse",
    "ProcessFront",
    "PromptLogprobs",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "SpeculativeConfig",
    "StepOutputs",
    "StepStats",
    "StreamOutput",
    "TokenMatcher",
    "TokenOutput",
    "TokenStream",
    "TopLogprobs",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
