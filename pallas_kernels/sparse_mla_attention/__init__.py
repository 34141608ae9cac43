"""Attention of DeepSeek V4: a window of latents, and compressed latents of which each query names the best."""

from pallas_kernels.sparse_mla_attention.api import plan_work, sparse_mla_attention
from pallas_kernels.sparse_mla_attention.schedule import SparseSchedule, plan

__all__ = ["SparseSchedule", "plan", "plan_work", "sparse_mla_attention"]
