"""What a request gives the model beside its tokens: an encoder's features, vectors for placeholder tokens, positions.

Flow:    LLMEngine.add_request -> [read_inputs] -> RequestInputs of the EngineRequest -> Request (hashes), steps
Source:  vLLM's multimodal inputs: an item is known by an identifier, its content's hash unless the caller names it

Everything is checked before a request is queued. Arrays are copied, and kept until the request ends: one that is
preempted loses its blocks, and gives its inputs again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from kvjax.core import MultiModalFeature
from kvjax.core.step.mrope_positions import NUM_AXES
from kvjax.core.tables.given_values import as_count, as_text, shown

MAX_PRIORITY = 2**63 - 1
NO_NUMBERS = "bcmMOSTU"  # kinds of dtypes; those of bfloat16 and float8 are "V", as of records
NO_PLACES = np.zeros(0, np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class MultimodalInput:
    """Vectors that a model takes in place of consecutive placeholder tokens: an image, a frame of a video, ...

    `identifier` names the content for the prefix cache: inputs of one name are taken to be equal.
    """

    embeds: np.ndarray  # [n, embedding_dim]
    start: int | None = None  # place of the first in the prompt; None: the first placeholder that is not taken yet
    identifier: str | None = None  # None: a hash of the vectors and their positions


@dataclass(frozen=True, eq=False)
class GivenInputs:
    """What a caller gives with a prompt, as `LLMEngine.add_request` says it; nothing is checked yet."""

    encoder_features: np.ndarray | None = None
    embeddings: Sequence[MultimodalInput] = ()
    prompt_positions: np.ndarray | None = None  # int[3, num_prompt_tokens]
    cache_salt: str | None = None
    lora_name: str | None = None
    priority: int = 0
    checkpoints: Sequence[int] = ()


def checked_inputs(given: GivenInputs) -> GivenInputs:
    """What needs no model to be checked, as plain values.

    Raises:
        ValueError: the priority is no integer, salt or adapter no text or empty, or `embeddings` are no inputs.
    """
    for name in ("cache_salt", "lora_name"):
        if getattr(given, name) is not None and not as_text(name, getattr(given, name)):
            raise ValueError(f"expected {name} that is not empty, or None, got ''")
    embeddings = given.embeddings
    if not isinstance(embeddings, Sequence) or not all(isinstance(one, MultimodalInput) for one in embeddings):
        raise ValueError(f"expected embeddings as a sequence of MultimodalInput, got {shown(embeddings)}")
    return replace(given, priority=as_priority(given.priority))


def as_priority(value: Any) -> int:
    """A priority of 64 bits.

    Raises:
        ValueError: it is none.
    """
    try:
        return as_count("priority", value, -MAX_PRIORITY, MAX_PRIORITY)
    except ValueError:
        raise ValueError(
            f"expected priority as an integer of 64 bits, lower is more urgent, got {shown(value)}"
        ) from None


class InputLimits(Protocol):
    """What a model takes: `ModelConfig` says it."""

    @property
    def encoder_shapes(self) -> Mapping[tuple[int, ...], int]:
        """Shapes of features, with the encoder tokens of each."""

    @property
    def embedding_dim(self) -> int | None:
        """Numbers of one vector; None: the model takes none."""

    @property
    def placeholder_token_ids(self) -> tuple[int, ...]:
        """Tokens that vectors stand for; empty: any."""

    @property
    def has_mrope(self) -> bool:
        """Whether positions have three axes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class RequestInputs:
    """Checked inputs of one request; samples of a prompt share them."""

    encoder_features: np.ndarray | None = None  # float32, of a shape that the model declares
    num_encoder_tokens: int = 0
    embeds: np.ndarray | None = None  # float32[n, embedding_dim] of all items
    places: np.ndarray = field(default_factory=lambda: NO_PLACES)  # int64[n] rising places in the prompt
    prompt_positions: np.ndarray | None = None  # int32[3, num_prompt_tokens]
    mm_features: tuple[MultiModalFeature, ...] = ()  # what hashes of blocks cover of them

    def num_embeds_from(self, num_tokens: int) -> int:
        """Vectors at or behind place `num_tokens`."""
        return self.places.size - int(np.searchsorted(self.places, num_tokens))


