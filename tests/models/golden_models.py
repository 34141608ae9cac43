"""The committed goldens: models, prompts, Hugging Face's float32 logits and greedy continuations.

    for golden in goldens_of("gemma3"):          # also "llama", "qwen3", "demo"
        golden.prompt, golden.logits, golden.greedy
    load_model(model_folder("gemma3"))

The tiny models have no end token, so greedy continuations are 32 tokens long; the demo's end with its end token where
the model wrote one. At every greedy step the two best logits differ by more than 1e-3 (`golden.least_gap`), so any
correct float32 implementation must give the same tokens. Prompts are 37 to 98 tokens long (the demo's 77 to 255) and
cross the sliding window (16; the demo's 64); the first four of a tiny model share their first 37 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvjax.demo import demo_model_path

GOLDENS = Path(__file__).parent / "goldens"
TINY_MODELS = ("llama", "qwen3", "gemma3")
GOLDEN_MODELS = (*TINY_MODELS, "demo")


@dataclass(frozen=True)
class Golden:
    """One prompt of one model."""

    prompt: np.ndarray  # int32[num_tokens]
    positions: np.ndarray  # int32[num_positions] where logits were kept; the last is the prompt's last token
    logits: np.ndarray  # float32[num_positions, vocab] of a full forward pass
    greedy: np.ndarray  # int32[num_generated]
    least_gap: float  # between the two best logits, over the steps that made `greedy`


def model_folder(name: str) -> Path:
    """The Hugging Face folder of a golden model."""
    return demo_model_path() if name == "demo" else GOLDENS / name


def goldens_of(name: str) -> list[Golden]:
    """All prompts of a model."""
    with np.load(GOLDENS / name / "goldens.npz") as data:
        return [
            Golden(
                data[f"prompt_{i}"],
                data[f"positions_{i}"],
                data[f"logits_{i}"],
                data[f"greedy_{i}"],
                float(gap),
            )
            for i, gap in enumerate(data["least_gap"])
        ]
