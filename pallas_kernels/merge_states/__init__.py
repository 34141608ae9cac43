"""Merge of attention over parts of the keys."""

from pallas_kernels.merge_states.api import merge_states

__all__ = ["merge_states"]
