"""The committed goldens are what golden_models.py says of them, whatever model they are of."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.models.golden_models import FAMILIES, GOLDEN_MODELS, GOLDENS, constants_of, goldens_of, model_folder

MAX_SET_BYTES = 25_000_000
MAX_FAMILY_BYTES = 1_000_000
NAMES = [*FAMILIES, "demo"]


def test_every_folder_is_a_family_and_the_reverse() -> None:
    assert sorted(path.name for path in GOLDENS.iterdir()) == sorted(NAMES)
    assert set(GOLDEN_MODELS) <= set(NAMES)


def test_the_set_is_small() -> None:
    sizes = {name: sum(file.stat().st_size for file in (GOLDENS / name).iterdir()) for name in NAMES}
    assert max(sizes.values()) < MAX_FAMILY_BYTES
    assert sum(sizes.values()) < MAX_SET_BYTES


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_share_a_prefix_and_cross_windows_chunks_and_blocks(name: str) -> None:
    goldens = goldens_of(name)
    prompts = [golden.prompt for golden in goldens]
    assert len(prompts) == 6
    assert all((prompt[:37] == prompts[0][:37]).all() for prompt in prompts[:4])
    assert min(len(prompt) for prompt in prompts) == 37
    assert max(len(prompt) for prompt in prompts) > FAMILIES[name]
    assert [len(golden.greedy) for golden in goldens] == [32] * 6


@pytest.mark.parametrize("name", FAMILIES)
def test_choices_are_far_from_their_alternatives(name: str) -> None:
    for golden in goldens_of(name):
        assert golden.choice_gap > 1e-4
        best = np.sort(golden.decode_logits, axis=-1)
        gaps = best[:, -1] - best[:, -2]
        assert gaps.min() > 1e-3
        np.testing.assert_allclose(gaps.min(), golden.least_gap, atol=1e-4)
        assert golden.decode_logits.argmax(-1).tolist() == golden.greedy.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_arrays_have_the_shapes_and_dtypes_that_golden_says(name: str) -> None:
    config = json.loads((model_folder(name) / "config.json").read_text())
    vocab_size = config.get("text_config", config)["vocab_size"]
    for golden in goldens_of(name):
        assert golden.prompt.dtype == golden.positions.dtype == golden.greedy.dtype == np.int32
        assert golden.logits.dtype == golden.decode_logits.dtype == np.float32
        assert golden.logits.shape == (len(golden.positions), vocab_size)
        assert golden.decode_logits.shape == (0 if name == "demo" else len(golden.greedy), vocab_size)
        assert (np.diff(golden.positions) > 0).all()
        assert golden.positions[-1] == len(golden.prompt) - 1
        assert np.isfinite(golden.logits).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_last_logits_of_a_prompt_chose_the_first_greedy_token(name: str) -> None:
    for golden in goldens_of(name):
        np.testing.assert_allclose(golden.logits[-1], golden.decode_logits[0], atol=5e-5)


def test_indices_are_the_entries_of_the_highest_scores() -> None:
    """Scores below the chosen ones are lower, and a token chooses among the entries that it completes or follows."""
    for golden in goldens_of("deepseek_v4_sparse"):
        scores, indices = golden.extras["index_scores"], golden.extras["indices"]
        num_complete = (np.arange(len(golden.prompt)) + 1) // 4
        topk = indices.shape[-1]
        assert np.isfinite(scores).sum(-1).tolist() == [num_complete.tolist()] * len(scores)
        assert (indices >= 0).sum(-1).tolist() == [np.minimum(num_complete, topk).tolist()] * len(scores)
        assert max(num_complete) > topk
        for layer, token in np.ndindex(indices.shape[:2]):
            chosen = indices[layer, token][indices[layer, token] >= 0]
            best = np.argsort(-scores[layer, token], kind="stable")[: len(chosen)]
            assert chosen.tolist() == sorted(best.tolist())


def test_two_recordings_stand_behind_one_prefix() -> None:
    features = [golden.extras["features"] for golden in goldens_of("whisper")]
    config = json.loads((model_folder("whisper") / "config.json").read_text())
    assert {array.shape for array in features} == {(config["num_mel_bins"], 2 * config["max_source_positions"])}
    same = [[(one == other).all() for other in features[:4]] for one in features[:4]]
    assert np.array_equal(same, np.kron(np.eye(2), np.ones((2, 2))))


def test_two_images_stand_behind_one_prefix() -> None:
    goldens = goldens_of("qwen3_vl")
    config = json.loads((model_folder("qwen3_vl") / "config.json").read_text())
    for golden in goldens:
        extras, num_tokens = golden.extras, len(golden.prompt)
        rows = np.flatnonzero(golden.prompt == config["image_token_id"])
        assert extras["embed_tokens"].tolist() == rows.tolist()
        assert extras["embeds"].shape == (len(rows), config["text_config"]["hidden_size"])
        assert extras["deepstack"].shape == (2, *extras["embeds"].shape)
        assert extras["rope_positions"].shape == (3, num_tokens + 32)
        assert (np.diff(extras["rope_positions"][:, num_tokens - 1 :]) == 1).all()
        assert config["image_token_id"] not in golden.greedy
    assert (goldens[0].extras["embeds"] == goldens[1].extras["embeds"]).all()
    assert (goldens[0].extras["embeds"] != goldens[2].extras["embeds"]).all()
    assert len(np.unique(goldens[4].extras["rope_positions"][:, goldens[4].extras["embed_tokens"]], axis=1).T) == 16
    assert not len(goldens[5].extras["embeds"])


def test_constants_are_those_of_token_sinks() -> None:
    assert {name: list(constants_of(name)) for name in FAMILIES if constants_of(name)} == {
        "streaming_llm": ["num_sink_tokens", "window"]
    }
