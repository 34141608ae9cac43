"""A sequence being generated: its tokens, what decides its block hashes, and how far it is computed.

Flow:    prompt -> [Request] -> KVCacheManager, RequestTable -> sampled tokens -> append_output_token_ids
Source:  names of vLLM v1/request.py

A request's tokens and counts lie in the row of a `RequestTable` while it owns one, and in the request itself
otherwise; `token_ids`, `num_tokens` ... read whichever it is, so that there is one copy at any time.

Arrays that a request returns are read-only views of memory that later calls write to. Copy what must last; above all,
pass no view to jax, which reads its arguments after the call returns.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from kvjax.core.hashing.block_hash import BlockHash, BlockHasher
from kvjax.core.hashing.block_origin import BlockOrigin
from kvjax.core.hashing.extra_keys import DEFAULT_EXTRA_KEY_STYLE, ExtraKeys, LoRARequest, MultiModalFeature
from kvjax.core.requests.token_ids import as_token_ids
from kvjax.core.tables.given_arrays import read_only
from kvjax.core.tables.given_values import as_count, as_items, as_text, shown

if TYPE_CHECKING:
    from kvjax.core.requests.request_table import RequestTable

NO_ROW = -1
NO_ORIGIN = BlockOrigin()
MAX_ITEMS = 1 << 20
MAX_CHECKPOINTS = 64  # each may cost a step of its own, and a state


class Request:
    """One request. `block_hashes` holds a hash per full block, and is the same list for the request's whole life.

    Where a serving stack hashes its requests, the list is the stack's own, which grows as the stack appends to it;
    `KVCacheManager.allocate_slots` registers by it, `plan_step` does not.
    """

    __slots__ = (
        "_extra_keys",
        "_num_computed_tokens",
        "_num_prompt_tokens",
        "_num_tokens",
        "_row",
        "_table",
        "_tokens",
        "block_hasher",
        "block_hashes",
        "cache_salt",
        "checkpoints",
        "has_extra_keys",
        "lora",
        "max_tokens",
        "mm_features",
        "num_preemptions",
        "prompt_embeds",
        "request_id",
        "skip_reading_prefix_cache",
        "skip_writing_prefix_cache",
        "weight_version",
    )

    def __init__(
        self,
        request_id: str,  # unique among running requests
        prompt_token_ids: Any,  # integers >= 0, [num_prompt_tokens]; None with prompt_embeds: zeros
        *,
        mm_features: Sequence[MultiModalFeature] = (),  # sorted by offset, inside the prompt
        lora: LoRARequest | None = None,  # the adapter; requests of others share nothing
        cache_salt: str | None = None,  # requests of other salts share nothing
        prompt_embeds: np.ndarray | None = None,  # [num_prompt_tokens, hidden]
        weight_version: int | str | None = None,  # of the model's weights; requests of other versions share nothing
        skip_reading_prefix_cache: bool = False,  # compute the whole prompt
        skip_writing_prefix_cache: bool = False,  # look up, but make no block of this request a hit for others
        prompt_logprobs: int | None = None,  # they need every prompt token computed, so no hit may be read
        max_tokens: int | None = None,  # most output tokens, for admission by worst case; None: up to max_model_len
        checkpoints: Iterable[int] = (),  # prompt tokens behind which others part: the end of a system prompt, turns
        block_hasher: BlockHasher | None = None,  # None: nothing is hashed here
        block_hashes: list[BlockHash] | None = None,  # kept, not copied: the caller hashes, and appends to it
    ):
        """Copies and hashes the prompt and its embeddings.

        Raises:
            ValueError: the prompt is empty or not a row of integers in [0, 2**31), an item lies outside it or out of
                order, the salt is empty, there is not one embedding per prompt token, weight_version is neither an
                integer nor text, max_tokens is below 1, checkpoints are more than `MAX_CHECKPOINTS` or not inside the
                prompt, or a hasher comes with somebody else's hashes.
        """
        if block_hasher is not None and block_hashes is not None:
            raise ValueError("expected block_hasher or block_hashes, got both; one side hashes a request")
        mm_features = _checked_items(mm_features)
        if lora is not None and not isinstance(lora, LoRARequest):
            raise ValueError(f"expected lora as a LoRARequest or None, got {shown(lora)}")
        if prompt_embeds is not None:
            prompt_embeds = _own_embeds(prompt_embeds)
            if prompt_token_ids is None:
                prompt_token_ids = np.zeros(prompt_embeds.shape[:1], np.int32)
        tokens = as_token_ids(prompt_token_ids, "prompt_token_ids")
        _check_prompt(tokens.size, mm_features, prompt_embeds)
        if max_tokens is not None:
            max_tokens = as_count("max_tokens", max_tokens, 1)
        self.checkpoints = _checked_checkpoints(checkpoints, tokens.size)
        self.request_id = as_text("request_id", request_id)
        self.mm_features = mm_features
        self.lora = lora
        self.cache_salt = cache_salt
        self.prompt_embeds = prompt_embeds
        self.weight_version = weight_version
        self.max_tokens = max_tokens
        self.skip_reading_prefix_cache = skip_reading_prefix_cache or prompt_logprobs is not None
        self.skip_writing_prefix_cache = skip_writing_prefix_cache
        self.block_hasher = block_hasher
        self.num_preemptions = 0  # times that it lost its blocks and waited again, as its scheduler counts
        self.block_hashes = [] if block_hashes is None else block_hashes
        self._extra_keys = self._make_extra_keys(self.origin)
        self.has_extra_keys = self._extra_keys is not None  # whether a hash may cover more than tokens and parent
        self._table: RequestTable | None = None
        self._row = NO_ROW
        self._tokens = np.array(tokens, np.int32)  # int32[>= num_tokens], grows by doubling
        self._num_tokens = self._num_prompt_tokens = tokens.size
        self._num_computed_tokens = 0
        self.extend_block_hashes()

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.num_prompt_tokens} prompt + {self.num_output_tokens} output tokens, "
            f"{self.num_computed_tokens} computed, row {self._row})"
        )

    @property
    def row(self) -> int:
        """Row of the table that holds this request, or -1."""
        return self._row

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens."""
        return self._num_tokens if self._table is None else int(self._table.num_tokens[self._row])

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return self._num_prompt_tokens if self._table is None else int(self._table.num_prompt_tokens[self._row])

    @property
    def num_output_tokens(self) -> int:
        """Tokens appended to the prompt."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache or on its way there."""
        return self._num_computed_tokens if self._table is None else int(self._table.num_computed_tokens[self._row])

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        if value < 0:
            raise ValueError(f"request {self.request_id!r}: expected num_computed_tokens >= 0, got {value}")
        if self._table is None:
            self._num_computed_tokens = int(value)
        else:
            self._table.num_computed_tokens[self._row] = value

    @property
    def token_ids(self) -> np.ndarray:  # int32[num_tokens]
        """Prompt and output, as a read-only view."""
        return read_only(self._tokens[: self._num_tokens] if self._table is None else self._table.tokens_of(self._row))

    @property
    def all_token_ids(self) -> np.ndarray:  # int32[num_tokens]
        """`token_ids`, by the name that vLLM's Request has for them."""
        return self.token_ids

    @property
    def prompt_token_ids(self) -> np.ndarray:  # int32[num_prompt_tokens]
        """The prompt, as a read-only view."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> np.ndarray:  # int32[num_output_tokens]
        """The output so far, as a read-only view."""
        return self.token_ids[self.num_prompt_tokens :]

    def append_output_token_ids(self, token_ids: Any) -> None:
        """Appends one token or a row of tokens and hashes the blocks that become full.

        Raises:
            ValueError: not integers in [0, 2**31), or more tokens than the table's max_model_len; nothing is changed.
        """
        new = as_token_ids([token_ids] if np.ndim(token_ids) == 0 else token_ids)
        if self._table is not None:
            self._table.append_run(self._row, new)
            return
        end = self._num_tokens + new.size
        if end > self._tokens.size:
            grown = np.zeros(max(end, 2 * self._tokens.size), np.int32)
            grown[: self._num_tokens] = self._tokens[: self._num_tokens]
            self._tokens = grown
        self._tokens[self._num_tokens : end] = new
        self._num_tokens = end
        self.extend_block_hashes()

    @property
    def origin(self) -> BlockOrigin:
        """What invalidation knows of the blocks that this request fills."""
        if self.cache_salt is None and self.lora is None and self.weight_version is None:
            return NO_ORIGIN
        return BlockOrigin(self.cache_salt, self.lora, self.weight_version)

    def set_weight_version(self, weight_version: int | str | None) -> None:
        """Other weights will compute this request: hashes all its blocks anew. For requests that do not run.

        Raises:
            ValueError: the request runs (free it first), or the version is neither an integer nor text. Nothing has
                changed.
        """
        if self._table is not None:
            raise ValueError(f"request {self.request_id!r} runs; free it before its weight_version changes")
        ExtraKeys(weight_version=weight_version)  # checks it
        self.weight_version = weight_version
        self._extra_keys = self._make_extra_keys(self.origin)
        self.has_extra_keys = self._extra_keys is not None
        self.block_hashes.clear()
        self.extend_block_hashes()

    def block_hashes_under(self, origin: BlockOrigin, max_blocks: int | None = None) -> list[BlockHash]:
        """The first hashes that the request would have under another origin; none without a hasher."""
        hashes: list[BlockHash] = []
        if self.block_hasher is not None:
            end = None if max_blocks is None else max_blocks * self.block_hasher.block_size
            self.block_hasher.extend(hashes, self.token_ids[:end], self._make_extra_keys(origin))
        return hashes

    def names_input(self, block_size: int) -> bool:
        """Whether the hash of the first block covers a multimodal item or a salt."""
        return self._extra_keys is not None and self._extra_keys.names_input(block_size)

    def fork(self, request_id: str) -> Request:
        """A request of another id with the same tokens, keys and hashes, in no table and with nothing computed."""
        child = copy.copy(self)
        child.request_id = request_id
        child.num_preemptions = 0
        child.block_hashes = list(self.block_hashes)
        child._table, child._row = None, NO_ROW
        child._tokens = self.token_ids.copy()
        child._num_tokens, child._num_prompt_tokens = self.num_tokens, self.num_prompt_tokens
        child._num_computed_tokens = 0
        return child

    def restarted(self, num_tokens: int) -> Request:
        """This request with its first `num_tokens` tokens, in no table and with nothing computed.

        Raises:
            ValueError: that is less than its prompt, or more tokens than it has.
        """
        if not self.num_prompt_tokens <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"expected between {self.num_prompt_tokens} tokens, the prompt, and {self.num_tokens}, got {num_tokens}"
            )
        other = self.fork(self.request_id)
        other.num_preemptions = self.num_preemptions
        other._num_tokens = num_tokens
        if self.block_hasher is not None:
            del other.block_hashes[num_tokens // self.block_hasher.block_size :]
        other.extend_block_hashes()
        return other

    def extra_keys_of_block(self, start: int, end: int) -> tuple[Any, ...] | None:
        """What the hash of the block of tokens [start, end) covers beside its tokens and its parent."""
        return None if self._extra_keys is None else self._extra_keys.of_block(start, end)

    def event_extra_keys(self, first_block: int, end_block: int, block_size: int) -> list[tuple[Any, ...] | None]:
        """Extra keys of the blocks [first_block, end_block) of `block_size` tokens, in the form of KV events."""
        keys = self._extra_keys
        if keys is None:
            return [None] * (end_block - first_block)
        starts = range(first_block * block_size, end_block * block_size, block_size)
        return [keys.event_keys_of_block(start, start + block_size) for start in starts]

    def _make_extra_keys(self, origin: BlockOrigin) -> ExtraKeys | None:
        if origin is NO_ORIGIN and not self.mm_features and self.prompt_embeds is None:
            return None
        style = DEFAULT_EXTRA_KEY_STYLE if self.block_hasher is None else self.block_hasher.extra_key_style
        keys = ExtraKeys(
            mm_features=self.mm_features,
            lora=origin.lora,
            cache_salt=origin.cache_salt,
            prompt_embeds=self.prompt_embeds,
            weight_version=origin.weight_version,
            style=style,
        )
        return None if keys.is_empty else keys

    # -- for the table that holds the request ----------------------------------------------------------------------

    def stored_tokens(self) -> np.ndarray:  # int32[num_tokens]
        """The tokens of a request that owns no row, as a view that is not protected."""
        return self._tokens if self._tokens.size == self._num_tokens else self._tokens[: self._num_tokens]

    def move_to_row(self, table: RequestTable, row: int) -> None:
        """From here on the request reads its tokens and counts from the table's row, into which they were copied.

        The tokens stay here too, unread: they are a prefix of what the row will return.
        """
        self._row = row
        self._table = table  # last: with it the row is read

    def move_from_row(self, tokens: np.ndarray, num_prompt_tokens: int, num_computed_tokens: int) -> None:
        """From here on the request holds its state itself: these counts, and a copy of the row's int32[n] tokens."""
        self._num_prompt_tokens, self._num_computed_tokens = num_prompt_tokens, num_computed_tokens
        if tokens.size > self._tokens.size:
            self._tokens = tokens.copy()
        elif tokens.size > self._num_tokens:
            self._tokens[self._num_tokens : tokens.size] = tokens[self._num_tokens :]
        self._num_tokens = tokens.size
        self._table = None  # first when all is here: until then the row is read
        self._row = NO_ROW

    def extend_block_hashes(self) -> None:
        """Appends the hashes of full blocks that `block_hashes` lacks; to be called when tokens were appended."""
        if self.block_hasher is not None:
            self.block_hasher.extend(self.block_hashes, self.token_ids, self._extra_keys)


