"""Extra keys: which blocks carry what, in which order and form."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvjax.core.hashing.extra_keys import ExtraKeys, LoRARequest, MultiModalFeature, to_event_extra_keys

LORA = LoRARequest("adapter", "/adapters/1")
EMBEDS = np.arange(20, dtype=np.float32).reshape(5, 4)


def digest(rows: np.ndarray) -> bytes:
    return hashlib.sha256(rows.tobytes()).digest()


def test_tagged_keys_in_their_order() -> None:
    keys = ExtraKeys(mm_features=[MultiModalFeature("image", 1, 4)], lora=LORA, cache_salt="salt", prompt_embeds=EMBEDS)
    lora = ("lora", "adapter", "/adapters/1")
    assert [keys.of_block(start, start + 3) for start in (0, 3, 6)] == [
        (lora, ("mm", "image", 1), ("cache_salt", "salt"), ("prompt_embeds", digest(EMBEDS[:3]))),
        (lora, ("mm", "image", -2), ("prompt_embeds", digest(EMBEDS[3:]))),
        (lora, ("prompt_embeds", digest(EMBEDS[:0]))),
    ]


def test_bare_keys_in_their_order() -> None:
    keys = ExtraKeys(
        mm_features=[MultiModalFeature("image", 1, 4)],
        lora=LORA,
        cache_salt="salt",
        prompt_embeds=EMBEDS,
        style="bare",
    )
    assert [keys.of_block(start, start + 3) for start in (0, 3)] == [
        ("adapter", "image", "salt", digest(EMBEDS[:3])),
        ("adapter", "image", digest(EMBEDS[3:])),
    ]


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
    assert ExtraKeys(**lora, style="bare").of_block(0, 4) == ExtraKeys(**salt, style="bare").of_block(0, 4)


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


@pytest.mark.parametrize("style", ["tagged", "bare"])
def test_events_publish_keys_without_tags(style: str) -> None:
    keys = ExtraKeys(
        mm_features=[MultiModalFeature("image", 1, 4)],
        lora=LORA,
        cache_salt="salt",
        prompt_embeds=EMBEDS,
        style=style,
    )
    item = ("image", 1) if style == "tagged" else "image"
    assert to_event_extra_keys(keys.of_block(0, 3)) == ("adapter", item, "salt", digest(EMBEDS[:3]))
    assert to_event_extra_keys(None) is None


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
        (lambda: MultiModalFeature("a", -1, 2), "expected offset >= 0 and length >= 1, got -1 and 2"),
        (lambda: MultiModalFeature("a", 0, 0), "expected offset >= 0 and length >= 1, got 0 and 0"),
        (lambda: ExtraKeys(style="old"), "expected an extra key style of tagged, bare, got 'old'"),
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
