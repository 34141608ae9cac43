"""At how many tokens recurrent states can be hit.

Flow:    specs of a model's layers -> [with_state_blocks] -> specs -> plan_kv_cache

A model's specs have vLLM's blocks: as many tokens as take a state's bytes in an attention layer, 544 to 2,096. That
bounds the states which a cache keeps that keeps every block. Where states are kept at checkpoints alone
(`ManagerOptions.retention_interval`), how many there are hangs on requests, and short blocks cost none: hits end nearer
to where prefixes do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import lcm

from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.spec import KVCacheSpec, cdiv

STATE_BLOCK_SIZE = 16


def with_state_blocks(specs: Mapping[str, KVCacheSpec], block_size: int) -> dict[str, KVCacheSpec]:
    """The specs with states every `block_size` tokens, or the next multiple of all other blocks; none less often.

    Raises:
        ValueError: `block_size` is below 1.
    """
    if block_size < 1:
        raise ValueError(f"expected a state block of at least 1 token, got {block_size}")
    unit = lcm(*(spec.block_size for spec in specs.values() if not isinstance(spec, MambaSpec)))
    size = cdiv(block_size, unit) * unit
    return {
        name: replace(spec, block_size=min(size, spec.block_size)) if _caches_states(spec) else spec
        for name, spec in specs.items()
    }


def _caches_states(spec: KVCacheSpec) -> bool:
    return isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"


__all__ = ["STATE_BLOCK_SIZE", "with_state_blocks"]
