"""The engine: prompts in, tokens out, step by step.

Flow:    prompts -> [LLMEngine] -> RequestMaker -> EngineCore -> StepOutputs
Source:  ARCHITECTURE.md, "Engine"; names of vLLM's LLMEngine

One step, in order: begin (`HostLoop`: blocks are allocated, numpy arrays of the step are made), dispatch (the device
works, the host goes on), read (sampled tokens), end (`HostLoop`: tokens to their requests, blocks of ended requests
are freed). With `async_scheduling` step n + 1 is dispatched before step n is read: its decode tokens are taken on the
device from step n's samples.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from kvjax.core import BlockHasher, KVCacheManager
from kvjax.core.requests.request_table import RequestTable
from kvjax.device import Placement
from kvjax.device.mesh.processes import ProcessBoard, spans_processes
from kvjax.device.programs.compilation_cache import use_compilation_cache
from kvjax.device.steps.update_step import SampleFn
from kvjax.engine.drafts.draft_model import DraftModel, check_speculation
from kvjax.engine.drafts.prompt_lookup import PromptLookup
from kvjax.engine.front.engine_weights import EngineWeights
from kvjax.engine.front.given_prompts import params_of, prompts_of
from kvjax.engine.front.life_cycle import EngineLifeCycle
from kvjax.engine.front.request_maker import RequestMaker
from kvjax.engine.requests.known_names import check_names
from kvjax.engine.requests.outputs import GenerationResult, StepOutputs
from kvjax.engine.requests.owed_request import OwedRequest
from kvjax.engine.requests.request_inputs import GivenInputs, MultimodalInput
from kvjax.engine.requests.sampling_params import SamplingParams, checked_params
from kvjax.engine.requests.stats import StepStats
from kvjax.engine.requests.token_stream import StreamInbox, TokenStream
from kvjax.engine.sampling.sampler import sample, score
from kvjax.engine.sampling.sampler_lines import SamplerSizes
from kvjax.engine.scheduling.scheduler import Scheduler
from kvjax.engine.scheduling.speculation import Drafter
from kvjax.engine.step.agreement import Agreement, settings_of
from kvjax.engine.step.cache_plans import plan_caches
from kvjax.engine.step.config import EngineConfig
from kvjax.engine.step.engine_core import EngineCore
from kvjax.engine.step.engine_log import EngineObserver, log_start
from kvjax.engine.step.host_loop import HostLoop
from kvjax.engine.step.loop_parts import LoopParts, check_connector, check_parts, tell_weights
from kvjax.engine.step.model_runner import (
    ModelRunner,
    least_block_size,
    num_embedding_rows,
    parallelism_of,
    place_model,
)
from kvjax.engine.step.rank_loops import RankLoops, RankSchedulers
from kvjax.errors import UnknownRequestError
from kvjax.models import LoadedModel, StreamingWindow, chat_prompt, load_model
from kvjax.models.chat import Message
from kvjax.tiers.connector import KVConnector
from kvjax.tiers.processes.process_tiers import make_tiers


class LLMEngine(EngineLifeCycle):
    """One model, one cache, one queue. Owned by one thread; `warmup`, `step` and `generate` wait for the device.

    `plan` says how the cache is laid out, `manager` and `scheduler` what is in it, `step_stats` what steps cost.

    An exception in any call, KeyboardInterrupt too, leaves an engine that serves the next one: what was broken off is
    undone, the cache is empty, and requests queued before go on (engine_core.py). If the device gives no memory for new
    pages, calls raise EngineClosedError.
    """

    runner_type: ClassVar[type[ModelRunner]] = ModelRunner  # another: to look at every step

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        *,
        mesh: jax.sharding.Mesh | None = None,
        draft_model: LoadedModel | None = None,
        like: LLMEngine | None = None,
        sample_fn: SampleFn | None = None,
        connector: KVConnector | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """An engine for `model`, whose weights lie on `mesh` (None: on one device).

        Args:
            model: weights and config, as `kvjax.models.load_model` gives them.
            mesh: the devices; docs/parallelism.md names the axes.
            draft_model: drafts tokens where `config.speculative` asks for one. Its cache holds as many requests as the
                model's: `num_blocks` are the model's alone, `memory_bytes` are for both.
            like: an engine whose compiled steps are used. It has the same models, mesh and cache layout, and its steps
                are at least as large.
            sample_fn: chooses tokens of a `SamplingBatch` inside the step; also returns their float32[N] logprobs.
            connector: brings KV from beyond the pools, in place of the one that `config.tiers` describes.
            clock: seconds, for arrival times and statistics.

        Raises:
            ValueError: the model allows fewer tokens than `max_model_len`, `like` does not fit, a draft model is
                missing, not asked for, or of another vocabulary, the connector is of another mesh, processes that
                share the mesh have other settings, or the process keeps compiled programs in another folder.
            NotImplementedError: the draft model has recurrent states or reads an encoder, or a kind of layer or input
                does not work on the mesh (docs/parallelism.md).
            MemoryBudgetError: `memory_bytes` or `num_blocks` does not hold one request of `max_model_len` tokens.
        """
        if config.max_model_len > model.config.max_model_len:
            raise ValueError(
                f"expected max_model_len of at most {model.config.max_model_len} (the model's), "
                f"got {config.max_model_len}"
            )
        if config.compilation_cache:
            use_compilation_cache(None if config.compilation_cache is True else config.compilation_cache)
        model = model.for_length(config.max_model_len)
        draft_model = None if draft_model is None else draft_model.for_length(config.max_model_len)
        check_speculation(model.config, config.speculative, None if draft_model is None else draft_model.config)
        self.model = model
        self.config = config
        placement = place_model(model, mesh)
        check_parts(
            placement,
            has_draft_model=draft_model is not None,
            connector=connector,
        )
        agreement = None
        if spans_processes(placement.mesh):
            agreement = Agreement(ProcessBoard(config.process_timeout_s), config.steps_between_checks)
            agreement.check_settings(settings_of(config, model.config, placement.mesh))
        draft_placement = placement if draft_model is None else place_model(draft_model, mesh)
        self.plan, draft_plan = plan_caches(
            model.config,
            config,
            platform=jax.default_backend(),
            parallel=parallelism_of(placement),
            draft_model=None if draft_model is None else draft_model.config,
            draft_parallel=parallelism_of(draft_placement),
        )
        block_size = least_block_size(self.plan)
        hasher = BlockHasher(block_size, config.hash_algorithm, seed=str(config.seed))
        self._weights = EngineWeights(model, config, None if like is None else like._runner.update_step.weights)
        self.connector: KVConnector | None = connector
        if config.tiers is not None:
            if connector is not None:
                raise ValueError("expected config.tiers or a connector, got both")
            self.connector = make_tiers(
                config.tiers,
                self.plan.config,
                hasher,
                placement,
                self._weights.identity(),
                config.process_timeout_s,
            )
        if connector is not None:
            check_connector(connector, self.plan.config, placement)
            tell_weights(connector, self._weights.at_start)
        num_best = min(config.max_logprobs, model.config.vocab_size)
        self._clock = clock
        runner = self.runner_type(
            model,
            config,
            self.plan,
            placement,
            sample_fn=partial(sample, num_best=num_best) if sample_fn is None else sample_fn,
            score_fn=partial(score, num_best=num_best) if num_best else None,
            sampler_sizes=SamplerSizes(config.max_num_seqs + 1, config.max_model_len, model.config.vocab_size)
            if sample_fn is None
            else None,
            like=None if like is None else like._runner,
        )
        self._maker = RequestMaker(
            model,
            seed=config.seed,
            hasher=hasher if config.enable_prefix_caching else None,
            num_embedding_rows=num_embedding_rows(model, config),
            sampler_sizes=runner.sampler_sizes,
            max_logprobs=num_best,
            clock=clock,
        )
        self._draft_model: DraftModel | None = None
        if draft_model is not None and draft_plan is not None:
            self._draft_model = DraftModel(
                draft_model,
                config,
                draft_plan,
                draft_placement,
                first_source=runner.buckets.max_num_requests,
                sample_fn=sample if sample_fn is None else sample_fn,
                like=None if like is None else like._draft_model,
            )
        self._core = EngineCore(
            runner, partial(self._new_loop, runner), config.max_steps_in_flight, self.connector, agreement
        )
        log_start(self.plan, config)

    @property
    def manager(self) -> KVCacheManager:
        """What is in the cache, of one data rank. Another after `reset` and after an exception in a step."""
        return self._loop.manager

    @property
    def managers(self) -> tuple[KVCacheManager, ...]:
        """What is in the cache of each data rank."""
        return self._loop.managers

    @property
    def scheduler(self) -> Scheduler | RankSchedulers:
        """Who waits and runs. Another object after `reset` and after an exception in a step."""
        return self._loop.scheduler

    @property
    def step_stats(self) -> deque[StepStats]:
        """What the newest steps cost."""
        return self._loop.step_stats

    @property
    def _loop(self) -> HostLoop | RankLoops:
        return self._core.loop

    @property
    def _runner(self) -> ModelRunner:
        return self._core.runner

    @classmethod
    def from_folder(
        cls,
        folder: str | Path,
        config: EngineConfig,
        *,
        num_devices: int = 1,
        dtype: str | None = None,
        streaming: StreamingWindow | None = None,
        draft_folder: str | Path | None = None,
        keep_quantised: bool = False,
    ) -> LLMEngine:
        """An engine for the Hugging Face model in `folder`, its heads split over `num_devices` devices.

        `dtype` is that of the weights, None: the checkpoint's own. With `streaming` every layer sees a window and the
        first tokens in place of all. `draft_folder` holds the draft model, where `config.speculative` asks for one;
        `keep_quantised` leaves projections of the model itself in eight bits, as `load_model` says.

        Raises:
            ConfigError, CheckpointError: a folder holds no model that can be loaded.
            ValueError: there are fewer devices, a limit does not fit the model, weights have no such dtype, or none is
                quantised so that it could be kept.
        """
        mesh = Placement.over_heads(num_devices).mesh if num_devices > 1 else None
        model = load_model(
            folder,
            dtype,
            mesh,
            max_model_len=config.max_model_len,
            streaming=streaming,
            keep_quantised=keep_quantised,
        )
        draft_model = None if draft_folder is None else load_model(draft_folder, dtype, mesh)
        return cls(model, config, mesh=mesh, draft_model=draft_model)

    @property
    def num_unfinished(self) -> int:
        """Requests that wait or run."""
        return self.scheduler.num_unfinished

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything: requests are unfinished, or a step is in flight."""
        return self.num_unfinished > 0 or self._runner.num_in_flight > 0 or self._loop.undelivered is not None

    @property
    def num_buckets(self) -> int:
        """Step shapes that the configuration allows."""
        num_own = len(self._runner.buckets.steps)
        return num_own if self._draft_model is None else num_own + self._draft_model.num_buckets

    def warmup(self, on_compiled: Callable[[int], object] | None = None) -> None:
        """Compiles every step shape, calling `on_compiled(1)` after each. Nothing compiles later."""
        with self._core.changing():
            self._runner.warmup(self._loop.sampling.empty_batch(), on_compiled)
            if self.connector is not None:
                self._runner.pages = self.connector.worker.warmup(self._runner.pages)
            if self._draft_model is not None:
                self._draft_model.warmup(on_compiled)

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
        priority: int = 0,
        checkpoints: Sequence[int] = (),
    ) -> str:
        """Queues a prompt, text or token ids, behind all others of its priority; its id.

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
            priority: lower is more urgent: such requests start first, and are preempted last.
            checkpoints: prompt tokens behind which later prompts part from this one, such as those of a system prompt.
                Layers that forget keep there what such a prompt needs: windows, chunks, recurrent states.

        Raises:
            ValueError: a stream is open, an id is taken, the priority is no integer, the prompt is empty or has ids
                outside the vocabulary, text comes without a tokenizer, the model takes other inputs (`read_inputs`), or
                the request can never run. Nothing is changed.
        """
        self._check_no_stream()
        return self._queue(
            prompt,
            params,
            request_id,
            encoder_features=encoder_features,
            embeddings=embeddings,
            prompt_positions=prompt_positions,
            cache_salt=cache_salt,
            lora_name=lora_name,
            priority=priority,
            checkpoints=checkpoints,
        )

    def add_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_variables: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> str:
        """Queues a chat that the model is to answer, by its own template; its id.

        Where turns of users and tools begin are checkpoints, so the system prompt, tools and earlier turns are hit by
        the second chat that has them.

        Args:
            messages: mappings of "role", "content" and what else the template reads.
            params: how to sample; None: the defaults.
            tools: what the model may call, as the template reads it.
            template_variables: the template's own, such as `enable_thinking`.
            given: other arguments of `add_request`, but for `checkpoints`.

        Raises:
            ValueError: the model has no tokenizer or no template, the template refuses the messages, or as
                `add_request`. Nothing is changed.
            MissingExtraError: jinja2 is not installed.
        """
        prompt = chat_prompt(self.model, messages, tools=tools, **(template_variables or {}))
        return self.add_request(prompt.token_ids, params, checkpoints=prompt.checkpoints, **given)

    def with_text(self, params: SamplingParams | None) -> SamplingParams:
        """`params` with `stream_text`, where the model has a tokenizer."""
        params = checked_params(params)
        return params if self.model.tokenizer is None else replace(params, stream_text=True)

    def add_observer(self, observer: EngineObserver) -> None:
        """Tells `observer` of every step from here on, such as `kvjax.metrics.EngineMetrics`."""
        self._core.observers.append(observer)

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
        priority: int = 0,
        checkpoints: Sequence[int] = (),
    ) -> None:
        """Raises ValueError if `add_request` would refuse the prompt: to know before a long warm-up."""
        given = GivenInputs(
            encoder_features, embeddings, prompt_positions, cache_salt, lora_name, priority, checkpoints
        )
        samples = self._maker.make(prompt, params, request_id, given, self._core.ids_in_use)
        self.scheduler.check_fits(samples[0])

    def owed(self) -> list[OwedRequest]:
        """The unfinished requests as they stand: what another engine goes on with, by `take_up`.

        Raises:
            ValueError: one cannot be written down (`OwedRequest.of`).
        """
        self._core.recover()
        return self._loop.owed()

    def take_up(self, owed: OwedRequest) -> None:
        """Queues a request that another engine of the same model has begun; its tokens go on where they were.

        Raises:
            ValueError: as `add_request`. Nothing is changed.
        """
        self._check_no_stream()
        largest = max(owed.output_token_ids, default=0)
        if largest >= self.model.config.vocab_size:
            raise ValueError(f"expected token ids below {self.model.config.vocab_size}, got {largest}")
        self._queue(
            owed.prompt_token_ids,
            owed.params,
            owed.request_id,
            made=(owed.output_token_ids, owed.logprobs),
            cache_salt=owed.cache_salt,
            lora_name=owed.lora_name,
            priority=owed.priority,
            checkpoints=owed.checkpoints,
        )

    def abort(self, request_id: str) -> GenerationResult:
        """Ends a request now; what it has so far.

        Raises:
            UnknownRequestError: no unfinished request has that id.
        """
        self._core.recover()
        if request_id not in self._loop.requests:
            raise UnknownRequestError(f"expected the id of an unfinished request, got {request_id!r}")
        with self._core.changing():
            return self._core.abort(request_id)

    def step(self) -> StepOutputs:
        """Runs one step; the tokens that became known, which may be none. Without requests it does nothing.

        After an exception the requests go on: what a step in flight was computing is computed again.

        Returns:
            Columns, which are also a sequence of `TokenOutput`.

        Raises:
            ValueError: a stream is open. Nothing is changed.
            EngineClosedError: after a failure the device gives no memory for pages.
            PeerLostError: a process that shares the mesh is gone.
        """
        self._check_no_stream()
        return self._core.step()

    def generate(
        self,
        prompts: str | Sequence[str | Sequence[int] | np.ndarray],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        inputs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[GenerationResult]:
        """Runs all prompts to their ends, one `params` for all or one each; results in the order of the prompts.

        A text is one prompt. `inputs` are what each prompt has beside its tokens: arguments of `add_request` by name.
        Of a prompt with `params.n` > 1 there are as many results, one after another. Open streams go on beside it.

        Raises:
            ValueError: requests of `add_request` are unfinished, there is not one `params` or inputs a prompt, or
                `add_request` refuses one. Nothing is left queued.
            Exception: whatever a step raises, or a request's own matcher. Its requests are aborted.
        """
        inbox = self._open_inbox(prompts, params, inputs)
        results: dict[str, GenerationResult] = {}
        try:
            while (len(results) < len(inbox.places) or not self.num_unfinished) and self._core.advance():
                for outputs in inbox.take():
                    for one in map(inbox.placed, outputs.results.values()):
                        if one.prompt is not None:
                            results[one.request_id] = one.checked()
            return [results[request_id] for request_id in inbox.places]
        finally:
            inbox.is_closed = True
            self._core.sweep()

    def stream(
        self,
        prompts: str | Sequence[str | Sequence[int] | np.ndarray],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        inputs: Sequence[Mapping[str, Any]] | None = None,
    ) -> TokenStream:
        """An iterator over the tokens of all prompts as they are made; arguments as of `generate`.

        The prompts are queued now, and steps run when the next token is asked for. Closing the stream aborts what is
        unfinished. Streams may be read in turns. While one is open, `add_request` and `step` refuse.

        Raises:
            ValueError: as `generate`. Nothing is left queued.
        """
        inbox = self._open_inbox(prompts, params, inputs, stream_text=True)
        return TokenStream(inbox, advance=self._core.advance, sweep=self._core.sweep)

    def reset(self) -> list[GenerationResult]:
        """Ends all requests and forgets the cache, as if the engine were new; compiled steps stay.

        Returns:
            What the requests that are aborted had so far.

        Raises:
            EngineClosedError: the device gives no memory for pages.
        """
        return self._core.reset()

    def check_invariants(self) -> None:
        """Checks the laws of scheduler and manager, and of a draft model's.

        Raises:
            InvariantError: one does not hold.
        """
        self.scheduler.check_invariants()
        for manager in self.managers:
            manager.check_invariants()
        if self._draft_model is not None:
            self._draft_model.check_invariants()

    def _new_loop(self, runner: ModelRunner) -> HostLoop | RankLoops:
        """Requests, scheduler and manager as at the start; of each data rank where there are several."""
        own = (self.model.config, self.config, self.plan, runner, self.connector, self._new_drafter, self._clock)
        return LoopParts(*own).new_loops()

    def _new_drafter(self, table: RequestTable) -> Drafter | None:
        """What drafts for the requests of `table`, following none yet."""
        if self._draft_model is not None:
            self._draft_model.reset(table)
            return self._draft_model
        config = self.config
        return None if config.speculative is None else PromptLookup(table, config.speculative, config.max_model_len)

    def _queue(
        self,
        prompt: str | Sequence[int] | np.ndarray,
        params: SamplingParams | None,
        request_id: str | None = None,
        *,
        inbox: StreamInbox | None = None,
        place: int = 0,  # of the prompt, in the inbox
        made: tuple[Sequence[int], Sequence[float]] = ((), ()),  # output tokens and logprobs that there are
        **given: Any,
    ) -> str:
        """Queues the samples of a prompt; the id of the first."""
        self._check_awake()
        check_names("inputs of a prompt", given, GivenInputs.__dataclass_fields__)
        samples = self._maker.make(prompt, params, request_id, GivenInputs(**given), self._core.ids_in_use)
        self.scheduler.check_fits(samples[0])
        samples[0].go_on_from(*made)
        with self._core.changing():
            if inbox is not None:
                inbox.places.update({sample.request_id: (place, i) for i, sample in enumerate(samples)})
            self._loop.add(samples)
            self._maker.num_queued += len(samples)
        return samples[0].request_id

    def _open_inbox(
        self,
        prompts: str | Sequence[str | Sequence[int] | np.ndarray],
        params: SamplingParams | Sequence[SamplingParams] | None,
        inputs: Sequence[Mapping[str, Any]] | None,
        *,
        stream_text: bool = False,
    ) -> StreamInbox:
        """Queues prompts whose outputs go to an inbox of their own."""
        self._core.sweep()
        if not self._core.inboxes and self.num_unfinished:
            raise ValueError(f"expected an engine without requests, got {self.num_unfinished} unfinished")
        prompts = prompts_of(prompts)
        each = params_of(params, len(prompts))
        given: Sequence[Mapping[str, Any]] = [{}] * len(prompts) if inputs is None else inputs
        if len(given) != len(prompts):
            raise ValueError(f"expected inputs of {len(prompts)} prompts, got {len(given)}")
        inbox = StreamInbox()
        self._core.inboxes.append(inbox)
        try:
            for place, (prompt, one, more) in enumerate(zip(prompts, each, given, strict=True)):
                one = self.with_text(one) if stream_text else one
                self._queue(prompt, one, inbox=inbox, place=place, **more)
        except BaseException:
            inbox.is_closed = True
            self._core.sweep()
            raise
        return inbox

    def _check_no_stream(self) -> None:
        """Raises ValueError while a stream is open: it reads the outputs of all steps."""
        self._core.sweep()
        if self._core.inboxes:
            raise ValueError("expected no open stream; read it to its end or close it")
