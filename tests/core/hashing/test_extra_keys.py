"""Extra keys: which blocks carry what, in which order and form."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core.hashing.extra_keys import EXTRA_KEY_STYLES, ExtraKeys, LoRARequest, MultiModalFeature

LORA = LoRARequest("adapter", "/adapters/1")
EMBEDS = np.arange(20, dtype=np.float32).reshape(5, 4)


def digest(rows: np.ndarray) -> bytes:
    return hashlib.sha256(rows.tobytes()).digest()


WRITTEN = {
    "vllm-0.16": [
        ("adapter", "image", "salt", EMBEDS[:3].tobytes()),
        ("adapter", "image", EMBEDS[3:].tobytes()),
        ("adapter", b""),
    ],
    "vllm-0.22": [
        ("adapter", ("image", 1), "salt", digest(EMBEDS[:3])),
        ("adapter", ("image", -2), digest(EMBEDS[3:])),
        ("adapter", digest(EMBEDS[:0])),
    ],
    "vllm-0.33": [
        (
            ("lora", "adapter", "/adapters/1"),
            ("mm", "image", 1),
            ("cache_salt", "salt"),
            ("prompt_embeds", digest(EMBEDS[:3])),
        ),
        (("lora", "adapter", "/adapters/1"), ("mm", "image", -2), ("prompt_embeds", digest(EMBEDS[3:]))),
        (("lora", "adapter", "/adapters/1"), ("prompt_embeds", digest(EMBEDS[:0]))),
    ],
}


def keys_of_all_kinds(**options: Any) -> ExtraKeys:
    items = [MultiModalFeature("image", 1, 4)]
    return ExtraKeys(mm_features=items, lora=LORA, cache_salt="salt", prompt_embeds=EMBEDS, **options)


@pytest.mark.parametrize("style", WRITTEN)
def test_keys_in_their_order_as_a_release_writes_them(style: str) -> None:
    keys = keys_of_all_kinds(style=style)
    assert [keys.of_block(start, start + 3) for start in (0, 3, 6)] == WRITTEN[style]


def test_every_style_is_known_and_the_default_is_the_newest() -> None:
    assert tuple(WRITTEN) == EXTRA_KEY_STYLES
    assert keys_of_all_kinds().of_block(0, 3) == WRITTEN["vllm-0.33"][0]


def test_no_features_no_keys() -> None:
    keys = ExtraKeys()
    assert keys.is_empty
    assert keys.of_block(0, 4) is None


@pytest.mark.parametrize(
    "features",
    [{"lora": LORA}, {"cache_salt": "s"}, {"prompt_embeds": EMBEDS}, {"mm_features": [MultiModalFeature("a", 0, 1)]}],
)
def test_any_feature_makes_keys(features: dict[str, Any]) -> None:
    assert not ExtraKeys(**features).is_empty
    assert ExtraKeys(**features).of_block(0, 4) is not None


def test_the_salt_is_the_first_blocks_only() -> None:
    keys = ExtraKeys(cache_salt="s")
    assert keys.of_block(0, 4) == (("cache_salt", "s"),)
    assert keys.of_block(4, 8) is None


def test_tags_keep_an_adapter_from_a_salt_of_its_name() -> None:
    lora, salt = {"lora": LoRARequest("x")}, {"cache_salt": "x"}
    assert ExtraKeys(**lora).of_block(0, 4) != ExtraKeys(**salt).of_block(0, 4)
    for style in ("vllm-0.16", "vllm-0.22"):
        assert ExtraKeys(**lora, style=style).of_block(0, 4) == ExtraKeys(**salt, style=style).of_block(0, 4)


def test_an_adapter_at_another_path_is_another() -> None:
    assert ExtraKeys(lora=LoRARequest("x", "a")).of_block(0, 4) != ExtraKeys(lora=LoRARequest("x", "b")).of_block(0, 4)


def test_the_number_of_an_adapter_decides_nothing() -> None:
    numbered = LoRARequest("adapter", "/adapters/1", adapter_id=3)
    assert numbered == LORA
    assert hash(numbered) == hash(LORA)
    assert ExtraKeys(lora=numbered).of_block(0, 4) == ExtraKeys(lora=LORA).of_block(0, 4)


def test_an_item_that_ends_where_a_block_starts_is_not_its_own() -> None:
    items = [MultiModalFeature("long", 0, 9), MultiModalFeature("short", 1, 3)]
    assert ExtraKeys(mm_features=items).of_block(4, 8) == (("mm", "long", -4),)
    assert ExtraKeys(mm_features=items[1:]).of_block(4, 8) is None


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=6),
    st.lists(st.integers(0, 12), min_size=1, max_size=20),
    st.integers(1, 7),
)
def test_a_block_names_every_item_that_it_overlaps(
    spans: list[tuple[int, int]], blocks: list[int], block_size: int
) -> None:
    """Asked for in any order, items overlapping each other or not."""
    items = [MultiModalFeature(f"item{i}", offset, length) for i, (offset, length) in enumerate(sorted(spans))]
    keys = ExtraKeys(mm_features=items)
    for block in blocks:
        start, end = block * block_size, (block + 1) * block_size
        overlapping = [item for item in items if set(range(item.offset, item.end)) & set(range(start, end))]
        expected = tuple(("mm", item.identifier, item.offset - start) for item in overlapping)
        assert keys.of_block(start, end) == (expected or None)


def test_embeddings_are_hashed_by_their_bytes() -> None:
    strided = np.asfortranarray(EMBEDS)
    assert ExtraKeys(prompt_embeds=strided).of_block(1, 3) == ExtraKeys(prompt_embeds=EMBEDS).of_block(1, 3)
    other = EMBEDS.astype(np.float16)
    assert ExtraKeys(prompt_embeds=other).of_block(1, 3) != ExtraKeys(prompt_embeds=EMBEDS).of_block(1, 3)


@pytest.mark.parametrize("style", EXTRA_KEY_STYLES)
def test_events_publish_keys_in_one_form(style: str) -> None:
    """What consumers of vLLM parse: names, pairs of identifier and place, salts, digests."""
    keys = keys_of_all_kinds(style=style, weight_version=5)
    assert keys.event_keys_of_block(0, 3) == (*WRITTEN["vllm-0.22"][0], 5)
    assert [keys.event_keys_of_block(start, start + 3) for start in (3, 6)] == WRITTEN["vllm-0.22"][1:]
    assert ExtraKeys(style=style, cache_salt="s").event_keys_of_block(4, 8) is None


def test_items_are_told_by_place_from_0_22_on() -> None:
    """One image at two places of blocks with equal tokens, as runs of placeholders are."""
    for style in EXTRA_KEY_STYLES:
        early, late = (ExtraKeys(mm_features=[MultiModalFeature("image", at, 2)], style=style) for at in (0, 1))
        assert (early.of_block(0, 4) == late.of_block(0, 4)) == (style == "vllm-0.16")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LoRARequest(""), "expected a LoRA name that is not empty"),
        (lambda: LoRARequest("a", adapter_id=0), r"expected a LoRA adapter_id that is an integer in \[1, .* got 0"),
        (
            lambda: LoRARequest("a", adapter_id=2**63),
            r"adapter_id that is an integer .* got 9223372036854775808",
        ),
        (lambda: LoRARequest("a", adapter_id=True), r"adapter_id that is an integer in \[1, .* got True"),
        (lambda: MultiModalFeature("a", -1, 2), "expected offset >= 0, got -1"),
        (lambda: MultiModalFeature("a", 0, 0), "expected length >= 1, got 0"),
        (
            lambda: ExtraKeys(style="old"),
            r"extra key style of vllm-0\.16, vllm-0\.22, vllm-0\.33, got 'old'",
        ),
        (lambda: ExtraKeys(cache_salt=""), "expected a cache_salt that is not empty"),
        (
            lambda: ExtraKeys(mm_features=[MultiModalFeature("a", 4, 1), MultiModalFeature("b", 2, 1)]),
            r"expected mm_features sorted by offset, got \[4, 2\]",
        ),
    ],
)
def test_impossible_features_are_refused(build: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
