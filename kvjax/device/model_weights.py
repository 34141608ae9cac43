"""A model's weights as a flat tuple of arrays: what a jitted program takes at the least cost of a call.

Flow:    model -> [ModelWeights] -> arrays -> jitted program -> [ModelWeights.model] -> the model while tracing

An `nnx.State` is a tree that Python walks at every call: 1.3 ms of the host for 80 layers, where a tuple takes 0.4.
Each array still costs a call 2 to 4 us, however small it is, so norms and biases can go in one buffer.
Matrices go by themselves: a slice of a buffer would be copied before it is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kvjax.device.placement import Placement, with_auto_axes

SMALL_BYTES = 1 << 14  # vectors below it are packed

Rebuild: TypeAlias = Callable[[Sequence[Any]], Any]  # weights -> the model


class ModelWeights:
    """The weights of one model on the devices of a placement. Immutable."""

    def __init__(self, model: Any, placement: Placement, *, packs_small: bool = False) -> None:
        """Weights that do not lie on exactly the placement's devices are copied to each of them.

        Those on a mesh of Explicit axes are the same buffers on the mesh of Auto axes. With `packs_small` vectors
        below `SMALL_BYTES` that every device holds whole are copied into one array for each dtype.

        Raises:
            ValueError: `model` is neither an `nnx.Module` nor a pytree that can be called and has `logits`.
        """
        if not callable(model) or not callable(getattr(model, "logits", None)):
            raise ValueError(
                "expected a model with model(token_ids, positions, cache) and model.logits(hidden), got "
                f"{type(model).__name__}; functions and their weights make one by kvjax.device.FunctionModel"
            )
        leaves, self._rebuild = _split_module(model) if isinstance(model, nnx.Module) else _split_tree(model)
        devices = set(placement.mesh.devices.flat)

        def placed(leaf: Any) -> jax.Array:
            sharding = None if isinstance(leaf, np.ndarray) else leaf.sharding
            if sharding is None or sharding.device_set != devices:
                return jax.device_put(leaf, placement.replicated)
            if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
                return leaf
            mesh = with_auto_axes(sharding.mesh)
            return leaf if mesh == sharding.mesh else jax.device_put(leaf, NamedSharding(mesh, sharding.spec))

        arrays = tuple(map(placed, leaves))
        self._packs = _small_vectors(arrays) if packs_small else []
        packed = {place for places in self._packs for place in places}
        self._own = [place for place in range(len(arrays)) if place not in packed]
        self._sizes = [array.size for array in arrays]
        buffers = [_joined([arrays[place] for place in places]) for places in self._packs]
        self.arrays: tuple[jax.Array, ...] = (*(arrays[place] for place in self._own), *buffers)

    def model(self, arrays: Sequence[jax.Array]) -> Any:
        """The model with `arrays` in place of its weights."""
        return self._rebuild(self._unpacked(arrays) if self._packs else arrays)

    def _unpacked(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """One array for each weight, in the model's order."""
        found = dict(zip(self._own, arrays[: len(self._own)], strict=True))
        for buffer, places in zip(arrays[len(self._own) :], self._packs, strict=True):
            start = 0
            for place in places:
                found[place] = buffer[start : start + self._sizes[place]]
                start += self._sizes[place]
        return [found[place] for place in range(len(self._sizes))]


def _small_vectors(arrays: Sequence[Any]) -> list[list[int]]:
    """Places of small vectors that can share an array: of one dtype, each whole on the same devices."""
    packs: dict[Any, list[int]] = {}
    for place, array in enumerate(arrays):
        if (
            isinstance(array, jax.Array)  # and not the shape of one
            and array.ndim == 1
            and jnp.issubdtype(array.dtype, np.number)
            and array.size * array.dtype.itemsize < SMALL_BYTES
            and array.sharding.is_fully_replicated
        ):
            packs.setdefault((array.dtype, array.sharding), []).append(place)
    return [places for places in packs.values() if len(places) > 1]


def _joined(arrays: Sequence[jax.Array]) -> jax.Array:
    """All their numbers in a row, where they lie."""
    return jax.device_put(jnp.concatenate(arrays), arrays[0].sharding)


def _split_module(module: nnx.Module) -> tuple[list[Any], Rebuild]:
    graphdef, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    return leaves, lambda arrays: nnx.merge(graphdef, jax.tree.unflatten(tree, arrays))


def _split_tree(model: Any) -> tuple[list[Any], Rebuild]:
    """Arrays are weights; all other leaves (numbers, functions) stay as they are."""
    leaves, tree = jax.tree.flatten(model)
    if len(leaves) == 1 and leaves[0] is model:
        raise ValueError(
            f"expected an nnx.Module or a pytree, got {type(model).__name__}; register it with jax.tree_util"
        )
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)]

    def rebuild(arrays: Sequence[Any]) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree.unflatten(tree, filled)

    return [leaves[place] for place in places], rebuild


__all__ = ["SMALL_BYTES", "ModelWeights"]
