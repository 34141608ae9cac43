"""Real model shapes of Mamba 2 layers over ring states, for tests, benchmarks and compilation.

Source: `ssm_update.shapes`; for the others the config.json on each model's public page: mamba_num_heads,
mamba_head_dim, ssm_state_size and n_groups of Nemotron-H, mamba_n_heads, mamba_d_head, mamba_d_state and mamba_n_groups
of Granite 4.
"""

from __future__ import annotations

from pallas_kernels.ssm_update.shapes import SHAPES as SSM_SHAPES
from pallas_kernels.ssm_update.shapes import SsmShape

SHAPES = (
    *(shape for shape in SSM_SHAPES if shape.head_dim is not None),
    SsmShape("nemotron-h-8b", "nvidia/Nemotron-H-8B-Base-8K", 128, 128, 64, num_groups=8),
    SsmShape("granite-4.0-h-small", "ibm-granite/granite-4.0-h-small", 128, 128, 64),
)
