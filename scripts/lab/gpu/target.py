"""The card to compile for, on a machine that has none: its description and what the compiler is told to dump.

Source:  the fields of xla's GpuTargetConfig; sizes of the H100 and H200 SXM from NVIDIA's data sheets
"""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """One card of compute capability 9.0."""

    name: str
    device_kind: str
    num_sms: int
    bytes_per_s: int
    l2_bytes: int
    memory_bytes: int
    shared_bytes: int = 233_472  # of a multiprocessor; a thread block may have 1 KiB less
    fpus: int = 128  # of a multiprocessor
    clock_ghz: float = 1.98
    matrix_flops: float = 989e12  # a second, of bfloat16

    @property
    def config(self) -> str:
        """Text form of the GpuTargetConfig."""
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
              shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_bytes}
              shared_memory_per_block_optin: {self.shared_bytes - 1024}
              core_count: {self.num_sms} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock_ghz}
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              memory_bandwidth: {self.bytes_per_s} l2_cache_size: {self.l2_bytes}
              device_memory_size: {self.memory_bytes}
              cuda_compute_capability {{ major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.device_kind}"
        """

    @property
    def vector_flops(self) -> float:
        """A second, of float32."""
        return 2e9 * self.clock_ghz * self.fpus * self.num_sms


CARDS = {
    card.name: card
    for card in (
        Card("h100", "NVIDIA H100 80GB HBM3", 132, 3_352_320_000_000, 52_428_800, 84_978_434_048),
        Card("h200", "NVIDIA H200", 132, 4_800_000_000_000, 62_914_560, 150_754_820_096),
    )
}


def prepare_environment(dump: str) -> None:
    """Has the compilers dump into the folder `dump`; call before jax is imported."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    os.environ["JAX_TRACEBACK_FILTERING"] = "off"
    os.environ["MOSAIC_GPU_DUMP_TO"] = dump
    for what in ("PTX", "PTXAS", "SASS", "RESOURCES"):
        os.environ[f"MOSAIC_GPU_DUMP_{what}"] = "1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
