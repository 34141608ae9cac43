"""The compressed entries that each query of a layer with an indexer sees."""

from pallas_kernels.indexer_topk.api import indexer_topk

__all__ = ["indexer_topk"]
