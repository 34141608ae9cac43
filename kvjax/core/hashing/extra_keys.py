"""What beside its tokens decides a block's KV: adapter, multimodal items, salt, prompt embeddings, weight version.

Flow:    Request -> [ExtraKeys.of_block] -> BlockHasher; [to_event_extra_keys] -> KV events
Source:  vLLM v1/core/kv_cache_utils.py: the tagged form of 0.33 and the bare one of 0.16

A block's extra keys are a tuple in the order LoRA, items, salt, embeddings, weight version, or None if there is none:

    tagged  ("lora", name, path)  ("mm", identifier, offset - start)  ("cache_salt", salt)  ("prompt_embeds", digest)
    bare    name                  identifier                          salt                  digest

and ("weight_version", version) in both: our own key, for weights that change while the cache stays (vLLM has none).

An item counts for every block that its tokens overlap (where items overlap each other, vLLM names only some of them);
salt and weight version for the first block only, since the chain carries them on. The digest is SHA-256 over the raw
bytes of the block's slice of the embeddings, which is empty beyond the prompt.
Bare keys collide where an adapter is named like a salt, hence the tags.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EXTRA_KEY_STYLES = ("tagged", "bare")


@dataclass(frozen=True)
class LoRARequest:
    """A LoRA adapter: `path` tells adapters of one name apart.

    `adapter_id` is the number that KV events tell beside the name (`lora_int_id` in vLLM). It decides no hash: requests
    that differ in it alone are of one adapter.
    """

    name: str
    path: str = ""
    adapter_id: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("expected a LoRA name that is not empty")
        number = self.adapter_id
        if number is not None and (type(number) is not int or not 0 < number < 2**63):
            raise ValueError(f"expected a LoRA adapter_id that is an integer in [1, 2**63), or None, got {number!r}")


@dataclass(frozen=True)
class MultiModalFeature:
    """An input (image, audio ...) that fills the prompt's tokens [offset, offset + length)."""

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise ValueError(f"expected offset >= 0 and length >= 1, got {self.offset} and {self.length}")

    @property
    def end(self) -> int:
        """First token after the item."""
        return self.offset + self.length


class ExtraKeys:
    """Extra keys of one request's blocks.

    Blocks asked for in order cost a scan of the items in total; going back starts the scan again.
    """

    __slots__ = (
        "_cache_salt",
        "_first_item",
        "_items",
        "_lora",
        "_prompt_embeds",
        "_scanned",
        "_tagged",
        "_weight_version",
    )

    def __init__(
        self,
        *,
        mm_features: Sequence[MultiModalFeature] = (),  # sorted by offset
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        prompt_embeds: np.ndarray | None = None,  # [num_prompt_tokens, hidden]
        weight_version: int | str | None = None,
        style: str = "tagged",
    ):
        if style not in EXTRA_KEY_STYLES:
            raise ValueError(f"expected an extra key style of {', '.join(EXTRA_KEY_STYLES)}, got {style!r}")
        self._items = tuple(mm_features)
        if any(a.offset > b.offset for a, b in zip(self._items, self._items[1:], strict=False)):
            raise ValueError(f"expected mm_features sorted by offset, got {[item.offset for item in self._items]}")
        if cache_salt is not None and not cache_salt:
            raise ValueError("expected a cache_salt that is not empty; pass None for no salt")
        if weight_version is not None and (
            isinstance(weight_version, bool) or not isinstance(weight_version, int | str)
        ):
            raise ValueError(f"expected a weight_version that is an integer or text, got {weight_version!r}")
        self._lora = lora
        self._cache_salt = cache_salt
        self._weight_version = weight_version
        self._prompt_embeds = prompt_embeds
        self._tagged = style == "tagged"
        self._first_item = 0  # the items before it end at or before token _scanned
        self._scanned = 0

    @property
    def is_empty(self) -> bool:
        """Whether no block of the request can have extra keys."""
        return not (self._items or self._lora or self._cache_salt) and (
            self._prompt_embeds is None and self._weight_version is None
        )

    def names_input(self, end: int) -> bool:
        """Whether the keys of the first block, of the tokens [0, end), tell the request's input: an item or a salt."""
        return self._cache_salt is not None or any(item.offset < end for item in self._items)

    def of_block(self, start: int, end: int) -> tuple[Any, ...] | None:
        """Extra keys of the block that holds the tokens [start, end)."""
        keys: list[Any] = []
        if self._lora is not None:
            keys.append(("lora", self._lora.name, self._lora.path) if self._tagged else self._lora.name)
        keys += self._item_keys(start, end)
        if self._cache_salt is not None and start == 0:
            keys.append(("cache_salt", self._cache_salt) if self._tagged else self._cache_salt)
        if self._prompt_embeds is not None:
            digest = hashlib.sha256(np.ascontiguousarray(self._prompt_embeds[start:end]).tobytes()).digest()
            keys.append(("prompt_embeds", digest) if self._tagged else digest)
        if self._weight_version is not None and start == 0:
            keys.append(("weight_version", self._weight_version))
        return tuple(keys) or None

    def _item_keys(self, start: int, end: int) -> list[Any]:
        items = self._items
        if start < self._scanned:
            self._first_item = 0
        self._scanned = start
        while self._first_item < len(items) and items[self._first_item].end <= start:
            self._first_item += 1
        keys: list[Any] = []
        for item in items[self._first_item :]:
            if item.offset >= end:
                break
            if item.end > start:
                keys.append(("mm", item.identifier, item.offset - start) if self._tagged else item.identifier)
        return keys


def to_event_extra_keys(extra_keys: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
    """The form that KV events publish: `(identifier, offset)` for an item, the bare value for all others."""
    return None if extra_keys is None else tuple(map(_untagged, extra_keys))


def _untagged(key: Any) -> Any:
    if not isinstance(key, tuple):
        return key  # bare style
    return key[1:] if key[0] == "mm" else key[1]
