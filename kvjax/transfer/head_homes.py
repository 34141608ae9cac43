"""Which processes have which heads of a data rank's entries.

Flow:    Placement + data rank -> [senders_of] -> sources of a ticket;  -> [own_heads] -> what a process pulls
"""

from __future__ import annotations

import jax
import numpy as np

from kvjax.device import Placement
from kvjax.transfer.head_part import HeadPart


def own_heads(placement: Placement, rank: int) -> HeadPart | None:
    """The heads that this process's devices hold of a data rank; None: it has no device of the rank."""
    shards = np.flatnonzero((_processes(placement, rank) == jax.process_index()).any(axis=0))
    if not shards.size:
        return None
    return HeadPart(int(shards[0]), int(shards[-1]) + 1, placement.num_shards)


def senders_of(placement: Placement, rank: int) -> tuple[int, ...]:
    """Processes that together have all heads of a data rank, each an equal share, in the order of the heads.

    Raises:
        NotImplementedError: no processes split the heads so.
    """
    owners = _processes(placement, rank)[0].tolist()  # devices of other context ranks hold the same entries
    senders = tuple(dict.fromkeys(owners))
    share = len(owners) // len(senders)
    if owners != [process for process in senders for _ in range(share)]:
        raise NotImplementedError(
            f"expected processes with equal runs of the heads of data rank {rank}, got processes {owners}; order the "
            "mesh's devices by process along its tensor axis"
        )
    return senders


def _processes(placement: Placement, rank: int) -> np.ndarray:
    """int[others, num_shards] process of each device of a data rank, by its shard of the heads."""
    mesh = placement.mesh
    indices = np.vectorize(lambda device: device.process_index, otypes=[np.int64])(mesh.devices)
    names = list(mesh.axis_names)
    if placement.data_axis is not None:
        axis = names.index(placement.data_axis)
        indices = indices.take([rank], axis=axis)
    if placement.head_axis is None:
        return indices.reshape(-1, 1)
    return np.moveaxis(indices, names.index(placement.head_axis), -1).reshape(-1, placement.num_shards)


__all__ = ["own_heads", "senders_of"]
