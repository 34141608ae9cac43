"""MaxText: the attention op that its serving path calls."""

from kvjax.adapters.maxtext.ops import MAXTEXT, sharded_ragged_paged_attention

__all__ = ["MAXTEXT", "sharded_ragged_paged_attention"]