def _check_prompt(
    num_prompt_tokens: int, mm_features: Sequence[MultiModalFeature], prompt_embeds: np.ndarray | None
) -> None:
    if not num_prompt_tokens:
        raise ValueError("expected at least one prompt token, got an empty prompt")
    for item in mm_features:
        if item.end > num_prompt_tokens:
            raise ValueError(
                f"multimodal item {item.identifier!r}: expected it to end within the prompt's {num_prompt_tokens} "
                f"tokens, got tokens [{item.offset}, {item.end})"
            )
    if prompt_embeds is not None and (prompt_embeds.ndim != 2 or len(prompt_embeds) != num_prompt_tokens):
        raise ValueError(f"expected prompt_embeds [{num_prompt_tokens}, hidden], got shape {list(prompt_embeds.shape)}")


def _checked_items(items: Any) -> tuple[MultiModalFeature, ...]:
    if isinstance(items, tuple) and not items:
        return ()
    made = as_items(items, "mm_features as a sequence of MultiModalFeature", MAX_ITEMS)
    for item in made:
        if not isinstance(item, MultiModalFeature):
            raise ValueError(f"expected mm_features of MultiModalFeature, got {shown(item)}")
    return made


def _own_embeds(given: Any) -> np.ndarray:
    """A read-only copy."""
    embeds = np.array(given)
    if embeds.dtype.kind in "OSTU":
        raise ValueError(f"expected prompt_embeds of numbers, got {embeds.dtype}")
    return read_only(embeds)


def _checked_checkpoints(checkpoints: Iterable[int], num_prompt_tokens: int) -> tuple[int, ...]:
    """In ascending order, each once."""
    try:
        lengths = sorted({index(length) for length in checkpoints})
    except TypeError:
        raise ValueError(f"expected checkpoints as integers, got {shown(checkpoints)}") from None
    if len(lengths) > MAX_CHECKPOINTS:
        raise ValueError(f"expected at most {MAX_CHECKPOINTS} checkpoints, got {len(lengths)}")
    if lengths and not 1 <= lengths[0] <= lengths[-1] <= num_prompt_tokens:
        raise ValueError(
            f"expected checkpoints behind 1 to {num_prompt_tokens} tokens, those of the prompt, got {lengths}"
        )
    return tuple(lengths)


__all__ = ["MAX_CHECKPOINTS", "NO_ROW", "LoRARequest", "MultiModalFeature", "Request"]
