"""The blocks computed last against a list of all that were."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import BlockHash
from kvjax.core.watch.computed_blocks import ComputedBlocks


@pytest.mark.parametrize("max_blocks", [1, 3, 100])
def test_the_latest_are_known(max_blocks: int) -> None:
    rng = np.random.default_rng(max_blocks)
    computed, all_of_them = ComputedBlocks(max_blocks), list[bytes]()
    keys = [BlockHash(bytes([value])) for value in range(8)]
    for _ in range(200):
        added = [keys[i] for i in rng.integers(0, len(keys), rng.integers(0, 5))]
        computed.add(added)
        all_of_them += added
        latest = list(dict.fromkeys(reversed(all_of_them)))[:max_blocks]
        assert len(computed) == len(latest)
        assert {key for key in keys if key in computed} == set(latest)