NO_INPUTS = RequestInputs()


def read_inputs(
    limits: InputLimits,
    token_ids: np.ndarray,  # int32[num_prompt_tokens]
    given: GivenInputs,
    max_embedding_rows: int,
) -> RequestInputs:
    """The inputs of one request, checked against what the model takes.

    Raises:
        ValueError: features, vectors or positions that the model does not take or lacks, or of another shape; vectors
            outside the prompt, over each other, on other tokens than placeholders, fewer of them than there are
            placeholders, or more than the engine's buffer holds.
    """
    features, num_encoder_tokens = _read_features(limits, given.encoder_features)
    embeds = [_read_embeds(limits, i, one) for i, one in enumerate(given.embeddings)]
    starts = _read_starts(limits, token_ids, given.embeddings, [len(one) for one in embeds], max_embedding_rows)
    spans = [np.arange(start, start + len(one)) for start, one in zip(starts, embeds, strict=True)]
    positions = _read_positions(limits, token_ids.size, spans, given.prompt_positions)
    if features is None and not embeds:
        return NO_INPUTS
    items = [] if features is None else [MultiModalFeature(_digest(features), 0, 1)]
    for item, one, span in zip(given.embeddings, embeds, spans, strict=True):
        own_positions = () if positions is None else (positions[:, span],)
        items.append(MultiModalFeature(item.identifier or _digest(one, *own_positions), int(span[0]), span.size))
    order = np.argsort(starts)
    return RequestInputs(
        encoder_features=features,
        num_encoder_tokens=num_encoder_tokens,
        embeds=np.concatenate([embeds[i] for i in order]) if embeds else None,
        places=np.concatenate([NO_PLACES, *(spans[i] for i in order)]),
        prompt_positions=positions,
        mm_features=tuple(sorted(items, key=lambda item: item.offset)),
    )


def _read_features(limits: InputLimits, features: np.ndarray | None) -> tuple[np.ndarray | None, int]:
    """A copy of the encoder's features, and how many tokens it makes of them."""
    shapes = limits.encoder_shapes
    text = " or ".join(str(list(shape)) for shape in shapes)
    if features is None:
        if shapes:
            raise ValueError(f"expected encoder_features of shape {text}, got none: the model reads an encoder")
        return None, 0
    if not shapes:
        raise ValueError("expected no encoder_features: the model reads no encoder")
    features = _as_vectors("encoder_features", features)
    if features.shape not in shapes:
        raise ValueError(f"expected encoder_features of shape {text}, got {list(features.shape)}")
    return features, shapes[features.shape]


def _read_embeds(limits: InputLimits, index: int, given: MultimodalInput) -> np.ndarray:  # float32[n, dim]
    """A copy of one input's vectors."""
    dim = limits.embedding_dim
    if dim is None:
        raise ValueError("expected no embeddings: the model takes none")
    name = f"embeddings[{index}]:"
    if given.identifier is not None and not as_text(f"{name} an identifier", given.identifier):
        raise ValueError(f"{name} expected an identifier that is not empty; pass None for a hash")
    embeds = _as_vectors(f"{name} embeds", given.embeds)
    if embeds.ndim != 2 or embeds.shape[1] != dim or not len(embeds):
        raise ValueError(f"embeddings[{index}]: expected embeds [n, {dim}] of n >= 1, got {list(embeds.shape)}")
    return embeds


