"""kvjax's KV cache under vLLM's scheduler: `install()`, or `KVCacheManager` in the place of vLLM's."""

from kvjax.adapters.vllm.installation import install, uninstall
from kvjax.adapters.vllm.manager import KVCacheManager

__all__ = ["KVCacheManager", "install", "uninstall"]
