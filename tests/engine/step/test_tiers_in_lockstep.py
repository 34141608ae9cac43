"""Two engines as two processes would have them, whose threads and disks have other luck: they plan the same steps.

Each has all of the pages, and a `CommonPace`; what a thread does takes other times in each, and fails in one of them.
Time is that of the engine's steps, a second each. A request gives way while it loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvjax.core import BlockHasher
from kvjax.device import KVPages
from kvjax.engine import LLMEngine
from kvjax.engine.scheduling.scheduler import Scheduler
from kvjax.engine.step.agreement import describe
from kvjax.engine.step.host_loop import HostStep
from kvjax.engine.step.rank_loops import RankSteps
from kvjax.tiers.config import TierConfig
from kvjax.tiers.connector import RankConnector
from kvjax.tiers.processes.common_index import CommonIndex
from kvjax.tiers.processes.common_pace import CommonPace
from kvjax.tiers.processes.process_tiers import HomeSchedulers, HomeWorkers
from kvjax.tiers.processes.reports import Reports
from kvjax.tiers.tiers import Tiers, TierShare
from kvjax.tiers.units import TierMeta
from tests.engine.engines import assert_no_leak
from tests.engine.step.test_tiers import GREEDY, compiled, config_of
from tests.models.golden_models import goldens_of
from tests.tiers.processes.fake_board import FakeBoard

TIMEOUT_S = 6.0  # what takes longer has failed


class Call(Future[Any]):
    """What a thread would do; it is done when it is due, or when somebody needs its result before."""

    def __init__(self, due_s: float, function: Callable[[], Any]) -> None:
        super().__init__()
        self.due_s = due_s
        self._function = function

    def run(self) -> None:
        if not self.done():
            try:
                self.set_result(self._function())
            except Exception as error:
                self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.run()
        return super().result(timeout)


class LuckyThreads:
    """In place of a worker's threads: calls end sooner or later, well or not, in any order, while time passes.

    `fault_rate` of them fail, a quarter of these after they hung.
    """

    def __init__(self, seed: Sequence[int], fault_rate: float) -> None:
        self.now_s = 0.0
        self._rng = np.random.default_rng(seed)
        self._fault_rate = fault_rate
        self._calls: list[Call] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Call:
        seconds, luck = self._rng.uniform(0.0, TIMEOUT_S), self._rng.random()
        if luck > 1 - self._fault_rate / 4:
            seconds = 2 * TIMEOUT_S
        call = Call(self.now_s + seconds, lambda: fail() if luck < self._fault_rate else function(*args))
        self._calls.append(call)
        return call

    def pass_time(self) -> None:
        self.now_s += 1.0
        for call in sorted(self._calls, key=lambda call: call.due_s):
            if call.due_s <= self.now_s:
                call.run()
        self._calls = [call for call in self._calls if not call.done()]


def fail() -> None:
    raise OSError("planted")


class Connector:
    """A `KVConnector` as of one process of several, of which each has all of the pages."""

    def __init__(self, config: TierConfig, board: FakeBoard, threads: LuckyThreads) -> None:
        plan = compiled("gemma3").plan
        hasher = BlockHasher(8, compiled("gemma3").config.hash_algorithm, seed="0")
        share = TierShare.whole(config, plan.config, hasher)
        self.threads = threads
        self.reports = Reports(
            board, timeout_s=TIMEOUT_S, tells_losses=share.disk is not None, clock=lambda: threads.now_s
        )
        index = None
        if share.disk is not None and config.disk_bytes is not None:
            index = CommonIndex(config.disk_bytes, share.sizes.bytes_of_group)
        pace = CommonPace(self.reports, index)
        self.tiers = Tiers(config, dataclasses.replace(share, index=index, pace=pace, load_timeout_s=1e9))
        self.tiers.worker._threads.shutdown()
        self.tiers.worker._threads = threads  # type: ignore[assignment]
        self.tiers.worker.wait = threads.pass_time  # type: ignore[method-assign]
        self.worker = HomeWorkers([self.tiers], self.reports)
        self.scheduler = HomeSchedulers([self.tiers])

    def of_rank(self, rank: int) -> RankConnector:
        return self.tiers.of_rank(rank)

    def save_all(self, pages: KVPages) -> KVPages:
        return self.tiers.save_all(pages)

    def reset(self, *, forget: bool = True) -> None:
        self.tiers.reset(forget=forget)

    def close(self) -> None:
        self.tiers.close()


class Steps:
    """In place of an `Agreement`: what was planned."""

    def __init__(self) -> None:
        self.log: list[Any] = []

    def note_transfers(self, metadata: Sequence[TierMeta]) -> None:
        self.log.append([one.digest() for one in metadata])

    def note(self, step: HostStep | RankSteps) -> None:
        self.log.append(describe(step))


def make_engine(board: FakeBoard, tiers: TierConfig, seed: int, fault_rate: float) -> tuple[LLMEngine, Connector]:
    like = compiled("gemma3")
    connector = Connector(tiers, board, LuckyThreads((seed, board.index), fault_rate))
    return LLMEngine(like.model, config_of("gemma3"), like=like, connector=connector), connector


@pytest.mark.parametrize(
    ("seed", "host_bytes", "fault_rate", "has_disk"),
    [
        (1, 1 << 20, 0.15, True),
        pytest.param(0, 1 << 24, 0.0, False, marks=pytest.mark.sweep),
        *[
            pytest.param(seed, (0, 1 << 18, 1 << 22)[seed % 3], 0.2 * (seed % 2), True, marks=pytest.mark.sweep)
            for seed in range(2, 14)
        ],
    ],
)
def test_engines_of_other_luck_plan_the_same_steps(
    seed: int, host_bytes: int, fault_rate: float, has_disk: bool, tmp_path: Path
) -> None:
    folders = [tmp_path / str(i) for i in range(2)]
    common = {"host_bytes": host_bytes, "write_through": bool(seed % 2)}
    disks = [{"disk_folder": str(one), "disk_bytes": 1 << 21, "weights": "g"} if has_disk else {} for one in folders]
    pairs = [
        make_engine(board, TierConfig(**common, **disk), seed, fault_rate)
        for board, disk in zip(FakeBoard.of(2), disks, strict=True)
    ]
    engines, logs = [engine for engine, _ in pairs], [Steps(), Steps()]
    for engine, log in zip(engines, logs, strict=True):
        engine._core._agreement = log  # type: ignore[assignment]
    goldens = goldens_of("gemma3")
    order = np.random.default_rng(seed).integers(len(goldens), size=12)
    expected = {f"r{i}": goldens[choice].greedy[: GREEDY.max_tokens].tolist() for i, choice in enumerate(order)}
    for engine in engines:
        for i, choice in enumerate(order):
            engine.add_request(goldens[choice].prompt, GREEDY, request_id=f"r{i}", priority=i % 3)
    found: list[dict[str, list[int]]] = [{}, {}]
    num_cancelled = [0, 0]
    while any(engine.has_work or connector.tiers.scheduler.num_loads for engine, connector in pairs):
        for rank, ((engine, connector), own) in enumerate(zip(pairs, found, strict=True)):
            connector.threads.pass_time()
            scheduler = engine._core.loop.scheduler
            assert isinstance(scheduler, Scheduler)
            if (before := scheduler.num_loading) and not num_cancelled[rank]:
                scheduler.preempt_last()
                num_cancelled[rank] = before - scheduler.num_loading
            own |= {one.request_id: one.output_token_ids.tolist() for one in engine.step().results.values()}
    assert found == [expected, expected]
    assert num_cancelled == [1, 1]
    assert logs[0].log == logs[1].log
    for engine, connector in pairs:
        assert_no_leak(engine)
        connector.tiers.flush()
        connector.scheduler.check_invariants()
        assert connector.tiers.host.num_held == 0
    first, second = (connector.tiers for _, connector in pairs)
    assert first.host.keys() == second.host.keys()
    stats = first.stats
    assert stats.num_host_loads + stats.num_disk_loads > 0
    assert (stats.num_load_failures > 0) == (fault_rate > 0)
