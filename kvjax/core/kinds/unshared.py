"""Kinds whose blocks no other request can hit: lookups pass them over, so a hit comes without what they hold.

Who admits a request with a hit brings it: computes the tokens of the window again, fills the buffer, or copies the
state from where it is cached.

Source:  CircularBufferSpec and `bounded_replay` of vLLM 0.33's v1/kv_cache_interface.py (DeepSeek V4.1)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.mla import LatentWindowSpec
from kvjax.core.kinds.recurrent_spec import RecurrentSpec, StateArraysSpec
from kvjax.core.kinds.registry import register_kv_cache_spec


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class RequestBufferSpec(RecurrentSpec):
    """One page of `num_bytes` for a request's whole life, a ring for example."""

    layer_fields: ClassVar[frozenset[str]] = RecurrentSpec.layer_fields | {"num_bytes"}
    is_prefix_cacheable: ClassVar[bool] = False
    supports_eagle: ClassVar[bool] = True

    num_bytes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mamba_cache_mode != "none" or self.num_speculative_blocks:
            raise ValueError(
                "expected mamba_cache_mode none and no speculative blocks of a buffer, got "
                f"{self.mamba_cache_mode} and {self.num_speculative_blocks}"
            )

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "request_buffer"

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Bytes."""
        return ((self.num_bytes,),)

    @property
    def state_dtypes(self) -> tuple[str, ...]:
        """Bytes."""
        return ("int8",)


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class RunningStateSpec(StateArraysSpec):
    """The states that requests run on, where those that are cached lie in a group of their own (`idle_groups`)."""

    is_prefix_cacheable: ClassVar[bool] = False

    @classmethod
    def of(cls, spec: StateArraysSpec) -> RunningStateSpec:
        """The states of another kind, of which a request has one."""
        return cls(**spec.common_fields() | {"mamba_cache_mode": "none"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mamba_cache_mode != "none":
            raise ValueError(f"expected mamba_cache_mode none of running states, got {self.mamba_cache_mode}")

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "running_state"


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class ReplayedWindowMLASpec(LatentWindowSpec):
    """A window whose tokens are computed again where a request starts from a hit."""

    is_prefix_cacheable: ClassVar[bool] = False

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "replayed_window_mla"


__all__ = ["ReplayedWindowMLASpec", "RequestBufferSpec", "RunningStateSpec"]
