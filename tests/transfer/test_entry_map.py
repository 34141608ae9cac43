"""What pages of one size get of pages of another, entry by entry."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.transfer.entry_map import received_pages


@pytest.mark.parametrize("seed", range(20))
def test_what_pages_lack_ends_before_the_first_entry_from_which_all_are_there(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(20):
        size, sent_size = rng.integers(1, 9, 2).tolist()
        stop = int(rng.integers(1, 60))
        table = np.arange(1, -(-stop // size) + 1, dtype=np.int32)
        table[: rng.integers(0, table.size)] = 0
        sent = np.arange(rng.integers(0, -(-stop // sent_size)), -(-stop // sent_size))
        first = int(rng.integers(0, -(-stop // size))) * size
        received = received_pages(table, size, first, stop, sent, sent_size)
        entries = [entry for entry in range(first, stop) if table[entry // size]]
        missing = [entry for entry in entries if entry // sent_size not in sent]
        assert received.num_lacking == (missing[-1] + 1 if missing else 0)
        assert np.count_nonzero(received.places >= 0) == len(entries) - len(missing)
