"""One golden model: its config, what a forward pass is given beside tokens, and how its weights are drawn.

Flow:    families_*.py -> [Family] -> weights.py -> folder -> oracle.py -> goldens.npz
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

Arrays = dict[str, np.ndarray]

PROMPT_LENGTHS = (45, 61, 98, 37, 80, 53)  # tokens; the first four prompts begin with the shared prefix
SHARED_PREFIX_TOKENS = 37
TINY: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def rope(rope_type: str = "default", **parameters: Any) -> dict[str, Any]:
    """`rope_parameters` of a config, a dict of its own, since transformers writes into it."""
    return {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}


class TokenInputs:
    """A prompt is tokens and nothing else."""

    def mark(self, prompt: np.ndarray, number: int) -> np.ndarray:
        """Prompt `number` with the tokens that other inputs ask for in their places."""
        return prompt

    def extras(self, model: torch.nn.Module, prompt: np.ndarray, number: int) -> Arrays:
        """What is saved with prompt `number` beside its tokens; constant over its continuation."""
        return {}

    def arguments(self, model: torch.nn.Module, token_ids: np.ndarray, extras: Arrays, start: int) -> dict[str, Any]:
        """Arguments of a pass over `token_ids[start:]` behind `start` tokens in the cache."""
        return {"input_ids": torch.from_numpy(token_ids[start:].astype(np.int64))[None]}


def nothing(model: torch.nn.Module) -> None:
    """Leaves the model as it is."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One golden model."""

    config: transformers.PreTrainedConfig
    model_class: Any = transformers.AutoModelForCausalLM
    inputs: TokenInputs = field(default_factory=TokenInputs)
    prompt_lengths: tuple[int, ...] = PROMPT_LENGTHS
    logits_stride: int = 8  # of the positions of a prompt whose logits are saved
    final_norm: str = "model.norm"
    flips_final_norm: bool = False  # random signs, else a tied embedding mostly repeats the token that it is given
    transposed: tuple[str, ...] = ()  # ends of names of weights [..., inputs, outputs]; others are [outputs, inputs]
    renamed: tuple[tuple[str, str], ...] = ()  # patterns and replacements of names that are saved unlike the Hub's
    settle: Callable[[torch.nn.Module], None] = nothing  # changes drawn weights before they are saved
    prepare: Callable[[torch.nn.Module], None] = nothing  # what the oracle changes of the model that it loaded
    constants: Arrays = field(default_factory=dict)  # saved once, under their names
