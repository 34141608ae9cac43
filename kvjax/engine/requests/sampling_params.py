"""How one request's tokens are chosen, when it ends, and what comes back beside its tokens.

Flow:    caller -> [SamplingParams] -> RequestMaker (checks) -> SamplingTable, SamplerLines (host) -> sampler (jit)
Source:  vLLM SamplingParams (names, defaults and ranges)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kvjax.core.tables.given_values import as_count, as_flag, as_ids, as_items, as_number, shown
from kvjax.engine.requests.known_names import check_names
from kvjax.engine.requests.token_matcher import TokenMatcher

MAX_SEED = 2**32 - 1
MAX_BIAS = 100.0
MAX_PENALTY = 2.0
MAX_SAMPLES = 1 << 14  # of one prompt
MAX_STOP_STRINGS = 1 << 10
LEAST_TEMPERATURE = 1e-5  # below it is greedy: the best token has all but nothing of the probability

RANGES: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("temperature", "a finite temperature >= 0 (0 is greedy)", lambda value: value >= 0.0),
    ("top_p", "top_p in (0, 1]", lambda value: 0.0 < value <= 1.0),
    ("min_p", "min_p in [0, 1]", lambda value: 0.0 <= value <= 1.0),
    ("presence_penalty", "presence_penalty in [-2, 2]", lambda value: abs(value) <= MAX_PENALTY),
    ("frequency_penalty", "frequency_penalty in [-2, 2]", lambda value: abs(value) <= MAX_PENALTY),
    ("repetition_penalty", "a finite repetition_penalty > 0 (1 is none)", lambda value: value > 0.0),
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """What one request asks of the sampler.

    Logits are changed in this order: bias, repetition penalty, frequency and presence penalties, tokens that may not be
    chosen. A request ends with the first of: `max_tokens` tokens, a token of `stop_token_ids`, the model's
    end-of-sequence token, a stop string in its text.

    Args:
        n: samples of the prompt, each a request, of the seeds `seed`, `seed + 1`, ...; the prompt is computed once for
            those that find room when it is.
        max_tokens: most output tokens.
        min_tokens: output tokens before which no stop token and no stop string ends the request.
        temperature: 0 is greedy, and so is all below 1e-5.
        top_p: share of the probability that the best tokens kept have together; 1 keeps every token.
        top_k: best tokens that are kept; 0 keeps every token.
        min_p: least share of the best token's probability; 0 keeps every token.
        presence_penalty: subtracted from the logits of tokens in the output.
        frequency_penalty: subtracted for each time that a token is in the output.
        repetition_penalty: divides the positive logits of tokens in prompt or output, and multiplies the negative ones.
        logit_bias: added to logits, by token id.
        allowed_token_ids: other tokens are never chosen; None: all are allowed.
        bad_token_ids: tokens that are never chosen.
        token_matcher: makes an object that follows one sample and forbids tokens (`TokenMatcher`). A step of such a
            request waits for the token before it, so it gains nothing by `async_scheduling`.
        seed: None: from the engine's seed and the place in the order of submission.
        stop: strings that end the request; they are no part of its text.
        include_stop_str_in_output: whether the text contains the stop string.
        stop_token_ids: tokens that end the request; they are part of the output.
        ignore_eos: whether the model's end-of-sequence token does not end the request.
        logprobs: best tokens at each output token whose log-probabilities come back, under the model: temperature 1,
            nothing masked. Those of output tokens themselves always come.
        prompt_logprobs: likewise at each prompt token.
        stream_text: whether steps bring the text that they complete (`TokenOutput.text`).
        skip_special_tokens: whether text leaves special tokens out.

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
        self._check_numbers()
        for name in ("include_stop_str_in_output", "ignore_eos", "stream_text", "skip_special_tokens"):
            self._set(name, as_flag(name, getattr(self, name)))
        if self.token_matcher is not None and not callable(self.token_matcher):
            raise ValueError(f"expected token_matcher that makes a matcher, or None, got {shown(self.token_matcher)}")
        self._set("logit_bias", _as_bias(self.logit_bias))
        self._set("stop", _as_stop_strings(self.stop))
        for name in ("stop_token_ids", "bad_token_ids"):
            self._set(name, as_ids(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", as_ids("allowed_token_ids", self.allowed_token_ids))
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
        self._set("n", as_count("n", self.n, 1, MAX_SAMPLES))
        self._set("max_tokens", as_count("max_tokens", self.max_tokens, 1))
        self._set("min_tokens", as_count("min_tokens", self.min_tokens))
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"expected min_tokens of at most max_tokens, got {self.min_tokens} and {self.max_tokens}")
        self._set("top_k", as_count("top_k", self.top_k, note=" (0 keeps every token)"))
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._set(name, as_count(name, getattr(self, name), note=" or None"))
        if self.seed is not None:
            self._set("seed", as_count("seed", self.seed, 0, MAX_SEED, f" or None, in [0, {MAX_SEED}]"))

    def _check_numbers(self) -> None:
        for name, expected, is_good in RANGES:
            given = getattr(self, name)
            number = as_number(given, expected)
            if not is_good(number):
                raise ValueError(f"expected {expected}, got {shown(given)}")
            self._set(name, number)
        if 0.0 < self.temperature < LEAST_TEMPERATURE:
            self._set("temperature", 0.0)

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def checked_params(params: Any) -> SamplingParams:
    """`params`, or the defaults for None.

    Raises:
        ValueError: it is something else.
    """
    if params is not None and not isinstance(params, SamplingParams):
        remedy = ": write SamplingParams(**params)" if isinstance(params, Mapping) else ""
        raise ValueError(f"expected params as SamplingParams or None, got {shown(params)}{remedy}")
    return SamplingParams() if params is None else params


def _as_bias(logit_bias: Any) -> dict[int, float]:
    if not isinstance(logit_bias, Mapping):
        raise ValueError(f"expected logit_bias as a mapping of token ids to numbers, got {shown(logit_bias)}")
    bias = {}
    for token, value in zip(as_ids("logit_bias", logit_bias), logit_bias.values(), strict=True):
        with suppress(ValueError):
            bias[token] = as_number(value, "logit_bias in [-100, 100]")
        if not abs(bias.get(token, math.inf)) <= MAX_BIAS:
            got = bias.get(token, shown(value))
            raise ValueError(f"expected logit_bias in [-100, 100], got {got} for token {token}")
    return bias


def _as_stop_strings(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else as_items(stop, "stop as a text or several", MAX_STOP_STRINGS)
    for one in strings:
        if not isinstance(one, str) or not one:
            raise ValueError(f"expected stop strings of at least one character, got {shown(one)}")
    return strings
