"""Who is followed by a draft model whose pool is too small for all: the most urgent. No device."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.engine.drafts.draft_requests import DraftRequests
from tests.engine.fake_model import make_manager


@pytest.mark.parametrize("first_seed", range(0, 20, 5))
def test_the_last_of_a_round_gives_its_blocks_up_first(first_seed: int) -> None:
    """Nobody of a round is followed no more for lack of blocks while one behind it is."""
    assert sum(check_random_rounds(seed) for seed in range(first_seed, first_seed + 5)) > 0


def check_random_rounds(seed: int) -> int:
    """Rows come in order of urgency, some of them in each round; they grow, end and start. How often one gave way."""
    rng = np.random.default_rng(seed)
    table = RequestTable(max_num_reqs=8, max_model_len=256)
    drafts = DraftRequests(make_manager(50), None, max_num_batched_tokens=64)
    rows: list[int] = []
    num_given_up = 0
    for step in range(120):
        if len(rows) < 6 and rng.random() < 0.4:
            rows.append(table.add(Request(f"r{step}", rng.integers(0, 9, int(rng.integers(1, 60))))))
        for row in [row for row in rows if table.num_tokens[row] > 110 or rng.random() < 0.02]:
            drafts.release(row)
            request = table.requests[row]
            assert request is not None
            table.release(request)
            rows.remove(row)
        asked = np.array([row for row in rows if rng.random() < 0.8], np.int64)
        if not asked.size:
            continue
        before = drafts._own[asked] >= 0 if asked.max() < drafts._own.size else np.zeros(asked.size, bool)
        _, counts = drafts.follow(table, asked, rng.integers(0, 5, asked.size))
        is_followed = drafts._own[asked] >= 0
        gave_up = np.flatnonzero(before & ~is_followed)
        num_given_up += gave_up.size
        assert not gave_up.size or not is_followed[gave_up[0] :].any()
        assert is_followed[counts > 0].all()
        drafting = asked[counts > 0]
        for _ in drafts.drafts(drafting, counts[counts > 0]):
            pass
        for row in asked.tolist():
            table.append_run(row, rng.integers(0, 9, int(rng.integers(1, 5))).astype(np.int32))
        drafts.accept(drafting, np.zeros(drafting.size, np.int64))
        drafts.check_invariants(table)
    for row in rows:
        drafts.release(row)
    assert drafts.num_followed == 0
    return num_given_up
