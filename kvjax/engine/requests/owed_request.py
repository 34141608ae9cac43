"""A request that is not answered yet, as text: what another process, or the same one started anew, goes on with.

Flow:    EngineRequest -> [OwedRequest] -> JSON -> [OwedRequest] -> LLMEngine.take_up
Source:  docs/clusters.md has the format

A request's tokens depend on its prompt, parameters and seed, and on their places. So one that is taken up with the
tokens made so far ends with the tokens that it would have had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.requests.known_names import check_names
from kvjax.engine.requests.sampling_params import SamplingParams


@dataclass(frozen=True, kw_only=True)
class OwedRequest:
    """One sample of a prompt of tokens alone.

    Args:
        request_id: of the sample.
        prompt_token_ids: the whole prompt.
        params: of one sample, with its seed; without a matcher.
        output_token_ids: tokens made so far, fewer than it may have.
        logprobs: of each of them.
        cache_salt: as of `LLMEngine.add_request`.
        lora_name: likewise.
        priority: likewise.
        checkpoints: likewise.

    Raises:
        ValueError: there are several samples, a matcher, no log-probability for each output token, or no room for
            another token.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    cache_salt: str | None = None
    lora_name: str | None = None
    priority: int = 0
    checkpoints: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.params.n != 1:
            raise ValueError(f"expected n=1, got {self.params.n}; each sample is owed by itself (`sample_ids`)")
        if self.params.token_matcher is not None:
            raise ValueError("expected no token_matcher: code cannot be written down; keep such requests yourself")
        num_tokens = len(self.output_token_ids)
        if len(self.logprobs) != num_tokens or num_tokens >= self.params.max_tokens:
            raise ValueError(
                f"expected fewer than {self.params.max_tokens} output tokens (max_tokens) and as many logprobs, got "
                f"{num_tokens} and {len(self.logprobs)}"
            )

    @property
    def begins_anew(self) -> bool:
        """Whether it is computed from its prompt: more than its tokens comes back, and that is not kept."""
        return self.params.logprobs is not None or self.params.prompt_logprobs is not None

    @classmethod
    def of(cls, request: EngineRequest, logprobs: Sequence[float]) -> OwedRequest:
        """An unfinished request as it stands, with those of its output tokens that have log-probabilities.

        Raises:
            ValueError: it has a matcher, or inputs beside its tokens.
        """
        own = request.request
        if own.mm_features:
            raise ValueError(f"expected a prompt of tokens alone, got {request.request_id!r} with other inputs")
        params = dataclasses.replace(request.params, n=1, seed=request.seed)
        one = cls(
            request_id=request.request_id,
            prompt_token_ids=tuple(own.prompt_token_ids.tolist()),
            params=params,
            cache_salt=own.cache_salt,
            lora_name=None if own.lora is None else own.lora.name,
            priority=request.priority,
            checkpoints=tuple(own.checkpoints),
        )
        tokens = own.output_token_ids[: len(logprobs)].tolist()
        return one if one.begins_anew else one.with_output(tuple(tokens), tuple(logprobs))

    def with_output(self, token_ids: tuple[int, ...], logprobs: tuple[float, ...]) -> OwedRequest:
        """The same, so far along."""
        return dataclasses.replace(self, output_token_ids=token_ids, logprobs=logprobs)

    def to_json(self) -> dict[str, Any]:
        """What `json.dumps` takes; parameters that have their defaults are left out."""
        values = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        return values | {"params": _params_to_json(self.params)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OwedRequest:
        """The request that `to_json` gave.

        Raises:
            ValueError: it is none.
        """
        check_names("fields of an owed request", values, cls.__dataclass_fields__)
        try:
            known = dict(values)
            params = dict(known.pop("params"))
            params["logit_bias"] = {int(token): bias for token, bias in params.get("logit_bias", {}).items()}
            for name in ("prompt_token_ids", "output_token_ids", "checkpoints"):
                known[name] = tuple(int(token) for token in known.get(name, ()))
            known["logprobs"] = tuple(float(one) for one in known.get("logprobs", ()))
            return cls(params=SamplingParams(**params), **known)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"expected an owed request, got {str(values)[:200]} ({error!r})") from error


def _params_to_json(params: SamplingParams) -> dict[str, Any]:
    default, found = SamplingParams(), {}
    for one in dataclasses.fields(params):
        value = getattr(params, one.name)
        if value != getattr(default, one.name):
            found[one.name] = value
    return found


__all__ = ["OwedRequest"]
