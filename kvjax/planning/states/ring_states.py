"""Recurrent states of which decoding steps write few.

Flow:    specs of a model's layers -> [with_ring_states] -> specs -> plan_kv_cache
Source:  ARCHITECTURE.md, "Ring states"
"""

from __future__ import annotations

from collections.abc import Mapping

from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.ring_state import RingStateSpec
from kvjax.core.spec import KVCacheSpec


def with_ring_states(specs: Mapping[str, KVCacheSpec], ring_tokens: int, num_drafts: int) -> dict[str, KVCacheSpec]:
    """The specs with a ring of so many tokens in each page of recurrent states, for steps of so many drafts.

    Raises:
        ValueError: no layer is recurrent, or the ring does not hold a step of a token and its drafts.
        NotImplementedError: a recurrent layer does not say what a token adds to its state, as Mamba 1.
    """
    found = {name: spec for name, spec in specs.items() if isinstance(spec, MambaSpec)}
    if not found:
        raise ValueError("expected recurrent layers with ring_tokens, got none; leave it out")
    return {**specs, **{name: RingStateSpec.of(spec, ring_tokens, num_drafts) for name, spec in found.items()}}


__all__ = ["with_ring_states"]
