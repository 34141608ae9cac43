"""Prompts as requests of an engine: checked, tokenised, hashed, one request for each sample.

Flow:    LLMEngine.add_request -> [RequestMaker] -> EngineRequests of one prompt -> HostLoop.add
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from itertools import chain, count

import numpy as np

from kvjax.core import BlockHasher, LoRARequest, Request
from kvjax.core.requests.token_ids import as_token_ids
from kvjax.core.tables.given_values import as_text
from kvjax.engine.front.given_prompts import encoded
from kvjax.engine.requests.engine_request import EngineRequest, sample_ids
from kvjax.engine.requests.output_text import OutputText
from kvjax.engine.requests.request_inputs import GivenInputs, checked_inputs, read_inputs
from kvjax.engine.requests.sampling_params import MAX_SEED, SamplingParams, checked_params
from kvjax.engine.requests.stats import RequestStats
from kvjax.engine.sampling.prompt_logprobs import no_prompt_logprobs
from kvjax.engine.sampling.sampler_lines import SamplerSizes
from kvjax.engine.sampling.sampling_limits import SamplingLimits
from kvjax.models import LoadedModel


class RequestMaker:
    """Makes the requests of one engine, and counts those that it queued: their arrival and seeds follow."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        seed: int,
        hasher: BlockHasher | None,  # None: nothing is cached
        num_embedding_rows: int,
        sampler_sizes: SamplerSizes | None,  # None: the sampler knows no lines
        max_logprobs: int,
        clock: Callable[[], float],
    ) -> None:
        self.num_queued = 0
        self.weight_version: int | str | None = None  # of the weights that compute requests from here on
        self._model = model
        self._engine_seed = seed
        self._hasher = hasher
        self._num_embedding_rows = num_embedding_rows
        self._limits = SamplingLimits(
            model.config.vocab_size,
            None if model.tokenizer is not None else model.no_tokenizer,
            sampler_sizes,
            max_logprobs,
        )
        self._clock = clock

    def make(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams | None,
        request_id: str | None,
        given: GivenInputs,
        taken_ids: Container[str],
    ) -> list[EngineRequest]:
        """The samples of a prompt, the first first. Counts nothing.

        Raises:
            ValueError: as `LLMEngine.add_request`, but for requests that are too long.
        """
        given = checked_inputs(given)
        params = checked_params(params)
        if request_id is not None:
            request_id = as_text("request_id", request_id)
        names = sample_ids(self._new_id(params.n, taken_ids) if request_id is None else request_id, params.n)
        for name in names:
            if name in taken_ids:
                raise ValueError(f"request id {name!r} is in use; expected a new one")
        self._limits.check(params, self._stop_token_ids(params))
        first = self._first_sample(names[0], self._token_ids(prompt), params, given)
        others = [
            replace(
                first,
                request=first.request.fork(name),
                seed=self._seed(params, place),
                arrival=self.num_queued + place,
                sample=place,
                stats=replace(first.stats, request_id=name),
                logprobs=[],
                top_logprobs=[],
                first_sample=first,
                text=self._text(params, first.request.prompt_token_ids),
                matcher=params.token_matcher() if params.token_matcher is not None else None,
            )
            for place, name in enumerate(names[1:], start=1)
        ]
        return [first, *others]

    def _new_id(self, num_samples: int, taken_ids: Container[str]) -> str:
        """An id for a prompt whose caller gives none: no other such prompt's, and no sample's is taken."""
        first = f"request-{self.num_queued}"
        names = chain([first], (f"{first}-{i}" for i in count(1)))
        return next(name for name in names if not any(one in taken_ids for one in sample_ids(name, num_samples)))

    def _first_sample(
        self, request_id: str, token_ids: np.ndarray, params: SamplingParams, given: GivenInputs
    ) -> EngineRequest:
        inputs = read_inputs(self._model.config, token_ids, given, self._num_embedding_rows)
        request = Request(
            request_id,
            token_ids,
            mm_features=inputs.mm_features,
            lora=None if given.lora_name is None else LoRARequest(given.lora_name),
            cache_salt=given.cache_salt,
            prompt_logprobs=params.prompt_logprobs,
            checkpoints=given.checkpoints,
            weight_version=self.weight_version,
            block_hasher=self._hasher,
        )
        return EngineRequest(
            request=request,
            params=params,
            seed=self._seed(params, 0),
            stop_token_ids=self._stop_token_ids(params),
            arrival=self.num_queued,
            priority=given.priority,
            stats=RequestStats(request_id, request.num_prompt_tokens, self._clock()),
            inputs=inputs,
            text=self._text(params, token_ids),
            matcher=params.token_matcher() if params.token_matcher is not None else None,
            prompt_logprobs=no_prompt_logprobs(token_ids.size, params.prompt_logprobs),
        )

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        stop = frozenset(params.stop_token_ids)
        return stop if params.ignore_eos else stop | frozenset(self._model.config.eos_token_ids)

    def _text(self, params: SamplingParams, prompt_token_ids: np.ndarray) -> OutputText | None:
        tokenizer = self._model.tokenizer
        return None if tokenizer is None else OutputText(tokenizer, params, prompt_token_ids)

    def _token_ids(self, prompt: str | Sequence[int] | np.ndarray) -> np.ndarray:  # int32[num_prompt_tokens]
        """The prompt's tokens, all of the model's vocabulary."""
        token_ids = as_token_ids(encoded(self._model, prompt), "prompt_token_ids")
        largest = int(token_ids.max(initial=0))
        if largest >= self._model.config.vocab_size:
            raise ValueError(f"expected token ids below {self._model.config.vocab_size}, got {largest}")
        return token_ids

    def _seed(self, params: SamplingParams, place: int) -> int:
        """The seed of the prompt's sample number `place`."""
        if params.seed is not None:
            return (params.seed + place) % (MAX_SEED + 1)
        return int(np.random.SeedSequence((self._engine_seed, self.num_queued + place)).generate_state(1)[0])


__all__ = ["RequestMaker"]
