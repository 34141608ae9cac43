"""How a model's parameters are split over the devices of a mesh (tensor parallelism).

Flow:    module, parameter path, mesh -> [param_sharding] -> NamedSharding

A module with `param_splits()` says which dimension of its parameters devices split, and into how many parts at most:
heads and feed-forward columns, their output projections by rows. All else is whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvjax.models.tensor_sources import ParamPath


@runtime_checkable
class HasSplits(Protocol):
    """A module whose parameters can be split."""

    def param_splits(self) -> Mapping[str, tuple[int, int]]:
        """By parameter: the dimension that devices split, and its parts, which they must divide."""


def param_sharding(module: Any, path: ParamPath, mesh: Mesh, tensor_axis: str) -> NamedSharding:
    """Sharding of the parameter of `module`, a whole model, at `path`.

    It is whole on every device where the mesh has no `tensor_axis`, or that axis does not divide its parts.
    """
    node = module
    for key in path[:-1]:
        node = node[key] if isinstance(key, int) else getattr(node, key)
    splits = node.param_splits() if isinstance(node, HasSplits) else {}
    if tensor_axis not in mesh.axis_names or path[-1] not in splits:
        return NamedSharding(mesh, PartitionSpec())
    dim, parts = splits[path[-1]]
    if parts % mesh.shape[tensor_axis]:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, tensor_axis))
