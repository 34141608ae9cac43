"""Attention of ragged queries over paged KV: decode, prefill and mixed in one call."""

from pallas_kernels.ragged_paged_attention.api import ragged_paged_attention

__all__ = ["ragged_paged_attention"]
