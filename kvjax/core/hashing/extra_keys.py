"""What beside its tokens decides a block's KV: adapter, multimodal items, salt, prompt embeddings, weight version.

Flow:    Request -> [ExtraKeys.of_block] -> BlockHasher; [ExtraKeys.event_keys_of_block] -> KV events
Source:  vLLM v1/core/kv_cache_utils.py of 0.16.0, 0.22.1 and 0.33.0

A block's extra keys are a tuple in the order LoRA, items, salt, embeddings, weight version, or None if there is none. A
style writes them as one release of vLLM does; other releases may mix these forms:

    style      LoRA                  item                      salt                  embeddings
    vllm-0.16  name                  identifier                salt                  bytes
    vllm-0.22  name                  (identifier, start)       salt                  digest
    vllm-0.33  ("lora", name, path)  ("mm", identifier, start) ("cache_salt", salt)  ("prompt_embeds", digest)

and ("weight_version", version) in all: our own key, for weights that change while the cache stays (vLLM has none).

`start` is where the item starts, counted from the block's first token. The bytes are those of the block's slice of the
embeddings, which is empty beyond the prompt; the digest is their SHA-256. Salt and weight version are keys of the first
block only, since the chain carries them on. KV events publish what consumers of vLLM parse, whatever the style: the
form of 0.22, and the bare weight version.

What the older styles cannot tell apart: an adapter named like a salt in both; in 0.16 also one item at two places of
blocks with equal tokens.

An item is a key of every block that its tokens overlap. vLLM differs in two corners. Where items overlap each other, it
names only some of them. Where a block begins right behind the last item and is hashed after the prompt, 0.16 names that
item once more.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvjax.core.tables.given_values import as_count, as_text, shown


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
        if not as_text("a LoRA name", self.name):
            raise ValueError("expected a LoRA name that is not empty")
        as_text("a LoRA path", self.path)
        number = self.adapter_id
        if number is not None and (type(number) is not int or not 0 < number < 2**63):
            raise ValueError(
                f"expected a LoRA adapter_id that is an integer in [1, 2**63), or None, got {shown(number)}"
            )


@dataclass(frozen=True)
class MultiModalFeature:
    """An input (image, audio ...) that fills the prompt's tokens [offset, offset + length)."""

    identifier: str
    offset: int
    length: int

    def __post_init__(self) -> None:
        as_text("an item's identifier", self.identifier)
        object.__setattr__(self, "offset", as_count("offset", self.offset))
        object.__setattr__(self, "length", as_count("length", self.length, 1))

    @property
    def end(self) -> int:
        """First token after the item."""
        return self.offset + self.length


@dataclass(frozen=True)
class KeyForm:
    """How each key of a block is written."""

    lora: Callable[[LoRARequest], Any]
    item: Callable[[str, int], Any]  # identifier, and where the item starts, negative before the block
    salt: Callable[[str], Any]
    embeds: Callable[[bytes], Any]


def _name(lora: LoRARequest) -> str:
    return lora.name


def _bare(value: Any) -> Any:
    return value


def _digest(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


FORMS = {
    "vllm-0.16": KeyForm(lora=_name, item=lambda identifier, start: identifier, salt=_bare, embeds=_bare),
    "vllm-0.22": KeyForm(lora=_name, item=lambda identifier, start: (identifier, start), salt=_bare, embeds=_digest),
    "vllm-0.33": KeyForm(
        lora=lambda lora: ("lora", lora.name, lora.path),
        item=lambda identifier, start: ("mm", identifier, start),
        salt=lambda salt: ("cache_salt", salt),
        embeds=lambda embeds: ("prompt_embeds", _digest(embeds)),
    ),
}
EXTRA_KEY_STYLES = tuple(FORMS)
DEFAULT_EXTRA_KEY_STYLE = "vllm-0.33"
EVENT_FORM = FORMS["vllm-0.22"]


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
        "_style",
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
        style: str = DEFAULT_EXTRA_KEY_STYLE,
    ):
        if style not in EXTRA_KEY_STYLES:
            raise ValueError(f"expected an extra key style of {', '.join(EXTRA_KEY_STYLES)}, got {style!r}")
        self._items = tuple((item.offset, item.end, item.identifier) for item in mm_features)
        offsets = [offset for offset, _, _ in self._items]
        if offsets != sorted(offsets):
            raise ValueError(f"expected mm_features sorted by offset, got {offsets}")
        if cache_salt is not None and not as_text("cache_salt", cache_salt):
            raise ValueError("expected a cache_salt that is not empty; pass None for no salt")
        if isinstance(weight_version, str):
            as_text("weight_version", weight_version)
        elif weight_version is not None and (
            isinstance(weight_version, bool) or not isinstance(weight_version, int) or abs(weight_version) >= 2**63
        ):
            raise ValueError(
                f"expected a weight_version that is an integer of 64 bits or text, got {shown(weight_version)}"
            )
        self._lora = lora
        self._cache_salt = cache_salt
        self._weight_version = weight_version
        self._prompt_embeds = prompt_embeds
        self._style = style
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
        return self._cache_salt is not None or any(offset < end for offset, _, _ in self._items)

    def of_block(self, start: int, end: int) -> tuple[Any, ...] | None:
        """Extra keys of the block that holds the tokens [start, end), as its hash covers them."""
        keys = self._written(FORMS[self._style], start, end)
        if self._weight_version is not None and start == 0:
            keys.append(("weight_version", self._weight_version))
        return tuple(keys) or None

    def event_keys_of_block(self, start: int, end: int) -> tuple[Any, ...] | None:
        """The same keys as KV events publish them."""
        keys = self._written(EVENT_FORM, start, end)
        if self._weight_version is not None and start == 0:
            keys.append(self._weight_version)
        return tuple(keys) or None

    def _written(self, form: KeyForm, start: int, end: int) -> list[Any]:
        """All keys of a block but the weight version."""
        keys = [] if self._lora is None else [form.lora(self._lora)]
        if self._items:
            keys += self._item_keys(form.item, start, end)
        if self._cache_salt is not None and start == 0:
            keys.append(form.salt(self._cache_salt))
        if self._prompt_embeds is not None:
            keys.append(form.embeds(np.ascontiguousarray(self._prompt_embeds[start:end]).tobytes()))
        return keys

    def _item_keys(self, write: Callable[[str, int], Any], start: int, end: int) -> list[Any]:
        items, first = self._items, self._first_item
        if start < self._scanned:
            first = 0
        while first < len(items) and items[first][1] <= start:
            first += 1
        self._first_item, self._scanned = first, start
        keys: list[Any] = []
        for offset, item_end, identifier in items[first:]:
            if offset >= end:
                break
            if item_end > start:
                keys.append(write(identifier, offset - start))
        return keys
