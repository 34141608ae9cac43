"""Laws of what requests change in their logits: the sampler gives what a naive one gives, row by row."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from kvjax.core import Request
from kvjax.device import Placement
from kvjax.engine import SamplingParams
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.sampling.sampler import sample
from kvjax.engine.sampling.sampler_lines import SamplerLines, SamplerSizes, SamplerWrites, TokenWrites
from kvjax.engine.sampling.sampler_state import TOKEN_COLUMNS, SamplerState
from kvjax.engine.sampling.sampling_table import SamplingBatch
from tests.engine.sampling.naive_sampler import chosen, edited

VOCAB = 45  # no multiple of 32
SIZES = SamplerSizes(num_lines=9, num_tokens=2 * TOKEN_COLUMNS - 5, vocab_size=VOCAB)
STOP = (3, 7)
sample_jit = jax.jit(sample)

PARAMS: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": 2.0},
    {"logit_bias": {0: 4.0, 44: -3.5, 7: 100.0}},
    {"bad_token_ids": (1, 2, 44)},
    {"allowed_token_ids": (0, 31, 32, 44)},
    {"allowed_token_ids": (0, 31, 32, 44), "bad_token_ids": (0,), "logit_bias": {31: -5.0}, "presence_penalty": 1.0},
    {"min_tokens": 30, "max_tokens": 40},
    {"min_p": 0.3},
    {"min_p": 0.05, "top_p": 0.8, "top_k": 9, "frequency_penalty": 0.4},
]


def request_of(name: str, params: SamplingParams, prompt: list[int]) -> EngineRequest:
    return EngineRequest(
        request=Request(name, prompt),
        params=params,
        seed=0,
        stop_token_ids=frozenset(STOP),
        arrival=0,
        stats=RequestStats(name, len(prompt), 0.0),
        status=RequestStatus.RUNNING,
    )


def sampled(
    logits: np.ndarray,  # float32[N, V]
    params: list[SamplingParams],
    prompts: list[list[int]],
    outputs: list[list[int]],
) -> np.ndarray:
    """Tokens of N requests that the sampler's state knows, with other lines and stale tokens around them."""
    lines, state, places = SamplerLines(SIZES), SamplerState(SIZES, Placement.create()), []
    rng = np.random.default_rng(7)
    count = SIZES.num_lines * SIZES.num_tokens
    every = np.divmod(np.arange(count), SIZES.num_tokens)
    stale = [*every, rng.integers(0, VOCAB, count), np.full(count, -1)]
    state.write(SamplerWrites((), (), TokenWrites(*(column.astype(np.int32) for column in stale))), np.zeros(1, "i4"))
    for i, (one, prompt, output) in enumerate(zip(params, prompts, outputs, strict=True)):
        line = lines.start(request_of(str(i), one, prompt))
        places.append(line)
        tokens = np.array(prompt + output, np.int32)
        columns = (np.full(tokens.size, line), np.arange(tokens.size), tokens, np.full(tokens.size, -1))
        written = TokenWrites(*(column.astype(np.int32) for column in columns)) if line else None
        pending, lines._pending = lines._pending, type(lines._pending)()
        state.write(SamplerWrites(tuple(pending.lines), tuple(pending.masks), written), np.zeros(1, np.int32))
    batch = SamplingBatch(
        temperature=np.array([one.temperature for one in params], np.float32),
        top_p=np.array([one.top_p for one in params], np.float32),
        top_k=np.array([one.top_k for one in params], np.int32),
        seed=np.array([one.seed for one in params], np.uint32),
        position=np.array([len(p) + len(o) for p, o in zip(prompts, outputs, strict=True)], np.int32),
        line=np.array(places, np.int32),
    )
    return np.asarray(sample_jit(logits, batch, state.arrays).token_ids)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("seed", range(6))
def test_every_row_gets_what_a_naive_sampler_gives(seed: int, temperature: float) -> None:
    rng = np.random.default_rng(seed)
    kinds = rng.permutation(len(PARAMS))[:8]
    params = [SamplingParams(seed=int(rng.integers(99)), temperature=temperature, **PARAMS[kind]) for kind in kinds]
    lengths = rng.integers(1, TOKEN_COLUMNS, (2, 8)) // rng.choice([1, 20], (2, 8)) + 1
    lengths[1] = np.minimum(lengths[1], SIZES.num_tokens - lengths[0])
    prompts, outputs = [[rng.integers(0, VOCAB, n).tolist() for n in row] for row in lengths]
    logits = rng.normal(scale=2, size=(8, VOCAB)).astype(np.float32)
    tokens = sampled(logits, params, prompts, outputs)
    for i, one in enumerate(params):
        expected = edited(logits[i], one, prompts[i], outputs[i], STOP)
        place = len(prompts[i]) + len(outputs[i])
        assert tokens[i] == chosen(expected, one, one.seed or 0, place), (one, place)


@pytest.mark.parametrize("kind", range(1, len(PARAMS)))
def test_each_parameter_changes_what_is_chosen(kind: int) -> None:
    """Otherwise the test above could not fail."""
    rng = np.random.default_rng(kind)
    prompt, output = rng.integers(0, VOCAB, (2, 20)).tolist()
    plain, asked = SamplingParams(seed=0), SamplingParams(seed=0, **PARAMS[kind])
    logits = rng.normal(size=(64, VOCAB)).astype(np.float32)
    differ = 0
    for i in range(0, 64, 4):
        pair = [plain, asked] * 4
        tokens = sampled(np.repeat(logits[i : i + 4], 2, axis=0), pair, [prompt] * 8, [output] * 8)
        differ += int((tokens[::2] != tokens[1::2]).sum())
    assert differ > 0


def test_drawn_tokens_follow_min_p() -> None:
    """Of probabilities 0.5, 0.3, 0.15 and 0.05, min_p 0.29 keeps those of at least 0.145."""
    logits = np.full((8, VOCAB), -np.inf, np.float32)
    logits[:, :4] = np.log([0.5, 0.3, 0.15, 0.05])
    params = [SamplingParams(seed=i, min_p=0.29) for i in range(8)]
    seen = [sampled(logits, params, [[1] * (1 + k)] * 8, [[]] * 8) for k in range(40)]
    assert set(np.concatenate(seen).tolist()) == {0, 1, 2}


def test_lines_are_taken_again_when_their_requests_have_stopped() -> None:
    lines = SamplerLines(SIZES)
    requests = [request_of(str(i), SamplingParams(min_p=0.5), [1]) for i in range(20)]
    taken = []
    for request in requests:
        taken.append(lines.start(request))
        request.status = RequestStatus.FINISHED
    assert set(taken) == set(range(1, SIZES.num_lines))
    assert lines.start(request_of("plain", SamplingParams(), [1])) == 0
