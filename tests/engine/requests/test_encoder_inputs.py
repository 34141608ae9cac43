"""Encoder features through the engine: every request's tokens are those of its own input, in every mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.device import count_compilations
from kvjax.engine import SamplingParams
from tests.engine.front.test_llm_engine import make_engine as make_text_engine
from tests.engine.requests.input_engines import (
    MODES,
    OTHER_SETTINGS,
    InputRequest,
    add,
    assert_all_greedy,
    distinct_outputs,
    make_engine,
    random_tokens,
    run,
)

KIND = "encoder"
SHARED = random_tokens(0, 13)


def features_of(seed: int, rows: int = 14) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 5)).astype(np.float32)


def request_of(prompt: list[int], features: np.ndarray) -> InputRequest:
    return InputRequest(prompt, {"encoder_features": features}, {"features": features})


def requests_of_two_lengths() -> list[InputRequest]:
    """Of which several share their prompt, some with their input."""
    audios = [features_of(0), features_of(1), features_of(2, rows=6)]
    return [request_of(SHARED[:9] + random_tokens(i, i % 3 + 1), audios[i % 3]) for i in range(7)]


@pytest.mark.parametrize("settings", MODES)
def test_every_mode_gives_the_tokens_of_the_whole_sequence(settings: dict[str, Any]) -> None:
    engine = make_engine(KIND, **settings)
    requests = requests_of_two_lengths()
    for _ in range(2):
        results = run(engine, add(engine, requests, max_tokens=14))
        assert_all_greedy(KIND, requests, results)
    num_preemptions = sum(result.stats.num_preemptions for result in results)
    assert (num_preemptions > 0) == (settings["max_num_seqs"] == 4)
    hits = [result.stats.num_cached_tokens or 0 for result in results]
    assert (sum(hits) > 0) == settings["enable_prefix_caching"]


@pytest.mark.parametrize("settings", OTHER_SETTINGS)
def test_other_settings_change_no_token(settings: dict[str, Any]) -> None:
    engine, requests = make_engine(KIND, async_scheduling=True, **settings), requests_of_two_lengths()
    for _ in range(2):
        assert_all_greedy(KIND, requests, run(engine, add(engine, requests, max_tokens=14)))


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_samples_share_the_encoders_blocks(async_scheduling: bool) -> None:
    engine = make_engine(KIND, async_scheduling=async_scheduling)
    requests = requests_of_two_lengths()[:2]
    results = run(engine, add(engine, requests, n=3))
    assert_all_greedy(KIND, requests, results, n=3)
    assert sum(result.stats.num_shared_tokens > 0 for result in results) >= 2


def test_prefixes_are_shared_by_equal_inputs_only() -> None:
    """What the self-attention layers cache depends on the input, whose blocks nobody shares."""
    engine = make_engine(KIND)
    cached = []
    for seed in (0, 0, 1, 0):
        request = request_of(SHARED, features_of(seed))
        [result] = run(engine, add(engine, [request]))
        assert_all_greedy(KIND, [request], [result])
        cached.append(result.stats.num_cached_tokens)
    assert cached == [0, 12, 0, 12]


def test_the_input_decides_the_tokens() -> None:
    engine = make_engine(KIND)
    assert distinct_outputs(run(engine, add(engine, [request_of(SHARED, features_of(i)) for i in range(4)]))) == 4


def test_features_are_copied() -> None:
    engine, features = make_engine(KIND), features_of(0)
    request = request_of(SHARED, features.copy())
    ids = [engine.add_request(SHARED, SamplingParams(max_tokens=4, temperature=0.0), encoder_features=features)]
    features[:] = 0
    assert_all_greedy(KIND, [request], run(engine, ids))


def test_an_abort_before_and_after_the_encoder_ran_frees_everything() -> None:
    for num_steps in range(4):
        engine = make_engine(KIND, async_scheduling=True)
        ids = add(engine, requests_of_two_lengths())
        for _ in range(num_steps):
            engine.step()
        for request_id in ids:
            engine.abort(request_id)
        run(engine, [])


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (None, r"expected encoder_features of shape \[6, 5\] or \[14, 5\], got none: the model reads an encoder"),
        (features_of(0, rows=16), r"of shape \[6, 5\] or \[14, 5\], got \[16, 5\]"),
        (features_of(0)[None], r"of shape \[6, 5\] or \[14, 5\], got \[1, 14, 5\]"),
    ],
)
def test_bad_features_are_refused(features: np.ndarray | None, message: str) -> None:
    engine = make_engine(KIND)
    for call in (engine.add_request, engine.check_request):
        with pytest.raises(ValueError, match=message):
            call(SHARED, encoder_features=features)
    assert engine.num_unfinished == 0
    assert add(engine, [request_of(SHARED, features_of(0))]) == ["request-0"]


def test_models_without_an_encoder_take_no_features() -> None:
    with pytest.raises(ValueError, match="expected no encoder_features: the model reads no encoder"):
        make_text_engine("qwen3").add_request([1, 2], encoder_features=features_of(0))


def test_nothing_compiles_after_warm_up() -> None:
    engine = make_engine(KIND)
    engine.warmup()
    with count_compilations() as count:
        results = run(engine, add(engine, requests_of_two_lengths()))
    assert count.num_programs == 0
    assert_all_greedy(KIND, requests_of_two_lengths(), results)
