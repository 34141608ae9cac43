"""EasyDeL: attention metadata from a step plan; its cache manager over kvjax's."""

from kvjax.adapters.easydel.installation import install, uninstall
from kvjax.adapters.easydel.manager import CacheManager
from kvjax.adapters.easydel.metadata import EASYDEL, ragged_pages_metadata_fields, to_ragged_pages_metadata
from kvjax.adapters.easydel.pages import CachePages

__all__ = [
    "EASYDEL",
    "CacheManager",
    "CachePages",
    "install",
    "ragged_pages_metadata_fields",
    "to_ragged_pages_metadata",
    "uninstall",
]
