"""Prompt lookup against its definition: a loop over places of one request's tokens. No jax."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.engine.drafts.prompt_lookup import PromptLookup
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.sampling.sampling_table import SamplingTable
from kvjax.engine.scheduling.speculation import SpeculativeConfig

MAX_LEN = 600


def looked_up(tokens: list[int], config: SpeculativeConfig, limit: int) -> list[int]:
    """Drafts of one request, from the definition."""
    longest, shortest = config.ngram_sizes
    for size in range(longest, shortest - 1, -1):
        if len(tokens) < size:
            continue
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                extended = list(tokens)
                for _ in range(min(limit, config.num_drafts)):
                    extended.append(extended[end])
                    end += 1
                return extended[len(tokens) :]
    return []


class Rows:
    """Requests in a table, and a drafter that is told of them."""

    def __init__(self, config: SpeculativeConfig, num_rows: int = 16) -> None:
        self.table = RequestTable(num_rows, MAX_LEN)
        self.config = config
        self.drafter = PromptLookup(self.table, config, MAX_LEN)
        self.requests: list[EngineRequest] = []
        self._num_started = 0

    def start(self, prompt: list[int]) -> None:
        request = Request(f"r{self._num_started}", prompt)
        self._num_started += 1
        self.table.add(request)
        stats = RequestStats(request.request_id, len(prompt), 0.0)
        one = EngineRequest(request, SamplingParams(), 0, frozenset(), self._num_started, stats)
        self.drafter.start(one)
        self.accept(request.row, self.config.num_drafts)
        self.requests.append(one)

    def accept(self, row: int, count: int) -> None:
        """So many drafts of the row were right the last time."""
        self.drafter.settle(np.array([row]), np.array([self.config.num_drafts]), np.array([count]))

    def stop(self, place: int) -> None:
        one = self.requests.pop(place)
        self.drafter.stop(one)
        self.table.release(one.request)

    def drafts(self, places: list[int], limits: list[int]) -> list[list[int]]:
        rows = np.array([self.requests[place].request.row for place in places], np.int64)
        counts = self.drafter.count(rows, np.array(limits, np.int64))
        if not counts.any():
            return [[] for _ in places]
        drafts = self.drafter.propose(rows, counts, SamplingTable())
        assert drafts.source is None
        return [line[:count].tolist() for line, count in zip(drafts.token_ids, counts.tolist(), strict=True)]


@pytest.mark.parametrize("vocabulary", [1, 2, 5, 40, 2**31 - 1])
@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(1, 1), (3, 1), (4, 2), (3, 3)])
def test_drafts_are_what_followed_the_newest_earlier_occurrence(
    vocabulary: int, max_ngram: int, min_ngram: int
) -> None:
    """Requests come and go, get tokens one by one or several at once, and are asked about in any order, or not."""
    config = SpeculativeConfig(num_drafts=5, max_ngram=max_ngram, min_ngram=min_ngram)
    rng, rows, num_drafted = np.random.default_rng(0), Rows(config), 0

    def tokens(count: int) -> list[int]:
        return (rng.integers(0, vocabulary, count) // rng.integers(1, 4)).tolist()

    for step in range(60):
        if step < 4 or rng.random() < 0.2:
            rows.start(tokens(int(rng.integers(1, 60))))
        if len(rows.requests) > 4 and rng.random() < 0.2:
            rows.stop(int(rng.integers(len(rows.requests))))
        asked = rng.permutation(len(rows.requests))[: rng.integers(1, 9)].tolist()
        limits = rng.integers(0, 8, len(asked)).tolist()
        drafts = rows.drafts(asked, limits)
        for place, limit, draft in zip(asked, limits, drafts, strict=True):
            assert draft == looked_up(rows.requests[place].request.token_ids.tolist(), config, limit)
            num_drafted += len(draft)
        for one in rows.requests:
            if one.request.num_tokens < MAX_LEN - 6:
                one.request.append_output_token_ids(tokens(int(rng.integers(0, 6))))
    assert num_drafted > 20 or vocabulary >= 40


def test_a_row_forgets_the_request_that_left_it() -> None:
    rows = Rows(SpeculativeConfig(), num_rows=1)
    rows.start([1, 2, 3, 1, 2])
    assert rows.drafts([0], [4]) == [[3, 1, 2, 3]]
    rows.stop(0)
    rows.start([7, 1, 2])
    assert rows.drafts([0], [4]) == [[]]


def test_drafts_are_at_most_one_more_than_twice_those_that_were_right() -> None:
    rows = Rows(SpeculativeConfig(num_drafts=6, min_ngram=1))
    rows.start([1, 2, 3, 4, 5, 6, 7, 8, 1])
    row, following = rows.requests[0].request.row, [2, 3, 4, 5, 6, 7]
    for num_right, most in ((0, 1), (1, 3), (2, 5), (3, 6), (6, 6), (0, 1)):
        rows.accept(row, num_right)
        assert rows.drafts([0], [9]) == [following[:most]]


def test_a_request_begins_with_one_draft() -> None:
    rows = Rows(SpeculativeConfig(num_drafts=6, min_ngram=1))
    rows.start([1, 2, 3, 1])
    rows.drafter.start(rows.requests[0])
    assert rows.drafts([0], [9]) == [[2]]


def test_asking_twice_answers_twice() -> None:
    rows = Rows(SpeculativeConfig(num_drafts=3))
    rows.start([1, 2, 3, 4, 1, 2])
    assert rows.drafts([0], [9]) == rows.drafts([0], [9]) == [[3, 4, 1]]
    assert rows.drafts([0], [2]) == [[3, 4]]


def test_long_rows_share_slots_and_lose_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains of many n-grams: eight slots for hundreds of them, several new ones at once."""
    monkeypatch.setattr("kvjax.engine.drafts.prompt_lookup.MAX_SLOTS", 8)
    config, rng = SpeculativeConfig(max_ngram=3, min_ngram=2), np.random.default_rng(1)
    rows = Rows(config)
    rows.start(rng.integers(0, 12, 150).tolist())
    for count in rng.integers(1, 7, 70).tolist():  # at most 420 of them, and 150
        rows.requests[0].request.append_output_token_ids(rng.integers(0, 12, count))
        expected = looked_up(rows.requests[0].request.token_ids.tolist(), config, 4)
        assert rows.drafts([0], [4]) == [expected]
