"""How a decoder's parameters are split over the devices of a mesh (tensor parallelism).

Flow:    parameter path, config, mesh -> [param_sharding] -> NamedSharding

Heads and feed-forward columns are split, their output projections by rows; all else is whole on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.models.config import ModelConfig

_SPLIT_COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_SPLIT_ROWS = {"o_proj", "down_proj"}


def param_sharding(
    path: Sequence[Any],  # such as ("layers", 0, "self_attn", "q_proj", "kernel")
    config: ModelConfig,
    mesh: Mesh,
    tensor_axis: str,
) -> NamedSharding:
    """Sharding of one parameter; a mesh without `tensor_axis` holds every parameter whole on every device.

    Key and value projections stay whole where the axis is larger than the number of KV heads or does not divide it.
    """
    whole = NamedSharding(mesh, PartitionSpec())
    projection, leaf = (str(path[-2]) if len(path) > 1 else "", str(path[-1]))
    if tensor_axis not in mesh.axis_names:
        return whole
    if projection in ("k_proj", "v_proj") and config.num_kv_heads % mesh.shape[tensor_axis]:
        return whole
    if projection in _SPLIT_COLUMNS:
        columns = PartitionSpec(None, tensor_axis) if leaf == "kernel" else PartitionSpec(tensor_axis)
        return NamedSharding(mesh, columns)
    if projection in _SPLIT_ROWS and leaf == "kernel":
        return NamedSharding(mesh, PartitionSpec(tensor_axis, None))
    return whole


def check_mesh(config: ModelConfig, mesh: Mesh, tensor_axis: str) -> None:
    """Raises ValueError where query heads or feed-forward columns do not divide over `tensor_axis`."""
    size = mesh.shape.get(tensor_axis, 1)
    for name, count in (("query heads", config.num_q_heads), ("feed-forward columns", config.intermediate_size)):
        if count % size:
            raise ValueError(f"expected {name} to divide over {size} devices of axis {tensor_axis!r}, got {count}")
