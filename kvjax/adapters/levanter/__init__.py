"""levanter: batch metadata from a step plan, and an allocator of pages that runs inside a compiled step."""

from kvjax.adapters.levanter.allocator import PageState, alloc, fork, free, init
from kvjax.adapters.levanter.metadata import LEVANTER, page_batch_info_fields, to_page_batch_info

__all__ = [
    "LEVANTER",
    "PageState",
    "alloc",
    "fork",
    "free",
    "init",
    "page_batch_info_fields",
    "to_page_batch_info",
]
