"""Vectors for placeholder tokens through the engine, with positions on one axis and on three, in every mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.device import count_compilations
from kvjax.engine import EngineConfig, LLMEngine, MultimodalInput, SamplingParams
from tests.device.toy_inputs import EMBED_DIM, PLACEHOLDER
from tests.engine.front.test_llm_engine import make_engine as make_text_engine
from tests.engine.requests.input_engines import (
    MODES,
    OTHER_SETTINGS,
    InputRequest,
    add,
    assert_all_greedy,
    base_config,
    distinct_outputs,
    make_engine,
    model_of,
    random_tokens,
    run,
)

KINDS = ("vectors", "mrope")


def vectors(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, EMBED_DIM)).astype(np.float32)


def grid_positions(prompt: list[int], width: int = 3) -> np.ndarray:  # int32[3, len(prompt)]
    """Placeholders in a row are an image of so many columns; text goes on behind the largest position before it."""
    positions = np.zeros((3, len(prompt)), np.int64)
    following, place = 0, 0
    while place < len(prompt):
        count = 1
        while prompt[place] == PLACEHOLDER and place + count < len(prompt) and prompt[place + count] == PLACEHOLDER:
            count += 1
        if prompt[place] == PLACEHOLDER:
            index = np.arange(count)
            positions[:, place : place + count] = following + np.stack([index * 0, index // width, index % width])
        else:
            positions[:, place] = following
        following = positions[:, : place + count].max() + 1
        place += count
    return positions


def request_of(kind: str, parts: list[list[int] | np.ndarray], width: int = 3) -> InputRequest:
    """A prompt of tokens and images, in turn."""
    images = [part for part in parts if isinstance(part, np.ndarray)]
    prompt: list[int] = []
    for part in parts:
        prompt += [PLACEHOLDER] * len(part) if isinstance(part, np.ndarray) else part
    given: dict[str, Any] = {"embeddings": [MultimodalInput(embeds=image) for image in images]}
    dense: dict[str, Any] = {"vectors": np.concatenate(images)} if images else {"vectors": np.zeros((0, EMBED_DIM))}
    if kind == "mrope":
        positions = grid_positions(prompt, width)
        dense["positions"] = positions
        if images:
            given["prompt_positions"] = positions
    return InputRequest(prompt, given, dense)


def mixed_requests(kind: str) -> list[InputRequest]:
    """Of text alone, of one image, of two; some share prompts, images or both."""
    head = random_tokens(0, 6)
    return [
        request_of(kind, [head, vectors(0, 6), random_tokens(1, 3)]),
        request_of(kind, [head + random_tokens(2, 5)]),
        request_of(kind, [head, vectors(1, 6), random_tokens(1, 3)]),
        request_of(kind, [head, vectors(0, 6), random_tokens(1, 2), vectors(2, 4), [5]]),
        request_of(kind, [vectors(3, 9), head]),
        request_of(kind, [random_tokens(3, 12)]),
        request_of(kind, [head, vectors(0, 6), random_tokens(4, 3)]),
    ]


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mode_gives_the_tokens_of_the_whole_sequence(kind: str, settings: dict[str, Any]) -> None:
    engine, requests = make_engine(kind, **settings), mixed_requests(kind)
    for _ in range(2):
        results = run(engine, add(engine, requests, max_tokens=16))
        assert_all_greedy(kind, requests, results)
    assert (sum(result.stats.num_preemptions for result in results) > 0) == (settings["max_num_seqs"] == 4)
    hits = [result.stats.num_cached_tokens or 0 for result in results]
    assert (sum(hits) > 0) == settings["enable_prefix_caching"]


@pytest.mark.parametrize("settings", OTHER_SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_other_settings_change_no_token(kind: str, settings: dict[str, Any]) -> None:
    engine, requests = make_engine(kind, async_scheduling=True, **settings), mixed_requests(kind)
    for _ in range(2):
        assert_all_greedy(kind, requests, run(engine, add(engine, requests, max_tokens=16)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_may_end_inside_an_image(kind: str) -> None:
    """Its last vector is computed again, of a prompt that ends with it."""
    engine, request = make_engine(kind, sub_block_hits=True), request_of(kind, [random_tokens(0, 6), vectors(0, 6)])
    for hit in (0, 11):
        [result] = run(engine, add(engine, [request]))
        assert_all_greedy(kind, [request], [result])
        assert result.stats.num_cached_tokens == hit


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_small_buffer_is_waited_for(async_scheduling: bool) -> None:
    """Rows are free again when the vectors are computed; until then a request that needs them waits."""
    requests = [request_of("vectors", [[i], vectors(i, 20), [1]]) for i in range(4)]
    engine = make_engine("vectors", async_scheduling=async_scheduling)
    ids = add(engine, requests)
    results = {}
    while engine.num_unfinished:
        results |= {result.request_id: result for result in engine.step().results.values()}
        engine.check_invariants()
        assert sum(one.request.num_computed_tokens < 21 for one in engine.scheduler.running) <= 1
    assert_all_greedy("vectors", requests, [results[request_id] for request_id in ids])
    assert distinct_outputs(list(results.values())) > 1


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_samples_go_on_where_the_prompt_ends(kind: str, async_scheduling: bool) -> None:
    """Also where a vector stands for the prompt's last token: then each computes what is not cached."""
    engine = make_engine(kind, async_scheduling=async_scheduling)
    requests = [*mixed_requests(kind)[:3], request_of(kind, [random_tokens(8, 3), vectors(8, 6)])]
    results = run(engine, add(engine, requests, n=3))
    assert_all_greedy(kind, requests, results, n=3)
    shared = [result.stats.num_shared_tokens > 0 for result in results]
    assert any(shared[:9])
    assert not any(shared[9:])


