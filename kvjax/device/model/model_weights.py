"""A model's weights as a flat tuple of arrays: what a jitted program takes at the least cost of a call.

Flow:    model -> [ModelWeights] -> arrays -> jitted program -> [ModelWeights.model] -> the model while tracing

An `nnx.State` is a tree that Python walks at every call: 1.3 ms of the host for 80 layers, where a tuple takes 0.4.
Each array still costs a call 2 to 4 us, however small it is, so norms and biases can go in one buffer.
Matrices go by themselves: a slice of a buffer would be copied before it is multiplied.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from kvjax.device.mesh.placement import Placement, with_auto_axes
from kvjax.device.model.weights_digest import leaves_digest
from pallas_kernels.lazy import lazy

if TYPE_CHECKING:
    from flax import nnx
else:
    nnx = lazy("flax.nnx")

SMALL_BYTES = 1 << 14  # vectors below it are packed

Rebuild: TypeAlias = Callable[[Sequence[Any]], Any]  # weights -> the model


class ModelWeights:
    """The weights of one model on the devices of a placement. Immutable."""

    def __init__(
        self, model: Any, placement: Placement, *, packs_small: bool = False, like: ModelWeights | None = None
    ) -> None:
        """Weights that do not lie on exactly the placement's devices are copied to each of them, numpy's always.

        Those on a mesh of Explicit axes are the same buffers on the mesh of Auto axes. With `packs_small` vectors
        below `SMALL_BYTES` that every device holds whole are copied into one array for each dtype. With `like` the
        weights alone are `model`'s: all else is of the model that `like` has.

        Raises:
            ValueError: `model` is neither an `nnx.Module` nor a pytree that can be called and has `logits`, or has
                weights of other names, shapes or dtypes than `like`.
        """
        if not callable(model) or not callable(getattr(model, "logits", None)):
            raise ValueError(
                "expected a model with model(token_ids, positions, cache) and model.logits(hidden), got "
                f"{type(model).__name__}; functions and their weights make one by kvjax.device.FunctionModel"
            )
        self._names, leaves, self._rebuild = _split(model)
        devices = set(placement.mesh.devices.flat)

        def placed(leaf: Any) -> jax.Array:
            if isinstance(leaf, np.ndarray):  # a CPU device would have the caller's memory itself
                return jax.device_put(np.array(leaf), placement.replicated)
            sharding = leaf.sharding
            if sharding.device_set != devices:
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
        self._shapes = [(array.shape, array.dtype) for array in arrays]
        buffers = [_joined([arrays[place] for place in places]) for places in self._packs]
        self.arrays: tuple[jax.Array, ...] = (*(arrays[place] for place in self._own), *buffers)
        if like is not None:
            self._check_like(like)
            self._rebuild = like._rebuild

    def model(self, arrays: Sequence[jax.Array]) -> Any:
        """The model with `arrays` in place of its weights."""
        return self._rebuild(self._unpacked(arrays) if self._packs else arrays)

    def digest(self) -> str:
        """Equal for equal weights of equal names, shapes and dtypes, however they lie; reads each of them once."""
        return leaves_digest(zip(self._names, self._unpacked(self.arrays), strict=True))

    def _check_like(self, like: ModelWeights) -> None:
        """Raises ValueError where programs compiled for `like` do not take these weights."""
        own, other = ({*zip(w._names, w._shapes, strict=True)} for w in (self, like))
        differ = sorted({name for name, _ in own ^ other})
        if differ or self._packs != like._packs:
            raise ValueError(
                "expected a model whose weights have the names, shapes and dtypes of the one before, got others: "
                f"{', '.join(differ[:3]) or 'they lie on other devices'}"
            )

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


def _split(model: Any) -> tuple[list[str], list[Any], Rebuild]:
    """Weights with their names, and what makes a model of others."""
    if "flax.nnx" in sys.modules and isinstance(model, nnx.Module):
        graphdef, state = nnx.split(model)
        named, tree = jax.tree_util.tree_flatten_with_path(state)
        return *_apart(named), lambda arrays: nnx.merge(graphdef, jax.tree.unflatten(tree, arrays))
    return _split_tree(model)


def _split_tree(model: Any) -> tuple[list[str], list[Any], Rebuild]:
    """Arrays are weights; all other leaves (numbers, functions) stay as they are."""
    named, tree = jax.tree_util.tree_flatten_with_path(model)
    leaves = [leaf for _, leaf in named]
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

    return *_apart([named[place] for place in places]), rebuild


def _apart(named: Sequence[Any]) -> tuple[list[str], list[Any]]:
    """Names and leaves."""
    return [jax.tree_util.keystr(path) for path, _ in named], [leaf for _, leaf in named]


def leaves_of(model: Any) -> list[Any]:
    """The arrays that are its weights."""
    return _split(model)[1]


def weights_digest(model: Any) -> str:
    """As `ModelWeights.digest`, of a model whose weights lie anywhere."""
    names, leaves, _ = _split(model)
    return leaves_digest(zip(names, leaves, strict=True))


__all__ = ["SMALL_BYTES", "ModelWeights", "leaves_of", "weights_digest"]
