"""What of `SamplingParams` one engine can do: its vocabulary, its tokenizer, the sizes of its sampler's state.

Flow:    RequestMaker -> [SamplingLimits.check] -> ValueError, before anything is queued
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.engine.requests.sampling_params import SamplingParams
from kvjax.engine.sampling.sampler_lines import MAX_EDITS, SamplerSizes


@dataclass(frozen=True)
class SamplingLimits:
    """The limits of one engine."""

    vocab_size: int
    no_tokenizer: str | None  # what to say where there is none; None: there is one
    sampler_sizes: SamplerSizes | None  # None: a sampler of the caller's, which knows no lines
    max_logprobs: int = 0  # best tokens whose log-probabilities steps give

    def check(self, params: SamplingParams, stop_token_ids: frozenset[int]) -> None:
        """Checks the parameters of a request that ends with `stop_token_ids`.

        Raises:
            ValueError: token ids outside the vocabulary, more of them than a line holds, more log-probabilities than
                the engine was made for, text without a tokenizer, or no token that may come first.
        """
        for name in ("logit_bias", "allowed_token_ids", "bad_token_ids"):
            for token in getattr(params, name) or ():
                if not 0 <= token < self.vocab_size:
                    raise ValueError(f"expected {name} of token ids below {self.vocab_size}, got {token}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.max_logprobs:
                raise ValueError(
                    f"expected {name} of at most {self.max_logprobs} (EngineConfig.max_logprobs), got "
                    f"{getattr(params, name)}"
                )
        if params.prompt_logprobs is not None and not self.max_logprobs:
            raise ValueError("expected prompt_logprobs of an engine with EngineConfig.max_logprobs >= 1, got 0")
        self._check_lines(params, stop_token_ids)
        if self.no_tokenizer is not None and (params.stop_strings or params.stream_text):
            what = "stop strings" if params.stop_strings else "stream_text"
            raise ValueError(f"expected a model with a tokenizer for {what}, got one without: {self.no_tokenizer}")

    def _check_lines(self, params: SamplingParams, stop_token_ids: frozenset[int]) -> None:
        num_kept_off = len(stop_token_ids) if params.min_tokens else 0
        num_edits = len(params.logit_bias) + len(params.bad_token_ids) + num_kept_off
        if num_edits > MAX_EDITS:
            raise ValueError(
                f"expected at most {MAX_EDITS} tokens in logit_bias and bad_token_ids and, with min_tokens, "
                f"stop_token_ids, got {num_edits}"
            )
        allowed = (
            None if params.allowed_token_ids is None else set(params.allowed_token_ids) - set(params.bad_token_ids)
        )
        if params.min_tokens and allowed is not None and allowed <= stop_token_ids:
            raise ValueError("expected allowed_token_ids beside those that end the request with min_tokens, got none")
        if self.sampler_sizes is None and (num_edits or allowed is not None or params.asks_for_state):
            raise ValueError(
                "expected no penalties, logprobs, min_p, logit_bias, min_tokens, matcher, or allowed and bad tokens "
                "with a sample_fn of one's own, which does not know them"
            )


__all__ = ["SamplingLimits"]
