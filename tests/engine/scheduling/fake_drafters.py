"""Drafters that know what the fake model will say, and tell it, or something else. They watch how they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvjax.core import KVCacheManager
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.sampling.sampling_table import SamplingTable
from kvjax.engine.scheduling.speculation import Drafts
from tests.engine.fake_model import MAX_ROWS, VOCAB

NEVER_SAMPLED = VOCAB
Say = Callable[[list[int], np.random.Generator], list[int]]  # the right drafts -> those that are told


def all_right(truth: list[int], rng: np.random.Generator) -> list[int]:
    return truth


def all_wrong(truth: list[int], rng: np.random.Generator) -> list[int]:
    return [NEVER_SAMPLED] * len(truth)


def some_right(truth: list[int], rng: np.random.Generator) -> list[int]:
    """Any number of drafts, of which each is right or wrong."""
    told = truth[: rng.integers(0, len(truth) + 1)]
    return [token if rng.random() < 0.7 else NEVER_SAMPLED for token in told]


class FakeDrafter:
    """Tells drafts that `say` makes of the fake model's own next tokens, by host or, `on_device`, by sources."""

    def __init__(
        self,
        manager: KVCacheManager,
        say: Say,
        num_drafts: int,
        expected: Callable[[list[int], int], list[int]],
        *,
        on_device: bool = False,
        seed: int = 0,
    ) -> None:
        self._manager = manager
        self._say = say
        self._num_drafts = num_drafts
        self._expected = expected
        self._on_device = on_device
        self._rng = np.random.default_rng(seed)
        self._running: dict[int, EngineRequest] = {}
        self._told: dict[int, list[int]] = {}  # by row, since `count`
        self._unsettled: dict[EngineRequest, int] = {}
        self._on_its_way: Sequence[int] = ()
        self.num_settled = self.num_accepted = 0

    def start(self, request: EngineRequest) -> None:
        assert request.status is RequestStatus.RUNNING
        assert request.request.row not in self._running
        self._running[request.request.row] = request

    def stop(self, request: EngineRequest) -> None:
        assert self._running.pop(request.request.row) is request
        self._unsettled.pop(request, None)

    def count(self, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:
        self._told = {}
        for row, limit in zip(rows.tolist(), limits.tolist(), strict=True):
            request = self._running[row].request
            assert self._running[row] not in self._unsettled, "a request in two steps with drafts"
            assert request.num_tokens == request.num_computed_tokens + 1
            assert request.num_output_tokens
            assert 1 <= limit <= self._num_drafts
            truth = self._expected(request.token_ids.tolist(), limit)
            self._told[row] = self._say(truth, self._rng)
        return np.array([len(self._told[row]) for row in rows.tolist()], np.int64)

    def propose(self, rows: np.ndarray, counts: np.ndarray, sampling: SamplingTable) -> Drafts:
        assert counts.any()
        drafts = np.full((rows.size, int(counts.max())), -7, np.int32)
        for i, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
            if count:
                drafts[i, :count] = self._told[row][:count]
                assert len(self._told[row]) >= count
                self._unsettled[self._running[row]] = count
        if not self._on_device:
            return Drafts(drafts)
        self._on_its_way = drafts.reshape(-1)
        return Drafts(np.full_like(drafts, -9), MAX_ROWS + np.arange(drafts.size, dtype=np.int32).reshape(drafts.shape))

    def settle(self, rows: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        assert rows.size
        for row, count, accepted in zip(rows.tolist(), num_drafts.tolist(), num_accepted.tolist(), strict=True):
            assert self._unsettled.pop(self._running[row]) == count
            assert 0 <= accepted <= count
            request = self._running[row].request
            assert request.num_tokens == request.num_computed_tokens + 1
            self.num_settled += count
            self.num_accepted += accepted

    @property
    def device_tokens(self) -> np.ndarray | None:
        return np.array(self._on_its_way, np.int32) if self._on_device else None
