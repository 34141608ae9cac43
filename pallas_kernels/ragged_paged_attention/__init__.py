"""Attention of ragged queries over paged KV: decode, prefill and mixed in one call."""

from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention.api import plan, ragged_paged_attention

__all__ = ["MaskRule", "plan", "ragged_paged_attention"]
