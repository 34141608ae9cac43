"""What releases of vLLM decide in different ways and no deployment tunes.

Flow:    "0.33.0" -> [RELEASES] -> ManagerOptions.vllm -> KVCacheManager, adapters, conformance
Source:  vllm/v1/core of each release: block_pool.py, kv_cache_utils.py, single_type_kv_cache_manager.py
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType


@dataclass(frozen=True, kw_only=True)
class ReleaseRules:
    """Rules that only `ManagerOptions.vllm` changes; the defaults are kvjax's own.

    Args:
        free_order: where the policy "lru" puts freed blocks without a hash: "uncached_first" (reused first) or
            "append" (at the tail, as all others).
        coarse_hash_mode: the hash of a block made of several hash blocks: "concat" (all of them joined) or "last".
        retention_ends: which ends of a request are checkpoints (kinds/retention.py): "all" that another request could
            resume at, or those of a release, "vllm-0.32" or "vllm-0.33".
        defer_fresh_hits: whether `allocate_slots` answers None (wait for the next step) to a hit on a recurrent state
            that this step computes. False: such a state is no hit before `new_step_starts`.
        inner_hits: whether hits of models with recurrent states may end inside blocks, at any hash block, where all
            kinds can: an end of a prompt is then registered in the block that it lies in, and a hit copies that block.
        inner_hits_of_units: whether they may where only other kinds have blocks of several hash blocks, as vLLM's where
            ranks share the tokens of a block.
        rswa_as_vllm: whether models with R-SWA (kinds/rswa.py) register and hit all tokens, not only those that see all
            before them, an admission counts the blocks of all of them, and a request keeps one token more.
        extra_key_style: of a `BlockHasher`, which requests bring: how what else a hash covers is written.
    """

    free_order: str = "uncached_first"
    coarse_hash_mode: str = "concat"
    retention_ends: str = "all"
    defer_fresh_hits: bool = False
    inner_hits: bool = False
    inner_hits_of_units: bool = False
    rswa_as_vllm: bool = False
    extra_key_style: str = "vllm-0.33"


_V033 = ReleaseRules(
    coarse_hash_mode="last",
    retention_ends="vllm-0.33",
    defer_fresh_hits=True,
    inner_hits=True,
    rswa_as_vllm=True,
)
RELEASES: Mapping[str, ReleaseRules] = MappingProxyType(
    {
        "0.16.0": ReleaseRules(free_order="append", defer_fresh_hits=True, extra_key_style="vllm-0.16"),
        "0.22.1": ReleaseRules(free_order="append", defer_fresh_hits=True, extra_key_style="vllm-0.22"),
        # The extra keys of 0.32.0 were not compared; those of 0.33.0 stand for them.
        "0.32.0": replace(_V033, retention_ends="vllm-0.32"),
        "0.33.0": _V033,
    }
)

__all__ = ["RELEASES", "ReleaseRules"]
