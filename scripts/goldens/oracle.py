"""What transformers computes: logits of full passes, greedy continuations, and the gaps that make them robust.

Flow:    model, Family, prompt -> [Oracle] -> Golden -> goldens.npz

Every pass is a whole sequence without a cache. A gap is how far a choice is from another one: of the two best logits
at each greedy step, and of the last chosen and the first refused score of every top-k in the model (experts, groups of
experts, entries of an indexer) at every token. Noise is how far transformers' decoding with its own cache is from that:
what the order of float32 operations changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from scripts.goldens.family import Arrays, Family

MIN_GAP = 1e-3
MIN_CHOICE_GAP = 1e-4
MAX_NOISE = 4e-5
NUM_GREEDY_TOKENS = 32


@dataclass
class Choices:
    """The least gap of all calls of `torch.topk` since the last `reset`."""

    least_gap: float = float("inf")

    def note(self, scores: torch.Tensor, k: int, dim: int = -1) -> None:
        if k >= scores.shape[dim]:
            return
        ordered = scores.sort(dim=dim, descending=True).values
        chosen, refused = ordered.select(dim, k - 1), ordered.select(dim, k)
        gaps = (chosen - refused)[chosen > torch.finfo(chosen.dtype).min / 2]  # others are masked
        if gaps.numel():
            self.least_gap = min(self.least_gap, float(gaps.min()))


@contextmanager
def watched_choices() -> Iterator[Choices]:
    """Every top-k inside it is noted."""
    choices, function, method = Choices(), torch.topk, torch.Tensor.topk

    def topk(scores: torch.Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        choices.note(scores, k, dim)
        return function(scores, k, dim=dim, **options)

    torch.topk, torch.Tensor.topk = topk, topk  # type: ignore[assignment, method-assign]
    try:
        yield choices
    finally:
        torch.topk, torch.Tensor.topk = function, method  # type: ignore[method-assign]


@dataclass(frozen=True)
class Golden:
    """What is saved of one prompt, and how far its choices are from others."""

    prompt: np.ndarray  # int32[num_tokens]
    positions: np.ndarray  # int32[num_positions]
    logits: np.ndarray  # float32[num_positions, vocab] of a pass over the prompt
    greedy: np.ndarray  # int32[num_generated]
    decode_logits: np.ndarray  # float32[num_generated, vocab] of a pass over prompt and continuation
    least_gap: float
    choice_gap: float
    extras: Arrays  # of the family

    @property
    def is_robust(self) -> bool:
        """True if rounding cannot change a choice."""
        return self.least_gap > MIN_GAP and self.choice_gap > MIN_CHOICE_GAP


@dataclass
class Oracle:
    """One model of transformers; `choice_gap` is the least of its last pass."""

    family: Family
    model: torch.nn.Module
    choice_gap: float = field(default=float("inf"), init=False)

    def __post_init__(self) -> None:
        self.family.prepare(self.model)

    def run(self, token_ids: np.ndarray, extras: Arrays, start: int = 0, **options: Any) -> Any:
        """Outputs of a pass over `token_ids[start:]`."""
        arguments = self.family.inputs.arguments(self.model, token_ids, extras, start)
        with torch.no_grad(), watched_choices() as choices:
            out = self.model(**arguments, **options)
        self.choice_gap = choices.least_gap
        return out

    def logits(self, token_ids: np.ndarray, extras: Arrays) -> np.ndarray:  # float32[len(token_ids), vocab]
        """Logits of one full pass, without a cache."""
        return self.run(token_ids, extras, use_cache=False).logits[0].float().numpy()

    def greedy(self, prompt: np.ndarray, extras: Arrays, eos: int | None) -> tuple[np.ndarray, float]:
        """The greedy continuation, ended behind `eos` if it comes or where a choice is too close; the least gap."""
        token_ids, least_gap = prompt, float("inf")
        for _ in range(NUM_GREEDY_TOKENS):
            logits = self.logits(token_ids, extras)[-1]
            second, best = np.sort(logits)[-2:]
            least_gap = min(least_gap, float(best - second))
            token_ids = np.append(token_ids, np.int32(logits.argmax()))
            if token_ids[-1] == eos or self.choice_gap <= MIN_CHOICE_GAP:
                break
        return token_ids[len(prompt) :].astype(np.int32), least_gap

    def golden(self, prompt: np.ndarray, number: int, eos: int | None = None) -> Golden:
        """Prompt `number` of a model."""
        extras = self.family.inputs.extras(self.model, prompt, number)
        greedy, least_gap = self.greedy(prompt, extras, eos)
        logits = self.logits(np.append(prompt, greedy[:-1]), extras)
        choice_gap = self.choice_gap
        positions = np.arange(len(prompt) - 1, -1, -self.family.logits_stride, dtype=np.int32)[::-1]
        return Golden(
            prompt,
            positions,
            self.logits(prompt, extras)[positions],
            greedy,
            logits[len(prompt) - 1 :],
            least_gap,
            choice_gap,
            extras,
        )

    def noise(self, golden: Golden) -> float:
        """The largest difference of logits that transformers itself has between decoding with its cache and without."""
        prompt, token_ids = golden.prompt, np.append(golden.prompt, golden.greedy[:-1])
        out = self.run(prompt, golden.extras, use_cache=True)
        largest = 0.0
        for step, end in enumerate(range(len(prompt) + 1, len(token_ids) + 2)):
            difference = np.abs(out.logits[0, -1].numpy() - golden.decode_logits[step]).max()
            largest = max(largest, float(difference))
            if end <= len(token_ids):
                name = "cache" if "cache" in out else "past_key_values"  # newer models take the former alone
                cache = {"use_cache": True, name: out[name]}
                out = self.run(token_ids[:end], golden.extras, end - 1, **cache)
        return largest
