"""Cached blocks beyond the pools: in host memory and on disk.

Flow:    KVCacheManager and engine -> [connector] -> host, disk -> pages

See docs/tiers.md. `kvjax.tiers.tier_worker` loads jax, the rest does not.
"""
