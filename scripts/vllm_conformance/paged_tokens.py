"""A model for vLLM's engine that needs no device: pages hold token ids, the next token is a hash of what is read.

Flow:    vllm.LLM(distributed_executor_backend="paged_tokens.PagedTokens") -> EngineCore -> [PagedTokens] -> tokens

What a wrong block table, hit or page does shows: a page that nobody wrote raises, another prompt's page gives other
tokens. The releases call an executor by `collective_rpc`; what they ask for beside a step is answered with nothing.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput

UNWRITTEN = -1
VOCABULARY = 1_000  # tokens that it answers with are below


@dataclass
class Running:
    """What the model knows of a request: all its tokens, and its blocks."""

    tokens: list[int]
    blocks: list[int]


class Model:
    """Pages and requests; one method for each thing that an executor is asked."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._running: dict[str, Running] = {}

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return ["NHD"]

    def get_kv_cache_spec(self) -> dict[str, Any]:
        spec = FullAttentionSpec(block_size=self._block_size, num_kv_heads=1, head_size=64, dtype=torch.float32)
        return {"layer": spec}

    def determine_available_memory(self) -> int:
        return 1 << 30

    def initialize_from_config(self, configs: list[Any]) -> None:
        self._pages = np.full((configs[0].num_blocks, self._block_size), UNWRITTEN, np.int64)

    def compile_or_warm_up_model(self) -> Any:
        return SimpleNamespace(language_model=0.0, encoder=0.0)

    def execute_model(self, step: Any) -> ModelRunnerOutput:
        for request_id in step.finished_req_ids:
            self._running.pop(request_id, None)
        computed = self._note_requests(step)
        request_ids = [*step.num_scheduled_tokens]
        sampled = [self._advance(r, computed[r], step.num_scheduled_tokens[r]) for r in request_ids]
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _note_requests(self, step: Any) -> dict[str, int]:
        """Takes new requests and blocks; the tokens that each request has in pages."""
        computed = {}
        for new in step.scheduled_new_reqs:
            self._running[new.req_id] = Running(list(new.prompt_token_ids), list(new.block_ids[0]))
            computed[new.req_id] = new.num_computed_tokens
        known = step.scheduled_cached_reqs
        resumed = getattr(known, "resumed_req_ids", ())
        for request_id, blocks, num_computed in zip(
            known.req_ids, known.new_block_ids, known.num_computed_tokens, strict=True
        ):
            request = self._running[request_id]
            new_blocks = [] if blocks is None else list(blocks[0])
            request.blocks = new_blocks if request_id in resumed else request.blocks + new_blocks
            computed[request_id] = num_computed
        return computed

    def _advance(self, request_id: str, start: int, num_tokens: int) -> list[int]:
        """Writes a request's tokens [start, start + num_tokens); its next token if these are its last."""
        request, end = self._running[request_id], start + num_tokens
        places = np.arange(end)
        blocks, offsets = np.array(request.blocks)[places // self._block_size], places % self._block_size
        assert 0 not in blocks, f"{request_id} reads the null block"
        self._pages[blocks[start:], offsets[start:]] = request.tokens[start:end]
        read = self._pages[blocks, offsets]
        assert UNWRITTEN not in read, f"{request_id} reads a page that nobody wrote"
        if end < len(request.tokens):
            return []
        token = crc32(read.tobytes()) % VOCABULARY
        request.tokens.append(token)
        return [token]


class PagedTokens(Executor):
    """vLLM's executor of one such model, in the process of the engine's core."""

    def _init_executor(self) -> None:
        self._model = Model(self.cache_config.block_size)

    def collective_rpc(
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        **_: Any,
    ) -> Any:
        """The model's answer, of one worker; None for what it has no method for."""
        call = getattr(self._model, method, None) if isinstance(method, str) else None
        answers = [None if call is None else call(*args, **kwargs or {})]
        if not non_block:
            return answers
        done: Future[Any] = Future()
        done.set_result(answers)
        return done

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """The tokens of a step."""
        output = self._model.execute_model(scheduler_output)
        if not non_block:
            return output
        done: Future[Any] = Future()
        done.set_result(output)
        return done

    def check_health(self) -> None:
        """It is well."""

    def shutdown(self) -> None:
        """Nothing to end."""
