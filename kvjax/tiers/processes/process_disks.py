"""The disks of several processes, opened together: a folder for each process's parts, and an index of what all have.

Flow:    Home of each process, a folder -> [open_disks] -> DiskStore of the own parts, CommonIndex

    <disk_folder>/ranks-<first rank>-part-<number>/    a `DiskStore`: one process's parts of some data ranks' units
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvjax.tiers.processes.common_index import CommonIndex, in_all, number_of
from kvjax.tiers.processes.homes import Home
from kvjax.tiers.processes.reports import Board
from kvjax.tiers.stats import TierStats
from kvjax.tiers.stores.disk_store import DiskStore

TEXT_BYTES = 1 << 20  # of one text on the board


@dataclass(frozen=True)
class OpenDisk:
    """The disks of one home."""

    own: DiskStore | None  # None: this process has no part of its units
    index: CommonIndex


def open_disks(
    board: Board, homes: Sequence[Home], folder: str, max_bytes: int, identity: Mapping[str, str], stats: TierStats
) -> list[OpenDisk]:
    """The disks of each home, `max_bytes` each.

    Raises:
        ValueError: a folder of some process is of another cache or mesh. So it is raised on all.
    """
    stores: list[DiskStore | None] = []
    problem = ""
    try:
        stores = [_open(home, board.index, folder, max_bytes, identity, stats) for home in homes]
    except (ValueError, OSError) as error:
        problem = str(error)
    for process, text in enumerate(board.exchange("disks", problem)):
        if text:
            raise ValueError(f"process {process} cannot open its disk: {text}")
    disks = []
    for home, own in zip(homes, stores, strict=True):
        index = CommonIndex(max_bytes, home.bytes_of_group)
        index.start(common_names(board, home, own))
        disks.append(OpenDisk(own, index))
    return disks


def common_names(board: Board, home: Home, disk: DiskStore | None) -> list[int]:
    """Numbers of the units that the disks of all processes of a home have, those used longest ago first."""
    own = [] if disk is None else [number_of(name) for name in disk.names_by_age()]
    text = base64.b64encode(np.array(own, "<u8").tobytes()).decode()
    topic = f"units of ranks {home.ranks}"
    most = max(map(int, board.exchange(f"{topic}, length", str(len(text)))))
    texts = [""] * len(home.processes)
    for start in range(0, most, TEXT_BYTES):
        parts = board.exchange(f"{topic}, from {start}", text[start : start + TEXT_BYTES])
        texts = [so_far + parts[process] for so_far, process in zip(texts, home.processes, strict=True)]
    return in_all([np.frombuffer(base64.b64decode(text), "<u8") for text in texts]).tolist()


def _open(
    home: Home, process: int, folder: str, max_bytes: int, identity: Mapping[str, str], stats: TierStats
) -> DiskStore | None:
    if process not in home.processes:
        return None
    part = home.processes.index(process)
    digest = hashlib.sha256(home.places[process].encode()).hexdigest()[:16]
    share = f"part {part} of {len(home.processes)}, {digest}"
    own = Path(folder) / f"ranks-{home.ranks[0]}-part-{part}"
    return DiskStore(own, max_bytes, {**identity, "share": share}, stats)


__all__ = ["OpenDisk", "common_names", "open_disks"]
