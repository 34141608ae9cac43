"""The engine's device side: the compiled steps of a model, its pages, and the steps that are not read yet.

Flow:    HostStep -> [ModelRunner.dispatch] -> the device works -> [ModelRunner.read] -> HostLoop.end_step
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from kvjax.device import Buckets, EmbedBuffer, KVPages, Placement, UpdateStep, create_pages, make_update_step
from kvjax.device.mesh.transfers import reads_back
from kvjax.device.model.model_weights import ModelWeights
from kvjax.device.steps.given_tokens import ScoreFn
from kvjax.device.steps.update_step import SampleFn, StepOutput
from kvjax.engine.requests.outputs import TopLogprobs
from kvjax.engine.sampling.sampler import TokenLogprobs
from kvjax.engine.sampling.sampler_lines import SamplerSizes
from kvjax.engine.sampling.sampler_state import SamplerArrays, SamplerState
from kvjax.engine.sampling.sampling_table import SamplingBatch
from kvjax.engine.step.config import EngineConfig
from kvjax.engine.step.host_loop import HostStep
from kvjax.engine.step.rank_inputs import DeviceInputs, sizes_of_ranks
from kvjax.engine.step.rank_loops import RankSteps
from kvjax.engine.step.sampled_step import SampledStep
from kvjax.models import LoadedModel
from kvjax.planning import KVCachePlan, Parallelism


@dataclass(frozen=True)
class _Flight:
    """A dispatched step that is not read yet."""

    step: HostStep | RankSteps
    tokens: jax.Array  # int32[>= rows of logits]
    logprobs: jax.Array | TokenLogprobs  # float32[likewise]
    num_accepted: jax.Array  # int32[>= requests that sample] drafts, where the step has any
    scores: TokenLogprobs | None  # of the step's given tokens


class ModelRunner:
    """One model over one cache. Owned by one thread; `warmup` and `read` wait for the device, `dispatch` does not."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        plan: KVCachePlan,
        placement: Placement,
        *,
        sample_fn: SampleFn,
        score_fn: ScoreFn | None = None,  # of prompts' tokens; None: they are not scored
        sampler_sizes: SamplerSizes | None = None,  # None: the sample_fn takes no state
        like: ModelRunner | None = None,  # whose compiled steps are used
    ) -> None:
        """A runner with pages of its own.

        Raises:
            ValueError: `like` has another model or layout, or smaller steps.
        """
        self._model = model
        self._config = config
        self._plan = plan
        self.placement = placement
        self.update_step = (
            self._make_update_step(sample_fn, score_fn) if like is None else self._shared_update_step(like)
        )
        self._weights = self.update_step.weights
        self.pages: KVPages = create_pages(plan.config, placement)
        self._embeds = self._make_embed_buffer()
        self.sampler_sizes: SamplerSizes | None = sampler_sizes if like is None else like.sampler_sizes
        self._sampler = self._make_sampler_state()
        self._previous: jax.Array | None = None  # sampled tokens of the newest step, on the device
        self._flights: deque[_Flight] = deque()

    @property
    def buckets(self) -> Buckets:
        """The steps that may be compiled."""
        return self.update_step.buckets

    @property
    def num_embedding_rows(self) -> int:
        """Rows of the buffer of vectors; 0 for models that take none."""
        return num_embedding_rows(self._model, self._config)

    @property
    def num_in_flight(self) -> int:
        """Steps dispatched and not read."""
        return len(self._flights)

    def use_weights(self, weights: ModelWeights) -> None:
        """Steps compute with them from here on, those of all runners that share the compiled steps."""
        self.update_step.use_weights(weights)
        self._weights = weights

    def check_weights(self) -> None:
        """Raises ValueError where another runner that shares the compiled steps was given weights, and not this one."""
        if self.update_step.weights is not self._weights:
            raise ValueError(
                "expected the weights that this engine's cache is of, got others, which an engine that shares its "
                "compiled steps was given; call set_weights(version) here too"
            )

    def warmup(self, sampling: SamplingBatch, on_compiled: Callable[[int], object] | None = None) -> None:
        """Compiles every step shape, calling `on_compiled(1)` after each; `sampling` is an example of its inputs."""
        embeds = None
        if self._embeds is not None:
            self._embeds.warmup()
            embeds = self._embeds.array
        if self._sampler is not None:
            self._sampler.warmup(self.update_step.no_tokens)
        self.pages = self.update_step.warmup(
            self.pages,
            sampling=sampling,
            embeds=embeds,
            sampler_state=self._sampler_arrays,
            on_compiled=on_compiled,
        )
        num_drafts = self.update_step.num_previous - self.buckets.max_num_requests
        if num_drafts:
            _with_drafts(self.update_step.no_tokens, self.update_step.no_tokens[-num_drafts:])

    def dispatch(self, step: HostStep | RankSteps) -> None:
        """Hands a step to the device, after the vectors that stand for its tokens."""
        output = self._dispatch_ranks(step) if isinstance(step, RankSteps) else self._dispatch_one(step)
        self.pages, self._previous = output.pages, output.sampled
        self._flights.append(_Flight(step, output.tokens, output.extras, output.num_accepted, output.scores))

    def _dispatch_ranks(self, step: RankSteps) -> StepOutput:
        previous = self.update_step.no_tokens if self._previous is None else self._previous
        inputs = DeviceInputs.of(step, self.sampler_sizes, self.update_step.num_previous)
        if self._sampler is not None:
            for writes in inputs.sampler_writes:
                self._sampler.write(writes, previous)
        return self.update_step.call_ranks(
            self.pages,
            inputs.plans,
            previous=previous,
            sampling=inputs.sampling,
            sampler_state=self._sampler_arrays,
            given=inputs.given,
        )

    def _dispatch_one(self, step: HostStep) -> StepOutput:
        inputs, embeds = step.inputs, None
        if self._embeds is not None:
            if inputs.embeds is not None:
                self._embeds.write(inputs.embed_rows, inputs.embeds)
            embeds = self._embeds.array
        previous = self._previous_tokens(step)
        if self._sampler is not None and step.sampler_writes is not None:
            self._sampler.write(step.sampler_writes, previous)
        return self.update_step(
            self.pages,
            step.plan,
            previous=previous,
            sampling=step.sampling,
            features=inputs.features,
            embeds=embeds,
            embed_index=inputs.embed_index,
            sampler_state=self._sampler_arrays,
            given=None if step.given is None else step.given.token_ids,
        )

    @reads_back
    def read(self) -> tuple[Any, SampledStep]:
        """The oldest step in flight, and what the device gave of it."""
        flight = self._flights.popleft()
        steps = [one for one in flight.step.by_rank if one is not None]
        given = None
        if flight.scores is not None and any(one.given is not None for one in steps):
            given = np.asarray(flight.scores.logprobs), _best_on_host(flight.scores)
        logprobs, best = flight.logprobs, None
        if isinstance(logprobs, TokenLogprobs):
            if any(one.wants_best for one in steps):
                best = _best_on_host(logprobs)
            logprobs = logprobs.logprobs
        has_drafts = any(one.scheduled.num_drafts is not None for one in steps)
        num_accepted = np.asarray(flight.num_accepted) if has_drafts else None
        return flight.step, SampledStep(np.asarray(flight.tokens), np.asarray(logprobs), best, num_accepted, given)

    @property
    def _sampler_arrays(self) -> SamplerArrays | None:
        return None if self._sampler is None else self._sampler.arrays

    def reset(self) -> None:
        """Forgets all steps in flight, and starts with empty pages: those that there were may be donated and gone.

        Waits for what the device still does, since old and new pages may not fit in its memory together.
        """
        free_arrays(([flight.tokens for flight in self._flights], self.pages))
        self._flights.clear()
        self._previous = None
        self.make_pages()
        self._embeds = self._make_embed_buffer()
        self._sampler = self._make_sampler_state()

    @property
    def has_pages(self) -> bool:
        """Whether no page array was given away to a program that then failed."""
        return not any(array.is_deleted() for array in jax.tree.leaves(self.pages))

    def release_pages(self) -> None:
        """Frees the pages' memory; nothing is in flight. No step runs before `make_pages`."""
        free_arrays(self.pages)

    def make_pages(self) -> None:
        """Pages anew, empty; there are none."""
        self.pages = create_pages(self._plan.config, self.placement)

    def _previous_tokens(self, step: HostStep) -> jax.Array:  # int32[UpdateStep.num_previous]
        """What the step may read: tokens of the step before, and drafts behind them."""
        sampled = self.update_step.no_tokens if self._previous is None else self._previous
        return sampled if step.device_drafts is None else _with_drafts(sampled, step.device_drafts)

    def _make_update_step(self, sample_fn: SampleFn, score_fn: ScoreFn | None) -> UpdateStep:
        config, model = self._config, self._model
        block_size = least_block_size(self._plan)
        pages = [group.kv_cache_spec.state_pages for group in self._plan.config.kv_cache_groups]
        most_states = max(0 if one is None else one.num_speculative_blocks for one in pages)  # behind a table's last
        buckets = Buckets.default(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len + most_states * block_size,
            block_size=block_size,
            max_buckets=config.max_buckets,
            num_drafts=config.num_drafts,
            num_checkpoints=config.checkpoints_in_step if any(one is not None for one in pages) else 0,
            decode_apart=decodes_apart(),
            drafts_apart=jax.default_backend() == "gpu",
        )
        return make_update_step(
            model.module,
            self._plan.config,
            buckets,
            placement=self.placement,
            sample_fn=sample_fn,
            score_fn=score_fn,
            mrope=model.config.has_mrope,
            encoder_shapes=model.config.encoder_shapes,
            embeds=model.config.embedding_dim is not None,
            num_previous=buckets.max_num_requests * (1 + config.num_drafts),
            compiler_options=config.compiler_options,
        )

    def _shared_update_step(self, like: ModelRunner) -> UpdateStep:
        layouts = (self._plan.config, self.placement)
        if like._model.module is not self._model.module or (like._plan.config, like.placement) != layouts:
            raise ValueError("expected `like` to have this engine's model, mesh and cache layout, got another")
        limits = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "max_logprobs")
        check_limits_of_like(self._config, like._config, limits)
        if like._config.num_drafts != self._config.num_drafts:
            raise ValueError(
                f"expected `like` to have num_drafts of {self._config.num_drafts}, got {like._config.num_drafts}"
            )
        options = self._config.compiler_options, like._config.compiler_options
        if options[0] != options[1]:
            raise ValueError(f"expected `like` to have compiler_options of {options[0]}, got {options[1]}")
        own, given = (num_embedding_rows(self._model, runner._config) for runner in (self, like))
        if given != own:
            raise ValueError(f"expected `like` to have max_embedding_rows of {own}, got {given}")
        return like.update_step

    def _make_sampler_state(self) -> SamplerState | None:
        if self.sampler_sizes is None:
            return None
        return SamplerState(sizes_of_ranks(self.sampler_sizes, self.placement.num_data), self.placement)

    def _make_embed_buffer(self) -> EmbedBuffer | None:
        dim = self._model.config.embedding_dim
        if dim is None:
            return None
        return EmbedBuffer(num_embedding_rows(self._model, self._config), dim, self._model.config.dtype, self.placement)


