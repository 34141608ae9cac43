"""Copy, zero, gather and scatter of whole pages of one array."""

from pallas_kernels.page_ops.api import copy_pages, gather_pages, scatter_pages, zero_pages

__all__ = ["copy_pages", "gather_pages", "scatter_pages", "zero_pages"]
