"""Mamba: selective state spaces, whose state is one of convolution and one of recurrence, for example.

Source:  vLLM v1/kv_cache_interface.py (MambaSpec), v1/core/single_type_kv_cache_manager.py (MambaManager)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.recurrent_spec import StateArraysSpec
from kvjax.core.kinds.registry import register_kv_cache_spec


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class MambaSpec(StateArraysSpec):
    """States that requests run on and hit."""

    layer_fields: ClassVar[frozenset[str]] = StateArraysSpec.layer_fields | {"token_shapes", "token_dtypes"}

    token_shapes: tuple[tuple[int, ...], ...] = ()  # what a token adds to the last array, heads first; (): not told
    token_dtypes: tuple[str, ...] = ()  # of each array

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.token_shapes) != len(self.token_dtypes):
            raise ValueError(
                f"expected a dtype for each of token_shapes, got {self.token_shapes} and {self.token_dtypes}"
            )

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "mamba"
