"""Merge of attention over parts of the keys."""

from pallas_kernels.merge_states.api import merge_states
from pallas_kernels.merge_states.collectives import merge_ranks

__all__ = ["merge_ranks", "merge_states"]