@jax.jit
def _with_drafts(sampled: jax.Array, drafts: jax.Array) -> jax.Array:
    """Int32 tokens of the step before, with the drafts in the last places."""
    return jax.lax.dynamic_update_slice(sampled, drafts, (sampled.size - drafts.size,))


def _best_on_host(logprobs: TokenLogprobs) -> TopLogprobs:
    return TopLogprobs(*map(np.asarray, logprobs.best))


def free_arrays(tree: Any) -> None:
    """Frees the device's arrays in a tree, once it has done what it still does with them."""
    for array in jax.tree.leaves(tree):
        if not array.is_deleted():
            with suppress(Exception):  # whatever a step left there in place of its result
                array.block_until_ready()
            array.delete()


def check_limits_of_like(own: Any, like: Any, names: Sequence[str]) -> None:
    """Raises ValueError where a limit of `like`, whose compiled steps are to be used, is below one's own."""
    for name in names:
        wanted, given = getattr(own, name), getattr(like, name)
        if given < wanted:
            raise ValueError(f"expected `like` to allow {name} of at least {wanted}, got {given}")


def decodes_apart() -> bool:
    """Whether attention here compiles steps of one token a request to less than mixed ones, as its `plan` is told."""
    return jax.default_backend() in ("cpu", "gpu")


