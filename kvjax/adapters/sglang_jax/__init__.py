"""sglang-jax: attention metadata from a step plan; its prefix cache and slot allocators over kvjax's pools."""

from kvjax.adapters.sglang_jax.cached_prefix import CachedPrefix
from kvjax.adapters.sglang_jax.installation import install, prefix_cache_of, uninstall
from kvjax.adapters.sglang_jax.metadata import (
    SGLANG_JAX,
    flash_attention_metadata_fields,
    to_flash_attention_metadata,
)
from kvjax.adapters.sglang_jax.prefix_cache import PrefixCache
from kvjax.adapters.sglang_jax.slot_allocator import SlotAllocator
from kvjax.adapters.sglang_jax.window_allocator import WindowSlotAllocator

__all__ = [
    "SGLANG_JAX",
    "CachedPrefix",
    "PrefixCache",
    "SlotAllocator",
    "WindowSlotAllocator",
    "flash_attention_metadata_fields",
    "install",
    "prefix_cache_of",
    "to_flash_attention_metadata",
    "uninstall",
]