def _read_starts(
    limits: InputLimits,
    token_ids: np.ndarray,
    embeddings: Sequence[MultimodalInput],
    lengths: list[int],
    max_embedding_rows: int,
) -> list[int]:
    """Where each input's vectors begin in the prompt."""
    if sum(lengths) > max_embedding_rows:
        raise ValueError(
            f"expected at most {max_embedding_rows} embeddings a request (max_embedding_rows of the engine), got "
            f"{sum(lengths)}"
        )
    is_placeholder = np.isin(token_ids, limits.placeholder_token_ids) | (not limits.placeholder_token_ids)
    is_taken = np.zeros(token_ids.size, bool)
    starts = []
    for i, (given, length) in enumerate(zip(embeddings, lengths, strict=True)):
        left = np.flatnonzero(is_placeholder & ~is_taken)
        start = int(left[0]) if left.size else token_ids.size
        if given.start is not None:
            start = as_count(f"embeddings[{i}]: start", given.start, -MAX_PRIORITY, MAX_PRIORITY)
        if not 0 <= start <= token_ids.size - length:
            raise ValueError(
                f"embeddings[{i}]: expected {length} places within the prompt's {token_ids.size} tokens, got "
                f"[{start}, {start + length})"
            )
        own = slice(start, start + length)
        if is_taken[own].any():
            raise ValueError(f"embeddings[{i}]: places [{start}, {start + length}) overlap those of another input")
        if not is_placeholder[own].all():
            place = start + int(is_placeholder[own].argmin())
            raise ValueError(
                f"embeddings[{i}]: expected placeholder tokens {limits.placeholder_token_ids} at places "
                f"[{start}, {start + length}), got token {token_ids[place]} at place {place}"
            )
        is_taken[own] = True
        starts.append(start)
    if limits.placeholder_token_ids and not is_taken[is_placeholder].all():
        raise ValueError(
            f"expected embeddings for all {is_placeholder.sum()} placeholder tokens of the prompt, got {sum(lengths)}"
        )
    return starts


def _read_positions(
    limits: InputLimits, num_tokens: int, spans: Sequence[np.ndarray], given: np.ndarray | None
) -> np.ndarray | None:  # int32[3, num_prompt_tokens]
    """A copy of the prompt's positions; text goes on behind the largest position before it, so spans decide them."""
    if given is None:
        if limits.has_mrope and spans:
            raise ValueError(f"expected prompt_positions [{NUM_AXES}, {num_tokens}] with embeddings, got none")
        return None
    if not limits.has_mrope or not spans:
        raise ValueError("expected no prompt_positions: they are for embeddings of models with multimodal positions")
    positions = _as_array("prompt_positions", given)
    if positions.shape != (NUM_AXES, num_tokens) or positions.dtype.kind not in "iu" or positions.min() < 0:
        raise ValueError(
            f"expected prompt_positions [{NUM_AXES}, {num_tokens}] of integers >= 0, got {positions.dtype}"
            f"{list(positions.shape)}"
        )
    is_text = np.ones(num_tokens, bool)
    is_text[np.concatenate(spans)] = False
    following = np.concatenate([[0], np.maximum.accumulate(positions.max(axis=0))[:-1] + 1])
    wrong = is_text & (positions != following).any(axis=0)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(
            f"expected prompt_positions of text to be one behind the largest before it, got "
            f"{positions[:, place].tolist()} at place {place}, where {following[place]} comes next"
        )
    return positions.astype(np.int32)


def _as_array(name: str, given: Any) -> np.ndarray:
    """A copy of what the caller gave."""
    try:
        return np.array(given)
    except (TypeError, ValueError) as error:  # rows of several lengths, for example
        raise ValueError(f"expected {name} as an array, got {shown(given)}: {error}") from None


def _as_vectors(name: str, given: Any) -> np.ndarray:  # float32
    """A copy of numbers that float32 holds."""
    array = _as_array(name, given)
    if array.dtype.kind in NO_NUMBERS or array.dtype.names is not None:
        raise ValueError(f"expected {name} of numbers, got {array.dtype}")
    with np.errstate(over="ignore"):
        vectors = array.astype(np.float32)
    is_finite = np.isfinite(vectors)
    if not is_finite.all():
        place = np.argwhere(~is_finite)[0].tolist()
        raise ValueError(f"expected {name} of finite numbers, got {vectors[tuple(place)]} at {place}")
    return vectors


def _digest(*arrays: np.ndarray) -> str:
    """Equal for equal arrays only."""
    content = hashlib.sha256()
    for array in arrays:
        content.update(f"{array.dtype}{array.shape}".encode())
        content.update(np.ascontiguousarray(array).tobytes())
    return content.hexdigest()


__all__ = ["NO_INPUTS", "GivenInputs", "InputLimits", "MultimodalInput", "RequestInputs", "read_inputs"]
