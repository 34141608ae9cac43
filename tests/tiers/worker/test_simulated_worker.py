"""Which units a disk of a replay keeps."""

from __future__ import annotations

from kvjax.core import BlockHash
from kvjax.tiers.units import UnitKey, UnitSizes
from kvjax.tiers.worker.simulated_worker import SimulatedDisk


def test_units_on_probation_are_deleted_first_until_they_are_used() -> None:
    disk = SimulatedDisk(50, UnitSizes((0,), ((10,),), (1,), (10,)))
    keys = [UnitKey(0, BlockHash(bytes([i]) * 32)) for i in range(7)]
    for key in keys[:2]:
        disk.use(key)
    for key in keys[2:5]:
        disk.use(key, on_probation=True)
    disk.use(keys[0], on_probation=True)
    disk.use(keys[4])
    for key in keys[5:]:
        disk.use(key)
    assert [i for i, key in enumerate(keys) if not disk.has(key)] == [2, 3]
