"""Scatter of new K and V into pages."""

from pallas_kernels.kv_write.api import kv_write

__all__ = ["kv_write"]
