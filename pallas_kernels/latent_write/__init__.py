"""Scatter of new states into latent pages."""

from pallas_kernels.latent_write.api import latent_write

__all__ = ["latent_write"]
