"""EasyDeL: attention metadata from a step plan."""

from kvjax.adapters.easydel.metadata import EASYDEL, ragged_pages_metadata_fields, to_ragged_pages_metadata

__all__ = ["EASYDEL", "ragged_pages_metadata_fields", "to_ragged_pages_metadata"]
