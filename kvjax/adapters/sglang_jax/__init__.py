"""sglang-jax: attention metadata from a step plan."""

from kvjax.adapters.sglang_jax.metadata import (
    SGLANG_JAX,
    flash_attention_metadata_fields,
    to_flash_attention_metadata,
)

__all__ = ["SGLANG_JAX", "flash_attention_metadata_fields", "to_flash_attention_metadata"]
