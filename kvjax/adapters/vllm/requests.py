"""vLLM's requests as kvjax's: one that runs has a row here, with vLLM's own list of block hashes.

Flow:    vLLM's Request -> [KnownRequests] -> kvjax.core.Request -> kvjax.core.KVCacheManager

vLLM's object stays the truth: what it counts is copied into the row before each call that reads it. Token ids are read
by KV events alone; without events a row has zeros of the right number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.adapters.vllm.release import Release
from kvjax.core.hashing.extra_keys import LoRARequest, MultiModalFeature
from kvjax.core.requests.request import MAX_CHECKPOINTS, Request
from kvjax.core.requests.request_table import RequestTable


class KnownRequests:
    """The requests of one manager, by id."""

    def __init__(self, release: Release, table: RequestTable, tells_tokens: bool) -> None:
        self._release = release
        self._table = table
        self._tells_tokens = tells_tokens
        self._known_class: type | None = None  # of the request that was checked last
        self._latest: tuple[Any, Request] | None = None  # looked up, and not running yet: vLLM's and ours
        self.running: dict[str, Request] = {}

    def make(self, request: Any, num_tokens: int) -> Request:
        """A request of kvjax, in no table, for vLLM's with `num_tokens` tokens; that of the last call, if it fits.

        Raises:
            UnknownStackError: vLLM's lacks an attribute.
        """
        if self._latest is not None and self._latest[0] is request and not self._tells_tokens:
            made = self._latest[1]
            if made.num_tokens == num_tokens and made.block_hashes is request.block_hashes:
                return made
        if type(request) is not self._known_class:
            self._release.check_request(request)
            self._known_class = type(request)
        keys, tokens = {}, np.zeros(max(num_tokens, 1), np.int32)
        num_prompt = max(request.num_prompt_tokens, 1)  # kvjax has no empty prompts
        if self._tells_tokens and num_tokens:
            keys, tokens = self._extra_keys(request), np.array(request.all_token_ids[:num_tokens], np.int32)
        made = Request(
            request.request_id,
            tokens[:num_prompt],
            block_hashes=request.block_hashes,
            skip_reading_prefix_cache=bool(request.skip_reading_prefix_cache),
            checkpoints=_named_checkpoints(request, num_prompt),
            **keys,
        )
        if num_tokens > num_prompt:  # it was preempted
            made.append_output_token_ids(tokens[num_prompt:])
        self._latest = request, made
        return made

    def admit(self, request_id: str, known: Request) -> None:
        """The request that was made last runs from now on."""
        self.running[request_id] = known
        self._latest = None

    def sync(self, known: Request, request: Any) -> None:
        """Copies into a running request's row what vLLM's has counted since."""
        self._table.num_computed_tokens[known.row] = request.num_computed_tokens
        if self._tells_tokens and known.num_tokens < request.num_tokens:
            self._table.append_run(known.row, request.all_token_ids[known.num_tokens :])

    def _extra_keys(self, request: Any) -> dict[str, Any]:
        """What decides a request's hashes beside its tokens, for the events that tell it."""
        lora, embeds = request.lora_request, request.prompt_embeds
        items = sorted(request.mm_features or (), key=lambda item: item.mm_position.offset)
        return {
            "lora": None if lora is None else LoRARequest(lora.lora_name, lora.lora_path, lora.lora_int_id),
            "cache_salt": request.cache_salt or None,
            "prompt_embeds": None if embeds is None else np.asarray(embeds),
            "mm_features": [
                MultiModalFeature(item.identifier, item.mm_position.offset, item.mm_position.length) for item in items
            ],
        }


def _named_checkpoints(request: Any, num_prompt_tokens: int) -> list[int]:
    """`kvjax_checkpoints` of vLLM's `SamplingParams.extra_args`; what no prompt has is passed over."""
    given = getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}
    named = given.get("kvjax_checkpoints") if isinstance(given, dict) else None
    if not isinstance(named, list):
        return []
    return [length for length in named if type(length) is int and 1 <= length <= num_prompt_tokens][:MAX_CHECKPOINTS]


__all__ = ["KnownRequests"]
