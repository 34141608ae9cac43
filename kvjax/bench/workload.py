"""Prompts to measure with: of one length, some that share nothing and some that share their start.

Flow:    tokens of a text, or none -> [Workload.make] -> prompts -> kvjax.bench.measure, Hugging Face
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

FIRST_TOKEN = 3  # smaller ids are special tokens of most models


@dataclass(frozen=True)
class Workload:
    """What every run asks for. Tokens are ids."""

    prompts: list[list[int]]  # [batch][prompt_len] of different first tokens, as far as the vocabulary goes
    sharing: list[list[int]]  # likewise, but the first `shared_len` tokens of all are the same and the next one differs
    shared_len: int
    num_new_tokens: int  # of each prompt

    @classmethod
    def make(
        cls,
        vocab_size: int,
        text: Sequence[int] = (),
        *,
        batch: int,
        prompt_len: int,
        num_new_tokens: int,
        shared_len: int,
    ) -> Workload:
        """Windows of `text`, which goes on from its start, or random tokens where it has fewer than `2 * batch`.

        Raises:
            ValueError: a size is out of range.
        """
        for name, value, least, most in (
            ("batch", batch, 1, None),
            ("prompt_len", prompt_len, 1, None),
            ("num_new_tokens", num_new_tokens, 2, None),
            ("shared_len", shared_len, 0, prompt_len - 1),
        ):
            if value < least or (most is not None and value > most):
                wanted = f"of at least {least}" if most is None else f"in [{least}, {most}]"
                raise ValueError(f"expected {name} {wanted}, got {value}")
        if len(text) >= 2 * batch:
            starts = np.arange(2 * batch) * len(text) // (2 * batch)
            places = (starts[:, None] + np.arange(prompt_len)) % len(text)
            rows = np.asarray(text)[places]
        else:
            least = min(FIRST_TOKEN, vocab_size - 1)
            rows = np.random.default_rng(0).integers(least, vocab_size, (2 * batch, prompt_len))
        prompts, sharing = rows[:batch].copy(), rows[batch:].copy()
        different = np.arange(2 * batch) % vocab_size  # a text may repeat itself, so that windows of it would share
        prompts[:, 0] = different[:batch]
        sharing[:, :shared_len] = sharing[0, :shared_len]
        sharing[:, shared_len] = different[batch:]
        return cls(prompts.tolist(), sharing.tolist(), shared_len, num_new_tokens)
