"""An array of entries cut into what each device of a receiver needs, and put together there.

Flow:    array on the sender's mesh -> [cut] -> pieces, one device each -> the wire -> [joined] -> array on another mesh
Source:  head_pieces.py, which says the pieces

A *part* is what differs between devices of a sharding: heads, the second dimension, split evenly; one part where every
device holds the whole. A part travels once, and is copied on the receiver to all devices that hold it.
"""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, SingleDeviceSharding

from kvjax.transfer.head_pieces import head_pieces

HEADS = 1  # dimension of arrays of entries


def cut(array: jax.Array, num_receivers: int) -> list[jax.Array]:
    """Pieces of `array` [entries, heads, ...] for `num_receivers` parts, each on a device of the sender.

    Raises:
        ValueError: the heads do not split so.
    """
    found = {shard.index[HEADS].start or 0: shard.data for shard in array.addressable_shards}
    parts = [found[start] for start in sorted(found)]
    return [
        jax.lax.slice_in_dim(parts[piece.source], piece.start, piece.stop, axis=HEADS)
        for piece in head_pieces(array.shape[HEADS], len(parts), num_receivers)
    ]


def piece_shapes(
    shape: tuple[int, ...], dtype: str, num_senders: int, sharding: NamedSharding
) -> list[jax.ShapeDtypeStruct]:
    """What `cut` makes of an array of `shape` in `num_senders` parts, each where `sharding` wants it."""
    owners = _owners(sharding, shape)
    return [
        jax.ShapeDtypeStruct(
            (shape[0], piece.stop - piece.start, *shape[2:]),
            jnp.dtype(dtype),
            sharding=SingleDeviceSharding(owners[piece.destination][0]),
        )
        for piece in head_pieces(shape[HEADS], num_senders, len(owners))
    ]


def joined(shape: tuple[int, ...], num_senders: int, sharding: NamedSharding, pieces: Iterator[jax.Array]) -> jax.Array:
    """The array of `shape`, of which `pieces` gives the next ones."""
    owners = _owners(sharding, shape)
    parts: list[list[jax.Array]] = [[] for _ in owners]
    for piece in head_pieces(shape[HEADS], num_senders, len(owners)):
        parts[piece.destination].append(next(pieces))
    arrays = []
    for part, devices in zip(parts, owners, strict=True):
        whole = part[0] if len(part) == 1 else jnp.concatenate(part, axis=HEADS)
        arrays += [jax.device_put(whole, device) for device in devices]
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _owners(sharding: NamedSharding, shape: tuple[int, ...]) -> list[list[jax.Device]]:
    """The devices of each part, by its first head."""
    owners: dict[int, list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        assert index is not None
        owners.setdefault(index[HEADS].start or 0, []).append(device)
    return [owners[start] for start in sorted(owners)]
