"""Processes with other settings or other plans stop with a report; alike ones go on."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.step.step_plan import IdleStateMoves
from kvjax.device.mesh import processes
from kvjax.engine import EngineConfig
from kvjax.engine.step.agreement import Agreement, describe, settings_of
from kvjax.engine.step.sampled_step import SampledStep
from kvjax.errors import DivergenceError
from kvjax.models.config import ModelConfig
from tests.engine.fake_model import FakeEngine
from tests.models.golden_models import model_folder

CONFIG = EngineConfig(num_blocks=10)


class Meeting:
    """Boards of two processes, each a thread."""

    def __init__(self) -> None:
        self.barrier, self.texts = threading.Barrier(2, timeout=30), ["", ""]

    def board(self, index: int) -> Any:
        meeting = self

        class Board:
            def __init__(self) -> None:
                self.index = index

            def exchange(self, topic: str, text: str) -> list[str]:
                meeting.texts[index] = f"{topic}\n{text}"
                meeting.barrier.wait()
                both = [text.split("\n", 1) for text in meeting.texts]
                meeting.barrier.wait()
                assert both[0][0] == both[1][0]
                return [text for _, text in both]

        return Board()


def in_both(run: Any) -> list[Any]:
    """What `run(agreement board, process)` gives or raises, in two threads."""
    meeting, results = Meeting(), [None, None]

    def one(index: int) -> None:
        try:
            results[index] = run(meeting.board(index), index)
        except (ValueError, DivergenceError) as error:
            results[index] = error

    threads = [threading.Thread(target=one, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def fives(num_rows: int) -> SampledStep:
    return SampledStep(np.full(num_rows, 5, np.int32), np.zeros(num_rows, np.float32))


def engine_of(prompts: list[list[int]]) -> FakeEngine:
    engine = FakeEngine()
    for i, prompt in enumerate(prompts):
        engine.add(f"r{i}", prompt, 9)
    return engine


def test_the_same_requests_have_the_same_steps() -> None:
    prompts = [[1, 2, 3, 4, 5], [7, 8]]

    def run(board: Any, index: int) -> int:
        agreement, engine = Agreement(board, 3), engine_of(prompts)
        for _ in range(9):
            step = engine.loop.begin_step()
            if step is None:
                break
            agreement.note(step)
            num_rows = step.plan.logits_indices.size
            engine.loop.end_step(step, fives(num_rows))
        return agreement._num_steps

    assert in_both(run) == [9, 9]


@pytest.mark.parametrize("at", [1, 4, 6])
def test_another_token_stops_all_processes_at_the_next_comparison(at: int) -> None:
    """The report names the first step that differs, and no further step is noted."""

    def run(board: Any, index: int) -> None:
        agreement, engine = Agreement(board, 3), engine_of([[1, 2, 3]])
        for number in range(1, 10):
            step = engine.loop.begin_step()
            assert step is not None
            if number == at:
                step.plan.token_ids[0] += index
            try:
                agreement.note(step)
            except DivergenceError:
                with pytest.raises(DivergenceError, match=f"from step {at} on"):
                    agreement.note(step)
                assert number == -(-at // 3) * 3
                raise
            engine.loop.end_step(step, fives(1))

    for error in in_both(run):
        assert isinstance(error, DivergenceError)
        assert f"processes planned other steps from step {at} on: process 0: " in str(error)


def test_what_a_step_samples_is_compared_too() -> None:
    step = engine_of([[1, 2, 3]]).loop.begin_step()
    assert step is not None
    hotter = step.sampling._replace(temperature=step.sampling.temperature + 1)
    assert describe(step) == describe(replace(step))
    assert describe(step) != describe(replace(step, sampling=hotter))
    assert describe(step).endswith("(1 requests, 3 tokens)")


def test_states_that_change_pools_are_compared_too() -> None:
    step = engine_of([[1, 2, 3]]).loop.begin_step()
    assert step is not None
    pages = [np.array([page], np.int32) for page in (1, 2, 3)]
    moves = [IdleStateMoves(0, 1, PageCopies(pages[0], page), PageCopies(pages[0], pages[0])) for page in pages[1:]]
    told = [describe(replace(step, plan=replace(step.plan, idle_states=(one,)))) for one in (moves[0], *moves)]
    assert told[0] == told[1] != told[2] != describe(step)


def test_other_settings_are_refused() -> None:
    model, mesh = ModelConfig.from_folder(model_folder("llama")), jax.make_mesh((1,), ("tensor",))

    def run(board: Any, index: int) -> None:
        settings = settings_of(replace(CONFIG, max_num_seqs=4 * (1 + index)), model, mesh)
        Agreement(board, 1).check_settings(settings)

    message = "expected the same settings on all processes, got on process 1 max_num_seqs=8 (process 0: max_num_seqs=4)"
    assert [str(error) for error in in_both(run)] == [message] * 2


def test_the_environment_says_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in processes.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not processes.join_processes()
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    with pytest.raises(ValueError, match="got no JAX_COORDINATOR_ADDRESS, JAX_PROCESS_ID"):
        processes.join_processes()
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_PROCESS_ID", "2")
    with pytest.raises(ValueError, match="expected JAX_PROCESS_ID below JAX_NUM_PROCESSES, got 2 and 2"):
        processes.join_processes()


def test_a_process_alone_has_no_board() -> None:
    with pytest.raises(ValueError, match="expected processes that have joined"):
        processes.ProcessBoard(1.0)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("inf"), float("nan")])
def test_processes_wait_for_each_other_for_a_time(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="expected a finite process_timeout_s > 0, got "):
        replace(CONFIG, process_timeout_s=timeout_s)
