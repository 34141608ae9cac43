"""Mamba: selective state spaces, whose state is one of convolution and one of recurrence, for example.

Source:  vLLM v1/kv_cache_interface.py (MambaSpec), v1/core/single_type_kv_cache_manager.py (MambaManager)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvjax.core.kinds.recurrent_spec import RecurrentSpec
from kvjax.core.kinds.registry import register_kv_cache_spec


@register_kv_cache_spec
@dataclass(frozen=True, kw_only=True)
class MambaSpec(RecurrentSpec):
    """Arrays of one state: `shapes` and `dtypes` side by side."""

    layer_fields: ClassVar[frozenset[str]] = RecurrentSpec.layer_fields | {"shapes", "dtypes"}
    supports_eagle: ClassVar[bool] = True

    shapes: tuple[tuple[int, ...], ...]  # of each array of one state
    dtypes: tuple[str, ...]  # of each array

    @property
    def kind(self) -> str:
        """Name in KV events."""
        return "mamba"

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], ...]:
        """`shapes`."""
        return self.shapes

    @property
    def state_dtypes(self) -> tuple[str, ...]:
        """`dtypes`."""
        return self.dtypes
