"""TPU chips: how libtpu calls them, and the figures of the static score.

Source: HBM bandwidth, VMEM and peak FLOPs of one core from the tpu_info table of jax and Google Cloud's pages of the
chips; clocks are inferred from peak FLOPs and the size of the matrix units, not documented.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass

# Before jax is imported: no query for a TPU host, and several compilations at a time.
ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}


@dataclass(frozen=True)
class Chip:
    """One chip; v7x has two cores, whose figures are those of one."""

    name: str
    topology: str  # one chip
    topology_of_four: str
    clock_hz: float
    hbm_bytes_per_s: float
    bf16_flops_per_s: float
    vmem_bytes: int  # of one core
    smem_bytes: int = 1 << 20

    def dma_cycles(self, num_bytes: int) -> float:
        """Cycles that HBM needs for so many bytes."""
        return num_bytes / self.hbm_bytes_per_s * self.clock_hz


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "v5e:1x1", "v5e:2x2", 1.5e9, 0.82e12, 197e12, 128 << 20),
        Chip("v5p", "v5p:1x1x1", "v5p:2x2x1", 1.75e9, 2.765e12, 459e12, 64 << 20),
        Chip("v6e", "v6e:1x1", "v6e:2x2", 1.75e9, 1.64e12, 918e12, 128 << 20),
        Chip("v7x", "tpu7x:1x1x1", "tpu7x:2x2x1", 2.2e9, 3.69e12, 1153.5e12, 64 << 20),
    )
}


def prepare_environment() -> None:
    """Sets what libtpu reads when it is loaded, and keeps this process off it; call before jax's first use."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "jax" in sys.modules:  # which has read the environment
        sys.modules["jax"].config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
