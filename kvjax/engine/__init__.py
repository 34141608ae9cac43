"""A small reference engine: continuous batching over the paged, prefix-cached KV of `kvjax.core` and `kvjax.device`.

The engine itself needs jax and is loaded when first asked for; settings and statistics do not.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvjax.engine.config import EngineConfig
from kvjax.engine.request_inputs import MultimodalInput
from kvjax.engine.sampling_params import SamplingParams
from kvjax.engine.speculation import SpeculativeConfig
from kvjax.engine.stats import PoolUse, RequestStats, StepStats
from kvjax.engine.token_matcher import TokenMatcher

if TYPE_CHECKING:
    from kvjax.engine.async_llm_engine import AsyncEngineStats, AsyncLLMEngine, RequestOutput
    from kvjax.engine.engine_request import FinishReason
    from kvjax.engine.llm_engine import LLMEngine
    from kvjax.engine.outputs import GenerationResult, PromptLogprobs, StepOutput, StepOutputs, TopLogprobs
    from kvjax.engine.token_stream import StreamOutput, TokenStream

_HOME_OF = {
    "AsyncEngineStats": "async_llm_engine",
    "AsyncLLMEngine": "async_llm_engine",
    "RequestOutput": "async_llm_engine",
    "FinishReason": "engine_request",
    "GenerationResult": "outputs",
    "LLMEngine": "llm_engine",
    "PromptLogprobs": "outputs",
    "StepOutput": "outputs",
    "StepOutputs": "outputs",
    "StreamOutput": "token_stream",
    "TokenStream": "token_stream",
    "TopLogprobs": "outputs",
}

__all__ = [
    "AsyncEngineStats",
    "AsyncLLMEngine",
    "EngineConfig",
    "FinishReason",
    "GenerationResult",
    "LLMEngine",
    "MultimodalInput",
    "PoolUse",
    "PromptLogprobs",
    "RequestOutput",
    "RequestStats",
    "SamplingParams",
    "SpeculativeConfig",
    "StepOutput",
    "StepOutputs",
    "StepStats",
    "StreamOutput",
    "TokenMatcher",
    "TokenStream",
    "TopLogprobs",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
