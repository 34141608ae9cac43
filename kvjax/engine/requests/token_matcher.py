"""Which tokens may come next, as a grammar says: the one hook for structured output.

Flow:    SamplingParams.token_matcher() -> [TokenMatcher] -> bitmask of each step -> sampler (jit)
Source:  bitmasks as xgrammar, llguidance and outlines_core fill them: bit i % 32 of word i // 32 is token i

A library's matcher fits with a few lines around it, such as xgrammar's:

    class XGrammar:
        def __init__(self, compiled): self._matcher = xgrammar.GrammarMatcher(compiled)
        def fill_bitmask(self, words): self._matcher.fill_next_token_bitmask(torch.from_numpy(words[None]))
        def accept_token(self, token_id): self._matcher.accept_token(token_id)

    SamplingParams(token_matcher=lambda: XGrammar(compiled))
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class TokenMatcher(Protocol):
    """Follows the output of one sample. The engine calls it from its own thread, and shows it each token once.

    A request that is preempted keeps its matcher: its tokens stay. After an exception in a step there is a new one,
    which is shown the tokens that stay. What the matcher raises ends its request (`FinishReason.ERROR`) with the token
    that comes then, and nothing else. No drafts are made for such a request.
    """

    def fill_bitmask(self, words: np.ndarray) -> None:  # int32[ceil(vocab_size / 32)], all bits set, to be overwritten
        """Sets the bits of the tokens that may come next, at least one, and clears the others."""

    def accept_token(self, token_id: int) -> object:
        """The token came. What comes back is not looked at."""


def packed(token_ids: np.ndarray, num_words: int) -> np.ndarray:  # int[n], all below 32 * num_words -> int32[num_words]
    """A bitmask of `token_ids`."""
    bits = np.zeros(32 * num_words, np.bool_)
    bits[token_ids] = True
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


__all__ = ["TokenMatcher", "packed"]
