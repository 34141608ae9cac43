"""Latent attention (MLA) of ragged queries over paged latents."""

from pallas_kernels.mla_paged_attention.api import mla_paged_attention, plan

__all__ = ["mla_paged_attention", "plan"]
