"""Recurrent states with a ring: a page is a state and what the next few tokens add to it.

Flow:    MambaSpec, tokens of a ring -> [RingStateSpec.of] -> KVCacheGroupSpec -> RecurrentManager, kvjax.device rings
Source:  the replay of inputs in vLLM's and FlashInfer's selective state update; ARCHITECTURE.md, "Ring states"

A decoding step appends to the ring and writes no state. Where the ring is full, or the request goes on in another page,
the state after the tokens of the ring is written, and the ring begins again. So a rejected draft is in no state: the
next step reads fewer tokens of the ring, and drafts need no pages of their own.

The arrays of a page:

    convolutions    as of `MambaSpec`, an input longer for each draft: that of token t is at place (t - 1) % length
    state           [heads, ...] after `base` tokens
    ring            [ring_tokens, heads, ...] for each of `token_shapes`
    base            int32[1, heads], all equal: tokens of the state
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.recurrent_spec import StateArraysSpec
from kvjax.core.kinds.registry import register_kv_cache_spec


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class RingStateSpec(StateArraysSpec):
    """States of which most decoding steps write none. `shapes` and `dtypes` are of all arrays of a page."""

    layer_fields: ClassVar[frozenset[str]] = StateArraysSpec.layer_fields | {"ring_tokens"}

    ring_tokens: int  # most tokens between the state of a page and the request's last one

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_speculative_blocks:
            raise ValueError(
                f"expected no speculative blocks of ring states, whose drafts are in the ring, got "
                f"{self.num_speculative_blocks}"
            )
        if not 0 <= self.num_ring_drafts < self.ring_tokens:
            raise ValueError(
                f"expected ring_tokens above num_ring_drafts >= 0, got {self.ring_tokens} and "
                f"{self.num_ring_drafts}; a step's tokens go to the ring"
            )

    @classmethod
    def of(cls, spec: MambaSpec, ring_tokens: int, num_drafts: int) -> RingStateSpec:
        """The spec with a ring in each page.

        Raises:
            NotImplementedError: the layer does not say what a token adds to its state.
            ValueError: the ring does not hold a step of a token and its drafts.
        """
        if not spec.token_shapes:
            raise NotImplementedError(
                f"expected a layer that says what a token adds to its state (token_shapes), got states of "
                f"{spec.shapes}; plan with ring_tokens=None"
            )
        *convolutions, state = spec.shapes
        *convolution_dtypes, state_dtype = spec.dtypes
        shapes = (
            *((channels, length + num_drafts) for channels, length in convolutions),
            state,
            *((ring_tokens, *shape) for shape in spec.token_shapes),
            (1, state[0]),
        )
        dtypes = (*convolution_dtypes, state_dtype, *spec.token_dtypes, "int32")
        changed = {
            "shapes": shapes,
            "dtypes": dtypes,
            "num_speculative_blocks": 0,
            "page_size_padded": None,
            "num_ring_drafts": num_drafts,
            "lane_arrays": _lane_arrays(spec),
            "head_axes": (*[0] * len(spec.shapes), *[1] * (len(spec.token_shapes) + 1)),
        }
        return cls(**spec.common_fields() | changed, ring_tokens=ring_tokens)

    @property
    def kind(self) -> str:
        """Name in KV events: what can be hit is a state."""
        return "mamba"


def _lane_arrays(spec: MambaSpec) -> tuple[int, ...]:
    """Those of the state, and of what tokens add to one whose keys and values are whole lanes."""
    first = len(spec.shapes)
    if first - 1 not in spec.lane_arrays:
        return spec.lane_arrays
    added = (first + i for i, shape in enumerate(spec.token_shapes) if len(shape) > 1)
    return (*spec.lane_arrays, *added)


__all__ = ["RingStateSpec"]
