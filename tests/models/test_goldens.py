"""The committed goldens are what golden_models.py says of them, whatever model they are of."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.models.golden_models import FAMILIES, GOLDEN_MODELS, GOLDENS, goldens_of, model_folder

MAX_SET_BYTES = 20_000_000
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
