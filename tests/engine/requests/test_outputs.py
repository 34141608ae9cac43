"""Outputs of a step: columns, and a sequence of single outputs that says the same."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.engine.requests.outputs import NO_OUTPUTS, StepOutputs, TokenOutput
from tests.engine.fake_model import FakeEngine


def test_a_step_is_a_sequence_of_outputs_and_their_columns() -> None:
    columns = (np.array(["a", "b", "c"], np.object_), np.array([5, 6, 7], np.int32), np.array([-1.5, -2, -0.25], "f4"))
    outputs = StepOutputs(*columns, results={})
    expected = [TokenOutput("a", 5, -1.5, None), TokenOutput("b", 6, -2.0, None), TokenOutput("c", 7, -0.25, None)]
    assert list(outputs) == expected
    assert [outputs[i] for i in range(3)] == expected
    assert [outputs[i] for i in range(-3, 0)] == expected
    assert outputs[1:] == expected[1:]
    assert len(outputs) == 3
    assert all(
        type(value) in (str, int, float) for one in outputs for value in (one.request_id, one.token_id, one.logprob)
    )
    with pytest.raises(IndexError):
        outputs[3]
    assert list(NO_OUTPUTS) == []


@pytest.mark.parametrize("depth", [1, 2])
def test_the_last_token_of_a_request_brings_its_result(depth: int) -> None:
    engine = FakeEngine(depth=depth)
    for i in range(4):
        engine.add(f"r{i}", [i, 7], 2 + i % 2)
    ended = []
    for _ in range(8):
        outputs = engine.step()
        ended += [(one.request_id, one.result) for one in outputs if one.result is not None]
        assert [result.request_id for result in outputs.results.values()] == [
            one.request_id for one in outputs if one.result is not None
        ]
    assert sorted(name for name, _ in ended) == ["r0", "r1", "r2", "r3"]
    for name, result in ended:
        assert result.request_id == name
        assert result.output_token_ids.tolist() == engine.outputs[name]
        assert result.stats.num_output_tokens == len(engine.outputs[name]) == 2 + int(name[1]) % 2
        assert result.stats.first_token_time_s <= result.stats.finish_time_s
