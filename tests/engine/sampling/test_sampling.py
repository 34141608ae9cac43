"""Laws of sampling: greedy takes the best, draws follow the distribution, keys depend on seed and position alone."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.sampling.sampler import first_best, sample
from kvjax.engine.sampling.sampling_table import SamplingBatch, SamplingTable

VOCAB = 12
SIZE = 16
sample_jit = jax.jit(sample)


def run(logits: np.ndarray, params: list[SamplingParams], positions: list[int]) -> np.ndarray:
    """Tokens of `logits[n]` in a batch padded to SIZE lines."""
    table = SamplingTable(num_rows=2)
    for row, each in enumerate(params):
        table.set(row, each, each.seed or 0)
    padded = np.zeros((SIZE, logits.shape[1]), np.float32)
    padded[: len(params)] = logits
    batch = table.batch(np.arange(len(params)), np.asarray(positions))
    batch = SamplingBatch(*(np.pad(column, (0, SIZE - len(params))) for column in batch))
    return np.asarray(sample_jit(padded, batch).token_ids)[: len(params)]


def draws(logits: np.ndarray, count: int, **kwargs: float) -> np.ndarray:
    """Tokens drawn from one distribution at `count` positions."""
    params = SamplingParams(seed=7, **kwargs)  # type: ignore[arg-type]
    tokens = [run(np.tile(logits, (SIZE, 1)), [params] * SIZE, list(range(i, i + SIZE))) for i in range(0, count, SIZE)]
    return np.concatenate(tokens)


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(0).normal(size=VOCAB).astype(np.float32)


def test_temperature_zero_takes_the_best(logits: np.ndarray) -> None:
    assert set(draws(logits, 32, temperature=0.0).tolist()) == {int(logits.argmax())}


def test_the_best_token_is_the_smallest_id_of_the_largest_scores() -> None:
    scores = np.random.default_rng(0).integers(-2, 3, (50, 40)).astype(np.float32)
    scores[0], scores[1, :-1], scores[2, :5] = -np.inf, -np.inf, -np.inf
    assert first_best(scores).tolist() == np.argmax(scores, axis=-1).tolist()


def test_top_k_of_one_takes_the_best(logits: np.ndarray) -> None:
    assert set(draws(logits, 64, temperature=5.0, top_k=1).tolist()) == {int(logits.argmax())}


def test_a_tiny_top_p_takes_the_best(logits: np.ndarray) -> None:
    assert set(draws(logits, 64, temperature=5.0, top_p=1e-6).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize("top_k", [2, 5])
def test_top_k_keeps_the_k_best(logits: np.ndarray, top_k: int) -> None:
    assert set(draws(logits, 512, temperature=5.0, top_k=top_k).tolist()) == set(np.argsort(-logits)[:top_k].tolist())


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = np.array([0.4, 0.3, 0.2, 0.06, 0.04], np.float32)
    assert set(draws(np.log(probabilities), 512, top_p=0.65).tolist()) == {0, 1}
    assert set(draws(np.log(probabilities), 512, top_p=0.75).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(logits: np.ndarray, temperature: float) -> None:
    count = 8192
    expected = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    seen = np.bincount(draws(logits, count, temperature=temperature), minlength=VOCAB) / count
    np.testing.assert_allclose(seen, expected, atol=5 * np.sqrt(0.25 / count))


def test_a_token_depends_on_seed_and_position_alone(logits: np.ndarray) -> None:
    params = [SamplingParams(seed=s, temperature=2.0) for s in (1, 2, 3, 4)]
    rng = np.random.default_rng(1)
    alone = [run(logits[None], [each], [p]) for p, each in zip((9, 9, 11, 12), params, strict=True)]
    others = rng.normal(size=(2, VOCAB))
    mixed = run(
        np.vstack([others[:1], np.tile(logits, (4, 1)), others[1:]]),
        [SamplingParams(temperature=0.0), *params, SamplingParams(top_p=0.5)],
        [0, 9, 9, 11, 12, 5],
    )
    assert mixed[1:5].tolist() == np.concatenate(alone).tolist()


def test_seeds_and_positions_give_different_draws(logits: np.ndarray) -> None:
    flat = np.zeros((SIZE, 4096), np.float32)
    by_seed = run(flat, [SamplingParams(seed=s) for s in range(SIZE)], [0] * SIZE)
    by_position = run(flat, [SamplingParams(seed=0)] * SIZE, list(range(SIZE)))
    assert len(set(by_seed.tolist())) > SIZE - 3
    assert len(set(by_position.tolist())) > SIZE - 3


def test_log_probabilities_are_the_models(logits: np.ndarray) -> None:
    table = SamplingTable()
    table.set(0, SamplingParams(temperature=3.0, top_k=2), 5)
    sampled = sample_jit(logits[None], table.batch(np.arange(1), np.zeros(1)))
    expected = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(sampled.logprobs[0], expected[int(sampled.token_ids[0])], rtol=1e-5)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_tokens": 0}, "max_tokens >= 1, got 0"),
        ({"temperature": -0.1}, "temperature >= 0 .* got -0.1"),
        ({"temperature": float("nan")}, "finite temperature"),
        ({"top_p": 0.0}, r"top_p in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, "got 1.5"),
        ({"top_k": -1}, "top_k >= 0 .* got -1"),
        ({"seed": -1}, r"in \[0, 4294967295\], got -1"),
    ],
)
def test_values_out_of_range_are_refused(kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**kwargs)  # type: ignore[arg-type]


def test_lines_are_those_of_the_newest_requests_whichever_array_of_rows_asks() -> None:
    """The model: parameters in a dict by row. A step asks with the array of the step before, or an equal one."""
    rng, table, model = np.random.default_rng(0), SamplingTable(num_rows=4), {}
    rows = np.arange(3)
    for step in range(60):
        if step < 3 or rng.random() < 0.4:
            row = step if step < 3 else int(rng.integers(3))
            params = SamplingParams(temperature=float(rng.random()), top_k=int(rng.integers(9)))
            table.set(row, params, seed=step)
            model[row] = (params, step)
        if step < 3:
            continue
        rows = rng.permutation(3) if rng.random() < 0.4 else rows.copy() if rng.random() < 0.4 else rows
        batch = table.batch(rows, np.arange(3) + step)
        wanted = [model[row] for row in rows.tolist()]
        assert batch.seed.tolist() == [seed for _, seed in wanted]
        assert batch.top_k.tolist() == [params.top_k for params, _ in wanted]
        np.testing.assert_array_equal(batch.temperature, np.array([p.temperature for p, _ in wanted], np.float32))
        assert batch.position.tolist() == [step, step + 1, step + 2]
