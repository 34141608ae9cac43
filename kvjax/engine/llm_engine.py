"""The engine: prompts in, tokens out, step by step.

Flow:    prompts -> [LLMEngine] -> HostLoop -> StepPlan -> UpdateStep (device) -> tokens -> HostLoop -> StepOutputs
Source:  ARCHITECTURE.md, "Engine"; names of vLLM's LLMEngine

One step, in order: begin (`HostLoop`: blocks are allocated, numpy arrays of the step are made), dispatch (the device
works, the host goes on), read (sampled tokens), end (`HostLoop`: tokens to their requests, blocks of ended requests
are freed). With `async_scheduling` step n + 1 is dispatched before step n is read: its decode tokens are taken on the
device from step n's samples.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from kvjax.core import BlockHasher, KVCacheManager, LoRARequest, MissReasons, Request
from kvjax.core.requests.token_ids import as_token_ids
from kvjax.device import Buckets, EmbedBuffer, Placement, UpdateStep, create_pages, make_update_step
from kvjax.device.update_step import SampleFn
from kvjax.device.update_step import StepOutput as DeviceOutput
from kvjax.engine.config import EngineConfig
from kvjax.engine.engine_request import EngineRequest, sample_ids
from kvjax.engine.host_loop import HostLoop, HostStep
from kvjax.engine.outputs import NO_OUTPUTS, GenerationResult, StepOutputs
from kvjax.engine.request_inputs import GivenInputs, MultimodalInput, read_inputs
from kvjax.engine.running_inputs import RunningInputs
from kvjax.engine.sampler import sample
from kvjax.engine.sampling_params import MAX_SEED, SamplingParams
from kvjax.engine.scheduler import Scheduler, SchedulerConfig
from kvjax.engine.stats import RequestStats
from kvjax.models import LoadedModel, StreamingWindow, load_model
from kvjax.planning import plan_kv_cache


@dataclass(frozen=True)
class _Flight:
    """A dispatched step that is not read yet."""

    step: HostStep
    sampled: jax.Array  # int32[max_num_requests]
    logprobs: jax.Array  # float32[max_num_requests]


class LLMEngine:
    """One model, one cache, one queue. Owned by one thread; `warmup`, `step` and `generate` wait for the device.

    `plan` says how the cache is laid out, `manager` and `scheduler` what is in it, `step_stats` what steps cost.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        mesh: jax.sharding.Mesh | None = None,
        like: LLMEngine | None = None,
        sample_fn: SampleFn = sample,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An engine for `model`, whose weights lie on `mesh` (None: on one device).

        `sample_fn` chooses tokens inside the step; its second result are their float32[N] log-probabilities.

        With `like` the compiled steps of that engine are used instead of new ones: it has the same model, mesh and
        cache layout, and its steps are at least as large.

        Raises:
            ValueError: the model allows fewer tokens than `max_model_len`, or `like` does not fit.
            MemoryBudgetError: `memory_bytes` or `num_blocks` does not hold one request of `max_model_len` tokens.
        """
        if config.max_model_len > model.config.max_model_len:
            raise ValueError(
                f"expected max_model_len of at most {model.config.max_model_len} (the model's), "
                f"got {config.max_model_len}"
            )
        self.model = model
        self.config = config
        self._clock = clock
        self._sample_fn = sample_fn
        self._placement = _placement(model, mesh)
        self.plan = plan_kv_cache(
            model.config.kv_cache_specs(config.block_size, config.dtype),
            max_model_len=config.max_model_len,
            memory_bytes=config.memory_bytes,
            num_blocks=config.num_blocks,
            max_in_flight_tokens=config.max_in_flight_tokens,
            platform=jax.default_backend(),
            tensor_parallel=self._placement.num_shards,
            hybrid=config.hybrid,
            shared_layers=model.config.shared_layers,
        )
        self._least_block_size = math.gcd(*(group.spec.block_size for group in self.plan.groups))
        self.manager = KVCacheManager(
            self.plan.config,
            config.max_model_len,
            self._least_block_size,
            enable_caching=config.enable_prefix_caching,
            same_step_hits=not config.sub_block_hits,
            sub_block_hits=config.sub_block_hits,
            eviction_policy=config.eviction_policy,
            miss_reasons=MissReasons() if config.miss_reasons else None,
            zero_new_pages=config.zero_new_pages,
            log_stats=True,
            max_num_reqs=config.max_num_seqs,
            max_in_flight_tokens=config.max_in_flight_tokens,
        )
        self.scheduler = Scheduler(
            self.manager,
            SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                watermark=config.watermark,
                max_steps_in_flight=config.max_steps_in_flight,
            ),
            RunningInputs(self._num_embedding_rows, has_mrope=model.config.has_mrope),
        )
        self._hasher = (
            BlockHasher(self._least_block_size, config.hash_algorithm, seed=str(config.seed))
            if config.enable_prefix_caching
            else None
        )
        self._num_added = 0
        self._update_step = self._make_update_step() if like is None else self._shared_update_step(like)
        self._loop = HostLoop(
            self.manager,
            self.scheduler,
            num_step_stats=config.num_step_stats,
            pick_shape=self._update_step.buckets.pick,
            clock=clock,
        )
        self.step_stats = self._loop.step_stats
        self._pages = create_pages(self.plan.config, self._placement)
        self._embeds = self._make_embed_buffer()
        self._previous: jax.Array | None = None  # sampled tokens of the newest step, on the device
        self._flights: deque[_Flight] = deque()

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        config: EngineConfig,
        *,
        num_devices: int = 1,
        dtype: str | None = None,
        streaming: StreamingWindow | None = None,
    ) -> LLMEngine:
        """An engine for the Hugging Face model in `folder`, its heads split over `num_devices` devices.

        `dtype` is that of the weights, None: the checkpoint's own. With `streaming` every layer sees a window and the
        first tokens in place of all.

        Raises:
            ConfigError, CheckpointError: the folder holds no model that can be loaded.
            ValueError: there are fewer devices, a limit does not fit the model, or weights have no such dtype.
        """
        mesh = Placement.over_heads(num_devices).mesh if num_devices > 1 else None
        model = load_model(folder, dtype, mesh, max_model_len=config.max_model_len, streaming=streaming)
        return cls(model, config, mesh=mesh)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return self.scheduler.num_unfinished

    @property
    def num_buckets(self) -> int:
        """Step shapes that the configuration allows."""
        return len(self._update_step.buckets.steps)

    def warmup(self, on_compiled: Callable[[int], object] | None = None) -> None:
        """Compiles every step shape, calling `on_compiled(1)` after each. Nothing compiles later."""
        nothing = np.zeros(0, np.int64)
        sampling = self._loop.sampling.batch(nothing, nothing)
        embeds = None
        if self._embeds is not None:
            self._embeds.warmup()
            embeds = self._embeds.array
        self._pages = self._update_step.warmup(self._pages, sampling=sampling, embeds=embeds, on_compiled=on_compiled)

    def add_request(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        encoder_features: np.ndarray | None = None,
        embeddings: Sequence[MultimodalInput] = (),
        prompt_positions: np.ndarray | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> str:
        """Queues a prompt, text or token ids, behind all others; its id.

        With `params.n` > 1 it is that of the first sample; the others have the ids of `sample_ids`. Requests share
        cached prefixes only with those of equal inputs, salt and adapter.

        Args:
            prompt: text, or int[num_prompt_tokens].
            params: how to sample; None: the defaults.
            request_id: None: one is made.
            encoder_features: float[...] of a shape that the model's config declares, for models that read an encoder.
            embeddings: vectors for placeholder tokens, for models that take them.
            prompt_positions: int[3, num_prompt_tokens] for models with multimodal positions, where there are vectors.
            cache_salt: text that keeps the request's cached blocks apart from those of other salts.
            lora_name: adapter that keeps them apart likewise; what the model computes is not changed by it.

        Raises:
            ValueError: an id is taken, the prompt is empty or has ids outside the vocabulary, text comes without a
                tokenizer, the model takes other inputs (`read_inputs`), or the request can never run. Nothing is
                changed.
        """
        given = GivenInputs(encoder_features, embeddings, prompt_positions, cache_salt, lora_name)
        samples = self._make_samples(prompt, params, request_id, given)
        self._loop.add(samples)
        self._num_added += len(samples)
        return samples[0].request_id

    def check_request(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        encoder_features: np.ndarray | None = None,
        embeddings: Sequence[MultimodalInput] = (),
        prompt_positions: np.ndarray | None = None,
        cache_salt: str | None = None,
        lora_name: str | None = None,
    ) -> None:
        """Raises ValueError if `add_request` would refuse the prompt: to know before a long warm-up."""
        given = GivenInputs(encoder_features, embeddings, prompt_positions, cache_salt, lora_name)
        self.scheduler.check_fits(self._make_samples(prompt, params, request_id, given)[0])

    def abort(self, request_id: str) -> GenerationResult:
        """Ends a request now; what it has so far.

        Raises:
            UnknownRequestError: no unfinished request has that id.
        """
        return self._loop.abort(request_id)

    def step(self) -> StepOutputs:
        """Runs one step; the tokens that became known, which may be none. Without requests it does nothing.

        Returns:
            Columns, which are also a sequence of `StepOutput`.
        """
        step = self._loop.begin_step()
        if step is not None:
            self._flights.append(self._dispatch(step))
        if self._flights and (step is None or len(self._flights) >= self.config.max_steps_in_flight):
            flight = self._flights.popleft()
            return self._loop.end_step(flight.step, np.asarray(flight.sampled), np.asarray(flight.logprobs))
        return NO_OUTPUTS

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | np.ndarray],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        inputs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[GenerationResult]:
        """Runs all prompts to their ends, one `params` for all or one each; results in the order of the prompts.

        `inputs` are what each prompt has beside its tokens: arguments of `add_request` by name. Of a prompt with
        `params.n` > 1 there are as many results, one after another.

        Raises:
            ValueError: other requests are unfinished, there is not one `params` or inputs a prompt, or `add_request`
                refuses one. Nothing is left queued.
        """
        if self.num_unfinished:
            raise ValueError(f"expected an engine without requests, got {self.num_unfinished} unfinished")
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"expected one params or {len(prompts)}, got {len(each)}")
        given: Sequence[Mapping[str, Any]] = [{}] * len(prompts) if inputs is None else inputs
        if len(given) != len(prompts):
            raise ValueError(f"expected inputs of {len(prompts)} prompts, got {len(given)}")
        request_ids: list[str] = []
        try:
            for prompt, one, more in zip(prompts, each, given, strict=True):
                request_ids += sample_ids(self.add_request(prompt, one, **more), 1 if one is None else one.n)
        except ValueError:
            for request_id in request_ids:
                self.abort(request_id)
            raise
        results: dict[str, GenerationResult] = {}
        while self.num_unfinished or self._flights:
            results |= {result.request_id: result for result in self.step().results.values()}
        return [results[request_id] for request_id in request_ids]

    def check_invariants(self) -> None:
        """Checks the laws of scheduler and manager.

        Raises:
            InvariantError: one does not hold.
        """
        self.scheduler.check_invariants()
        self.manager.check_invariants()

    def _make_update_step(self) -> UpdateStep:
        config = self.config
        buckets = Buckets.default(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            block_size=self._least_block_size,
            max_buckets=config.max_buckets,
        )
        return make_update_step(
            self.model.module,
            self.plan.config,
            buckets,
            placement=self._placement,
            sample_fn=self._sample_fn,
            mrope=self.model.config.has_mrope,
            encoder_shapes=self.model.config.encoder_shapes,
            embeds=self.model.config.embedding_dim is not None,
        )

    @property
    def _num_embedding_rows(self) -> int:
        """Rows of the buffer of vectors; 0 for models that take none."""
        return 0 if self.model.config.embedding_dim is None else self.config.max_embedding_rows

    def _make_embed_buffer(self) -> EmbedBuffer | None:
        dim = self.model.config.embedding_dim
        if dim is None:
            return None
        return EmbedBuffer(self._num_embedding_rows, dim, self.model.config.dtype, self._placement)

    def _shared_update_step(self, like: LLMEngine) -> UpdateStep:
        layouts = (self.plan.config, self._placement)
        if like.model.module is not self.model.module or (like.plan.config, like._placement) != layouts:
            raise ValueError("expected `like` to have this engine's model, mesh and cache layout, got another")
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(like.config, name) < getattr(self.config, name):
                raise ValueError(
                    f"expected `like` to allow {name} of at least {getattr(self.config, name)}, "
                    f"got {getattr(like.config, name)}"
                )
        if like._num_embedding_rows != self._num_embedding_rows:
            raise ValueError(
                f"expected `like` to have max_embedding_rows of {self._num_embedding_rows}, "
                f"got {like._num_embedding_rows}"
            )
        return like._update_step

    def _make_samples(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams | None,
        request_id: str | None,
        given: GivenInputs,
    ) -> list[EngineRequest]:
        params = SamplingParams() if params is None else params
        names = sample_ids(f"request-{self._num_added}" if request_id is None else request_id, params.n)
        for name in names:
            if name in self._loop.requests:
                raise ValueError(f"request id {name!r} is in use; expected a new one")
        token_ids = as_token_ids(self._token_ids(prompt), "prompt_token_ids")
        largest = int(token_ids.max(initial=0))
        if largest >= self.model.config.vocab_size:
            raise ValueError(f"expected token ids below {self.model.config.vocab_size}, got {largest}")
        inputs = read_inputs(self.model.config, token_ids, given, self._num_embedding_rows)
        request = Request(
            names[0],
            token_ids,
            mm_features=inputs.mm_features,
            lora=None if given.lora_name is None else LoRARequest(given.lora_name),
            cache_salt=given.cache_salt,
            block_hasher=self._hasher,
        )
        stop = frozenset(params.stop_token_ids)
        first = EngineRequest(
            request=request,
            params=params,
            seed=self._seed(params, 0),
            stop_token_ids=stop if params.ignore_eos else stop | frozenset(self.model.config.eos_token_ids),
            priority=self._num_added,
            stats=RequestStats(names[0], request.num_prompt_tokens, self._clock()),
            inputs=inputs,
        )
        others = [
            replace(
                first,
                request=request.fork(name),
                seed=self._seed(params, place),
                priority=self._num_added + place,
                stats=replace(first.stats, request_id=name),
                logprobs=[],
                first_sample=first,
            )
            for place, name in enumerate(names[1:], start=1)
        ]
        return [first, *others]

    def _token_ids(self, prompt: str | Sequence[int] | np.ndarray) -> Sequence[int] | np.ndarray:
        if not isinstance(prompt, str):
            return prompt
        if self.model.tokenizer is None:
            raise ValueError("expected token ids, got text: the model has no tokenizer")
        return self.model.tokenizer.encode(prompt)

    def _seed(self, params: SamplingParams, place: int) -> int:
        """Of the prompt's sample number `place`."""
        if params.seed is not None:
            return (params.seed + place) % (MAX_SEED + 1)
        return int(np.random.SeedSequence((self.config.seed, self._num_added + place)).generate_state(1)[0])

    def _dispatch(self, step: HostStep) -> _Flight:
        """Hands a step to the device, after the vectors that stand for its tokens."""
        inputs, embeds = step.inputs, None
        if self._embeds is not None:
            if inputs.embeds is not None:
                self._embeds.write(inputs.embed_rows, inputs.embeds)
            embeds = self._embeds.array
        output: DeviceOutput = self._update_step(
            self._pages,
            step.plan,
            previous=self._previous,
            sampling=step.sampling,
            features=inputs.features,
            embeds=embeds,
            embed_index=inputs.embed_index,
        )
        self._pages, self._previous = output.pages, output.sampled
        return _Flight(step, output.sampled, output.extras)


def _placement(model: LoadedModel, mesh: jax.sharding.Mesh | None) -> Placement:
    """KV heads over the mesh's tensor axis where they split evenly, else whole pages on every device."""
    placement = Placement.create(mesh)
    if not model.config.splits_cache(placement.num_shards):
        return Placement(placement.mesh)
    return placement