def test_prefixes_are_shared_by_equal_vectors_only() -> None:
    """Unless the caller names them: then by the name."""
    engine, head = make_engine("vectors"), random_tokens(0, 6)

    def cached(image: np.ndarray, identifier: str | None = None) -> int | None:
        prompt = [*head, *[PLACEHOLDER] * 6, 1, 2, 3]
        inputs = [MultimodalInput(embeds=image, identifier=identifier)]
        [result] = run(engine, [engine.add_request(prompt, SamplingParams(max_tokens=2), embeddings=inputs)])
        return result.stats.num_cached_tokens

    found = [cached(vectors(seed, 6)) for seed in (0, 0, 1, 0)]
    assert found == [0, 12, 4, 12]
    assert [cached(vectors(0, 6), "a"), cached(vectors(1, 6), "a"), cached(vectors(1, 6), "b")] == [4, 12, 4]


def test_prefixes_of_other_positions_are_not_shared() -> None:
    """Equal vectors on a grid of another shape stand elsewhere."""
    engine = make_engine("mrope")
    for width, hit in ((3, 0), (2, 4), (3, 12), (2, 12)):
        request = request_of("mrope", [random_tokens(0, 6), vectors(0, 6), [1, 2, 3]], width)
        [result] = run(engine, add(engine, [request]))
        assert_all_greedy("mrope", [request], [result])
        assert result.stats.num_cached_tokens == hit


def test_places_may_be_given() -> None:
    """In any order, as long as every placeholder gets its vector."""
    engine = make_engine("vectors")
    request = request_of("vectors", [[1, 2], vectors(0, 3), [4], vectors(1, 2), [5]])
    inputs = [MultimodalInput(embeds=vectors(1, 2), start=6), MultimodalInput(embeds=vectors(0, 3))]
    request_id = engine.add_request(request.prompt, SamplingParams(max_tokens=8, temperature=0.0), embeddings=inputs)
    assert_all_greedy("vectors", [request], run(engine, [request_id]))


def test_arrays_are_copied() -> None:
    request = request_of("mrope", [[1, 2], vectors(0, 3), [4]])
    embeds, positions = vectors(0, 3), grid_positions(request.prompt)
    engine = make_engine("mrope")
    request_id = engine.add_request(
        request.prompt,
        SamplingParams(max_tokens=4, temperature=0.0),
        embeddings=[MultimodalInput(embeds=embeds)],
        prompt_positions=positions,
    )
    embeds[:], positions[:] = 0, 0
    assert_all_greedy("mrope", [request], run(engine, [request_id]))


PROMPT = [1, 2, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 3]


def inputs_of(*counts: int, **fields: Any) -> dict[str, Any]:
    return {"embeddings": [MultimodalInput(embeds=vectors(0, count), **fields) for count in counts]}


