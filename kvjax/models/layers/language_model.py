"""What loading, saving and serving need of any model, and how its tensors are named in a checkpoint.

Flow:    token_ids[T], positions[T], cache -> [LanguageModel] -> hidden[T, d] -> [logits] -> float32[N, vocab]
"""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax
from flax import nnx

from kvjax.models.config import ModelConfig


class LanguageModel(nnx.Module):
    """A model over the flat tokens of a step. Stateless: what its layers remember is the cache's."""

    # Prefixes that may stand before the names of a checkpoint's tensors, that of `anchor` tells which one does.
    tensor_prefixes: ClassVar[tuple[str, ...]] = ("model.", "language_model.model.", "model.language_model.", "")
    anchor: ClassVar[str] = "embed_tokens.weight"
    # Attributes whose tensors stand beside the rest: "language_model.lm_head.", "language_model.model.layers.".
    unprefixed: ClassVar[frozenset[str]] = frozenset({"lm_head"})
    tensor_names: ClassVar[Mapping[str, str]] = {}  # of attributes whose tensors have other names
    # Checkpoints that differ from the above: patterns in names of tensors, with what stands there here.
    tensor_renames: ClassVar[Mapping[str, str]] = {}
    # Beginnings of the names of tensors that the model has no use for.
    ignored_tensors: ClassVar[tuple[str, ...]] = (
        "model.multi_modal_projector.",
        "model.vision_tower.",
        "model.visual.",
        "multi_modal_projector.",
        "vision_tower.",
        "visual.",
    )

    config: Any

    def for_length(self, max_model_len: int) -> Self:
        """The model as it is for sequences of at most `max_model_len` tokens, which scaled rotary embeddings go by.

        Itself where nothing changes, else another over the same arrays.
        """
        config: ModelConfig = self.config
        shorter = config.for_length(min(max_model_len, config.max_model_len))
        if shorter.rotation == config.rotation:
            return self
        model = nnx.merge(*nnx.split(self))
        model.config = shorter
        return model

    @classmethod
    def own_name(cls, name: str) -> str:
        """The name that a checkpoint's tensor has here."""
        for pattern, replacement in cls.tensor_renames.items():
            name = re.sub(pattern, replacement, name)
        return name

    @abc.abstractmethod
    def __call__(self, token_ids: jax.Array, positions: jax.Array, cache: Any) -> jax.Array:
        """Normed hidden states [T, d] of the last layer."""

    @abc.abstractmethod
    def logits(self, hidden: jax.Array) -> jax.Array:  # [N, d] -> float32[N, vocab]
        """Scores of the next token."""
