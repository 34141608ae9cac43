"""M-RoPE positions of a step: those of the prompt where it has images, and of text behind it."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.core import FullAttentionSpec, KVCacheConfig, KVCacheManager, MRopePositions, Request
from kvjax.core.step.step_builder import build_step_plan

SPEC = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=4, dtype="float32")
TEXT = 3  # tokens before the image and behind it
GRID = (2, 3)  # height and width of the image


def image_prompt() -> np.ndarray:  # int[3, 12]
    """Text, an image of 2 by 3 tokens, text: each axis from the definition of M-RoPE."""
    height, width = np.indices(GRID).reshape(2, -1) + TEXT
    image = np.stack([np.full(height.size, TEXT), height, width])
    behind = image.max() + 1 + np.arange(TEXT)
    return np.concatenate([np.tile(np.arange(TEXT), (3, 1)), image, np.tile(behind, (3, 1))], axis=1)


def whole(prompt: np.ndarray, num_tokens: int) -> np.ndarray:  # int[3, num_tokens]
    """Prompt and generated tokens, each of which is one behind the largest position before it."""
    positions = prompt
    while positions.shape[1] < num_tokens:
        positions = np.concatenate([positions, np.full((3, 1), positions.max() + 1)], axis=1)
    return positions


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_positions_made_token_by_token(seed: int) -> None:
    """Requests with an image and without, at random places of prompt and output, in random order."""
    rng = np.random.default_rng(seed)
    manager = KVCacheManager(KVCacheConfig.single_pool(300, SPEC), 100, 4, enable_caching=False)
    mrope, rows, counts, expected = MRopePositions(), [], [], {}
    for i in range(20):  # more rows than are reserved at first
        request = Request(f"r{i}", rng.integers(0, 100, 12))
        computed, count = int(rng.integers(0, 16)), int(rng.choice([1, 2, 9]))
        request.append_output_token_ids(np.zeros(20, np.int32))
        if computed:
            assert manager.allocate_slots(request, computed) is not None
            request.num_computed_tokens = computed
        assert manager.allocate_slots(request, count) is not None
        positions = np.tile(np.arange(40), (3, 1))
        if rng.random() < 0.5:
            mrope.set(request.row, image_prompt())
            positions = whole(image_prompt(), 40)
        expected[request.request_id] = positions[:, computed : computed + count]
        rows.append(request.row)
        counts.append(count)
    order = rng.permutation(20)
    plan = build_step_plan(manager, np.array(rows)[order], np.array(counts)[order], mrope=mrope)
    assert plan.positions.dtype == np.int32
    assert plan.positions.tolist() == np.concatenate([expected[i] for i in plan.request_ids], axis=1).tolist()


def test_a_row_that_is_cleared_holds_text() -> None:
    manager = KVCacheManager(KVCacheConfig.single_pool(30, SPEC), 100, 4, enable_caching=False)
    mrope, request = MRopePositions(), Request("a", [1] * 12)
    assert manager.allocate_slots(request, 12) is not None
    prompt = image_prompt()
    mrope.set(request.row, prompt)
    prompt[:] = 99  # copied
    [row] = rows = np.array([request.row])
    assert build_step_plan(manager, rows, np.array([12]), mrope=mrope).positions.tolist() == image_prompt().tolist()
    mrope.clear(row)
    mrope.clear(row)
    assert build_step_plan(manager, rows, np.array([12]), mrope=mrope).positions.tolist() == [list(range(12))] * 3


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (np.zeros((2, 5), int), r"expected prompt positions \[3, num_prompt_tokens\], got shape \[2, 5\]"),
        (np.zeros((4, 5), int), r"got shape \[4, 5\]"),
        (np.zeros((3, 0), int), r"got shape \[3, 0\]"),
        (np.zeros((3, 5)), "integer prompt positions >= 0, got float64"),
        (np.full((3, 5), -1), "integer prompt positions >= 0, got int64 from -1"),
    ],
)
def test_refuses_what_is_no_position(positions: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MRopePositions().set(0, positions)
