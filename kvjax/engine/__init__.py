"""A small reference engine: continuous batching over the paged, prefix-cached KV of `kvjax.core` and `kvjax.device`."""
