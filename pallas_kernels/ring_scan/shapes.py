"""Real model shapes of Mamba 2 layers over ring states, for tests, benchmarks and compilation.

Source: the config.json on each model's public page: mamba_num_heads,
mamba_head_dim, ssm_state_size and n_groups of Nemotron-H, mamba_n_heads, mamba_d_head, mamba_d_state and mamba_n_groups
of Granite 4.
"""

from __future__ import annotations

from pallas_kernels.ssm_update.shapes import SsmShape

SHAPES = (
    SsmShape("nemotron-h-8b", "nvidia/Nemotron-H-8B-Base-8K", 128, 128, 64, num_groups=8),
    SsmShape("granite-4.0-h-small", "ibm-granite/granite-4.0-h-small", 128, 128, 64),
)
