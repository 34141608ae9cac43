"""How many blocks a command takes where it is not told.

Flow:    model, limits -> [ample_blocks, even] -> EngineConfig.num_blocks
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvjax.core.spec import cdiv
from kvjax.planning import CacheShape, Parallelism

if TYPE_CHECKING:
    from kvjax.models import LoadedModel


def even(count: int) -> int:
    """The next power of two: sizes that are shapes of programs, so that other prompts find them compiled."""
    return 1 << (count - 1).bit_length()


def ample_blocks(
    model: LoadedModel, *, block_size: int | None, max_model_len: int, max_num_seqs: int, max_in_flight_tokens: int
) -> int:
    """Blocks for all requests that run at once, at their longest, and half as many again to cache, or more."""
    specs = model.config.kv_cache_specs(block_size)
    shape = CacheShape.of(specs, platform="cpu", parallel=Parallelism())
    needs = shape.needs(max_model_len, max_model_len, max_in_flight_tokens)
    return even(max(need.fixed_blocks + cdiv(3 * max_num_seqs * need.request_blocks, 2) for need in needs))