def least_block_size(plan: KVCachePlan) -> int:
    """The most tokens that divide the blocks of all groups: prompts are hashed, and tables counted, in such blocks."""
    return math.gcd(*(group.spec.block_size for group in plan.groups))


def num_embedding_rows(model: LoadedModel, config: EngineConfig) -> int:
    """Rows of the buffer of vectors; 0 for models that take none."""
    return 0 if model.config.embedding_dim is None else config.max_embedding_rows


def parallelism_of(placement: Placement) -> Parallelism:
    """How the planner counts what a device of the placement holds."""
    return Parallelism(tensor=placement.num_shards, data=placement.num_data, page_context=placement.num_context)


def place_model(model: LoadedModel, mesh: jax.sharding.Mesh | None) -> Placement:
    """KV heads over the mesh's tensor axis where they split evenly, else whole on every device; tokens over context."""
    placement = Placement.create(mesh)
    if placement.num_data > 1 and model.config.embedding_dim is not None:
        raise NotImplementedError(
            f"models that take vectors do not work over {placement.num_data} data ranks; run an engine on each"
        )
    if not model.config.splits_cache(placement.num_shards):
        return replace(placement, head_axis=None)
    return placement


__all__ = [
    "ModelRunner",
    "check_limits_of_like",
    "decodes_apart",
    "free_arrays",
    "least_block_size",
    "num_embedding_rows",
    "parallelism_of",
    "place_model",
]
