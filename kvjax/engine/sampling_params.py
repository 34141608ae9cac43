"""How one request's tokens are chosen, when it ends, and what comes back beside its tokens.

Flow:    caller -> [SamplingParams] -> RequestMaker (checks) -> SamplingTable, SamplerLines (host) -> sampler (jit)
Source:  vLLM SamplingParams (names, defaults and ranges)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvjax.engine.known_names import check_names
from kvjax.engine.token_matcher import TokenMatcher

MAX_SEED = 2**32 - 1
MAX_BIAS = 100.0
MAX_PENALTY = 2.0


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks of the sampler.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 keep every token; `min_p` keeps those of at least that
    share of the best one's probability. A request without a `seed` gets one from the engine's seed and its place in
    the order of submission. `n` samples of a prompt are as many requests, of the seeds `seed`, `seed + 1`, ...; the
    prompt is computed once for those that find room when it is.

    Logits are changed in this order: `logit_bias` is added; those of tokens in prompt or output are divided by
    `repetition_penalty` where positive and multiplied where negative; `frequency_penalty` times a token's count in the
    output, and `presence_penalty` where it is there, are subtracted; tokens outside `allowed_token_ids`, those of
    `bad_token_ids` and those that `token_matcher` forbids are never chosen. It makes an object that follows one sample
    (`TokenMatcher`); such a request's step waits for the token before it, so it gains nothing by `async_scheduling`.

    A request ends with the first of `max_tokens` tokens, a token of `stop_token_ids`, the model's end-of-sequence token
    unless `ignore_eos`, or the token with which its text contains one of `stop`; the token that ends it is part of the
    output, the stop string and what is behind it is part of the text only with `include_stop_str_in_output` (the
    string). Neither ends it before it has `min_tokens` tokens.

    `logprobs` and `prompt_logprobs` ask for the log-probabilities of so many best tokens at each token of output and
    prompt, under the model: temperature 1, nothing masked; those of output tokens themselves always come. With
    `stream_text` steps bring the text that they complete (`StepOutput.text`). Text leaves special tokens out with
    `skip_special_tokens`.

    Raises:
        ValueError: a name is unknown, a value is outside its range, a stop string has no text, or values contradict
            each other.
    """

    n: int = 1
    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)  # by token id
    allowed_token_ids: tuple[int, ...] | None = None  # None: all
    bad_token_ids: tuple[int, ...] = ()
    token_matcher: Callable[[], TokenMatcher] | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stream_text: bool = False
    skip_special_tokens: bool = True

    def __new__(cls, **values: Any) -> SamplingParams:
        """An object without values: `__init__` would refuse an unknown name by a TypeError that tells no other."""
        check_names("sampling parameters", values, cls.__dataclass_fields__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_counts()
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"expected a finite temperature >= 0 (0 is greedy), got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"expected top_p in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p <= 1.0:
            raise ValueError(f"expected min_p in [0, 1], got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -MAX_PENALTY <= getattr(self, name) <= MAX_PENALTY:
                raise ValueError(f"expected {name} in [-2, 2], got {getattr(self, name)}")
        if not 0.0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"expected a finite repetition_penalty > 0 (1 is none), got {self.repetition_penalty}")
        if self.seed is not None and not 0 <= operator.index(self.seed) <= MAX_SEED:
            raise ValueError(f"expected seed in [0, {MAX_SEED}], got {self.seed}")
        self._set("logit_bias", _as_bias(self.logit_bias))
        self._set("stop", _as_stop_strings(self.stop))
        for name in ("stop_token_ids", "bad_token_ids"):
            self._set(name, _as_ids(getattr(self, name)))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _as_ids(self.allowed_token_ids))
            if not set(self.allowed_token_ids) - set(self.bad_token_ids):
                raise ValueError("expected allowed_token_ids that bad_token_ids do not all forbid, got none")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is once checked."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before them beside what the model computes."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def asks_for_state(self) -> bool:
        """Whether it has penalties, `min_p`, `logprobs` or a matcher, which are in the sampler's state."""
        return self.has_penalties or self.min_p > 0 or bool(self.logprobs) or self.token_matcher is not None

    def _check_counts(self) -> None:
        for name, least in (("n", 1), ("max_tokens", 1), ("min_tokens", 0)):
            if operator.index(getattr(self, name)) < least:
                raise ValueError(f"expected {name} >= {least}, got {getattr(self, name)}")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"expected min_tokens of at most max_tokens, got {self.min_tokens} and {self.max_tokens}")
        if operator.index(self.top_k) < 0:
            raise ValueError(f"expected top_k >= 0 (0 keeps every token), got {self.top_k}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and operator.index(value) < 0:
                raise ValueError(f"expected {name} >= 0 or None, got {value}")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def _as_ids(token_ids: Iterable[Any]) -> tuple[int, ...]:
    return tuple(operator.index(token) for token in token_ids)


def _as_bias(logit_bias: Mapping[Any, Any]) -> dict[int, float]:
    bias = {operator.index(token): float(value) for token, value in logit_bias.items()}
    for token, value in bias.items():
        if math.isnan(value) or abs(value) > MAX_BIAS:
            raise ValueError(f"expected logit_bias in [-100, 100], got {value} for token {token}")
    return bias


def _as_stop_strings(stop: str | Sequence[str]) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop)
    for one in strings:
        if not isinstance(one, str) or not one:
            raise ValueError(f"expected stop strings of at least one character, got {one!r}")
    return strings
