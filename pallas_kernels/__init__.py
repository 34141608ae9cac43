"""Kernels over paged KV caches: arrays and ints in, arrays out.

This package knows no request and no manager. Importing it loads nothing: `pallas_kernels.layouts` is pure
Python, and every op (`pallas_kernels.ragged_paged_attention`, `pallas_kernels.kv_write`) imports jax itself.
"""