def bad_inputs() -> dict[str, tuple[str, list[int], dict[str, Any], str]]:
    positions = {"prompt_positions": grid_positions(PROMPT)}
    moved = {"prompt_positions": grid_positions(PROMPT) + (np.arange(6) == 5)}
    negative = {"prompt_positions": grid_positions(PROMPT) - 1}
    return {
        "none": ("vectors", PROMPT, {}, "expected embeddings for all 3 placeholder tokens of the prompt, got 0"),
        "few": ("vectors", PROMPT, inputs_of(2), "expected embeddings for all 3 placeholder tokens .* got 2"),
        "many": (
            "vectors",
            PROMPT,
            inputs_of(4),
            r"tokens \(30,\) at places \[2, 6\), got token 3 at place 5",
        ),
        "more": (
            "vectors",
            PROMPT,
            inputs_of(3, 1),
            r"embeddings\[1\]: expected 1 places within .*, got \[6, 7\)",
        ),
        "outside": ("vectors", PROMPT, inputs_of(3, start=4), r"3 places within the prompt's 6 tokens, got \[4, 7\)"),
        "before": ("vectors", PROMPT, inputs_of(3, start=-1), r"got \[-1, 2\)"),
        "elsewhere": ("vectors", PROMPT, inputs_of(3, start=1), "got token 2 at place 1"),
        "overlap": ("vectors", PROMPT, inputs_of(2, 2, start=2), r"embeddings\[1\]: places \[2, 4\) overlap those of"),
        "buffer": ("vectors", [*PROMPT, *[30] * 22], inputs_of(25), r"at most 24 embeddings a request .* got 25"),
        "dim": (
            "vectors",
            PROMPT,
            {"embeddings": [MultimodalInput(embeds=np.zeros((3, 5)))]},
            r"\[n, 12\] .* \[3, 5\]",
        ),
        "no rows": ("vectors", PROMPT, inputs_of(0), r"of n >= 1, got \[0, 12\]"),
        "name": ("vectors", PROMPT, inputs_of(3, identifier=""), "expected an identifier that is not empty"),
        "positions": ("vectors", PROMPT, inputs_of(3) | positions, "expected no prompt_positions"),
        "no positions": (
            "mrope",
            PROMPT,
            inputs_of(3),
            r"expected prompt_positions \[3, 6\] with embeddings",
        ),
        "of text": ("mrope", [1, 2], {"prompt_positions": np.zeros((3, 2), int)}, "expected no prompt_positions"),
        "axes": ("mrope", PROMPT, inputs_of(3) | {"prompt_positions": np.zeros((2, 6), int)}, r"got int64\[2, 6\]"),
        "negative": ("mrope", PROMPT, inputs_of(3) | negative, "of integers >= 0"),
        "text moved": ("mrope", PROMPT, inputs_of(3) | moved, r"got \[6, 6, 6\] at place 5, where 5 comes next"),
    }


@pytest.mark.parametrize("name", bad_inputs())
def test_bad_inputs_are_refused_and_change_nothing(name: str) -> None:
    kind, prompt, given, message = bad_inputs()[name]
    engine = make_engine(kind)
    for call in (engine.add_request, engine.check_request):
        with pytest.raises(ValueError, match=message):
            call(prompt, SamplingParams(max_tokens=1), **given)
    assert engine.num_unfinished == 0
    assert engine.add_request([1, 2]) == "request-0"


def test_models_of_tokens_take_no_vectors() -> None:
    with pytest.raises(ValueError, match="expected no embeddings: the model takes none"):
        make_text_engine("qwen3").add_request([1, 2], embeddings=[MultimodalInput(embeds=vectors(0, 1))])


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_compiles_after_warm_up(kind: str) -> None:
    engine = make_engine(kind)
    engine.warmup()
    with count_compilations() as count:
        results = run(engine, add(engine, mixed_requests(kind)))
    assert count.num_programs == 0
    assert_all_greedy(kind, mixed_requests(kind), results)


def test_a_buffer_has_rows_and_is_shared_by_engines_of_one_size() -> None:
    with pytest.raises(ValueError, match="expected max_embedding_rows >= 1, got 0"):
        EngineConfig(num_blocks=9, max_embedding_rows=0)
    with pytest.raises(ValueError, match="expected `like` to have max_embedding_rows of 25, got 24"):
        LLMEngine(model_of("vectors"), base_config(max_embedding_rows=25), like=make_engine("vectors"))
