"""Mamba: selective state spaces, whose state is one of convolution and one of recurrence, for example.

Source:  vLLM v1/kv_cache_interface.py (MambaSpec), v1/core/single_type_kv_cache_manager.py (MambaManager)
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.core.kinds.recurrent_spec import StateArraysSpec
from kvjax.core.kinds.registry import register_kv_cache_spec


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class MambaSpec(StateArraysSpec):
    """States that requests run on and hit."""

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "mamba"
