"""Recurrent layers over states in pages: causal convolution and selective scan of Mamba 1 and Mamba 2."""

from pallas_kernels.ssm_update.api import SsmOutput, causal_conv1d, selective_scan

__all__ = ["SsmOutput", "causal_conv1d", "selective_scan"]
