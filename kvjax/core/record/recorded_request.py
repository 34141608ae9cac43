"""A request as plain data, and made again: its tokens, its keys, how it is hashed, and how far it is.

Flow:    Request -> [encode_request] -> call log -> [decode_request] -> Request
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.core.hashing.extra_keys import LoRARequest, MultiModalFeature
from kvjax.core.requests.request import Request


def encode_request(request: Request) -> dict[str, Any]:
    """All that its constructor was given, and its state."""
    hasher, embeds, lora = request.block_hasher, request.prompt_embeds, request.lora
    return {
        "tokens": request.token_ids.astype("<i4").tobytes(),
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_computed_tokens": request.num_computed_tokens,
        "num_preemptions": request.num_preemptions,
        "mm_features": [[item.identifier, item.offset, item.length] for item in request.mm_features],
        "lora": None if lora is None else [lora.name, lora.path, lora.adapter_id],
        "cache_salt": request.cache_salt,
        "prompt_embeds": None if embeds is None else [embeds.dtype.str, list(embeds.shape), embeds.tobytes()],
        "weight_version": request.weight_version,
        "skip_reading_prefix_cache": request.skip_reading_prefix_cache,
        "skip_writing_prefix_cache": request.skip_writing_prefix_cache,
        "max_tokens": request.max_tokens,
        "checkpoints": list(request.checkpoints),
        "hasher": None
        if hasher is None
        else [hasher.block_size, hasher.algorithm, hasher.extra_key_style, hasher.none_hash, hasher.has_seed],
    }


def decode_request(request_id: str, parts: dict[str, Any]) -> Request:
    """The request, hashed anew."""
    parts = dict(parts)
    tokens = np.frombuffer(parts.pop("tokens"), "<i4")
    num_prompt, num_computed = parts.pop("num_prompt_tokens"), parts.pop("num_computed_tokens")
    num_preemptions, lora, hasher = parts.pop("num_preemptions"), parts.pop("lora"), parts.pop("hasher")
    embeds, items = parts.pop("prompt_embeds"), parts.pop("mm_features")
    request = Request(
        request_id,
        tokens[:num_prompt],
        mm_features=[MultiModalFeature(*item) for item in items],
        lora=None if lora is None else LoRARequest(*lora),
        prompt_embeds=None if embeds is None else np.frombuffer(embeds[2], embeds[0]).reshape(embeds[1]),
        block_hasher=None if hasher is None else BlockHasher.with_none_hash(*hasher),
        **parts,
    )
    if tokens.size > num_prompt:
        request.append_output_token_ids(tokens[num_prompt:])
    request.num_computed_tokens, request.num_preemptions = num_computed, num_preemptions
    return request
