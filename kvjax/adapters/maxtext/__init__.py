"""MaxText: the attention op that its serving path calls, by kvjax's kernels."""

from kvjax.adapters.maxtext.ops import sharded_ragged_paged_attention

__all__ = ["sharded_ragged_paged_attention"]
