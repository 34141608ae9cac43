"""A second, smaller model that drafts tokens for the target: its compiled steps, its pages, and drafts on the device.

Flow:    decoding requests of the target -> [DraftModel.propose] -> Drafts -> the target's step, which verifies them
Source:  speculative decoding (Leviathan et al., 2023, arXiv 2211.17192); the same noise for target and drafts:
         Daliri, Musco, Suresh, 2024, arXiv 2408.07978

`propose` waits for nothing. Draft j + 1 is computed from the sample of draft j on the device, and all drafts stay
there: the target's step reads them behind the tokens of its own step before (`device_tokens`). The host learns them
with the target's samples.

A draft is drawn as the target would draw the token: with the parameters and the seed of the target's request, at the
same place. So it is what the target draws wherever both models have the same distribution, and often where they are
close.

The draft model sees tokens alone: not the vectors that stand for some of them, nor an encoder's output.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import BlockHasher, KVCacheManager
from kvjax.core.requests.request_table import RequestTable
from kvjax.device import Buckets, KVPages, Placement, UpdateStep, create_pages, make_update_step
from kvjax.device.steps.update_step import SampleFn
from kvjax.engine.drafts.draft_requests import DraftRequests, DraftStep
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.sampling.sampler import sample
from kvjax.engine.sampling.sampling_table import SamplingBatch, SamplingTable
from kvjax.engine.scheduling.speculation import Drafts, SpeculativeConfig
from kvjax.engine.step.config import EngineConfig
from kvjax.engine.step.model_runner import check_limits_of_like, decodes_apart, free_arrays, least_block_size
from kvjax.models import LoadedModel
from kvjax.models.config import ModelConfig
from kvjax.planning import KVCachePlan


class DraftModel:
    """One draft model beside one target, with a manager, pages and steps of its own. Owned by the engine's thread.

    It is a `Drafter`. A round of k drafts dispatches k steps, whatever the number of requests, and another where
    requests start or decoded without drafts.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        plan: KVCachePlan,  # of the draft model's cache
        placement: Placement,
        *,
        first_source: int,  # requests of the target's largest step, whose tokens precede drafts in `previous`
        sample_fn: SampleFn = sample,
        like: DraftModel | None = None,  # whose compiled steps are used
    ) -> None:
        """Compiled steps, but no pages: call `reset` first. `check_speculation` has accepted the model.

        Raises:
            ValueError: `like` has another model, layout or limits.
        """
        self.num_drafts = config.num_drafts
        self.plan = plan
        self._model = model
        self._config = config
        self._placement = placement
        self._first_source = first_source
        self._update_step = self._make_update_step(sample_fn) if like is None else self._shared_step(like)
        self._no_sampling = SamplingTable().empty_batch()
        self._pages: KVPages | None = None

    def reset(self, table: RequestTable) -> None:
        """Follows no request any more and forgets its cache; from here on it drafts for the requests of `table`.

        Waits for what the device still does with the old pages, which are freed before there are new ones.
        """
        free_arrays(self._pages)
        self._pages = create_pages(self.plan.config, self._placement)
        config, block_size = self._config, least_block_size(self.plan)
        self.manager = KVCacheManager(
            self.plan.config,
            self.plan.max_model_len,
            block_size,
            enable_caching=config.enable_prefix_caching,
            same_step_hits=False,
            eviction_policy=config.manager_options.eviction_policy,
            zero_new_pages=config.zero_new_pages,
            max_num_reqs=config.max_num_seqs,
            max_in_flight_tokens=self.plan.max_in_flight_tokens,
        )
        hasher = BlockHasher(block_size, config.hash_algorithm, seed=str(config.seed))
        self.requests = DraftRequests(
            self.manager,
            hasher if config.enable_prefix_caching else None,
            max_num_batched_tokens=config.max_num_batched_tokens,
            has_mrope=self._model.config.has_mrope,
            pick_shape=self._update_step.buckets.pick,
        )
        self._target_table = table
        self._drafts = _joined(*[self._update_step.no_tokens] * self.num_drafts)

    @property
    def num_buckets(self) -> int:
        """Step shapes that the configuration allows."""
        return len(self._update_step.buckets.steps)

    def warmup(self, on_compiled: Callable[[int], object] | None = None) -> None:
        """Compiles every step shape, calling `on_compiled(1)` after each."""
        assert self._pages is not None
        self._pages = self._update_step.warmup(self._pages, sampling=self._no_sampling, on_compiled=on_compiled)

    @property
    def device_tokens(self) -> jax.Array:  # int32[num_drafts * requests of a step]
        """As `Drafter.device_tokens`."""
        return self._drafts

    def start(self, request: EngineRequest) -> None:
        """As `Drafter.start`; the request is followed once drafts are asked for."""

    def stop(self, request: EngineRequest) -> None:
        """As `Drafter.stop`: its blocks here are freed."""
        self.requests.release(request.request.row)

    def count(self, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:  # int64[n]
        """As `Drafter.count`. Dispatches the step that catches up with prompts and other tokens that were no drafts."""
        step, counts = self.requests.follow(self._target_table, rows, np.minimum(limits, self.num_drafts))
        if step is not None:
            self._dispatch(step, None, self._no_sampling)
        return counts

    def propose(self, rows: np.ndarray, counts: np.ndarray, sampling: SamplingTable) -> Drafts:
        """As `Drafter.propose`. Dispatches as many steps as the most drafts of a request."""
        asked = np.flatnonzero(counts)
        place = np.zeros(self._target_table.capacity, np.int64)
        place[rows] = np.arange(rows.size)
        source = np.full((rows.size, self.num_drafts), -1, np.int32)
        outputs: list[jax.Array] = []
        for step in self.requests.drafts(rows[asked], counts[asked]):
            first = self._first_source + len(outputs) * self._update_step.num_previous
            source[place[step.rows], len(outputs)] = first + np.arange(step.rows.size)
            previous = outputs[-1] if outputs else None
            outputs.append(self._dispatch(step, previous, sampling.batch(step.rows, step.places)))
        outputs += [self._update_step.no_tokens] * (self.num_drafts - len(outputs))
        self._drafts = _joined(*outputs)
        return Drafts(np.zeros(source.shape, np.int32), source)

    def settle(self, rows: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        """As `Drafter.settle`."""
        del num_drafts
        self.requests.accept(rows, num_accepted)

    def check_invariants(self) -> None:
        """As `DraftRequests.check_invariants`."""
        self.requests.check_invariants(self._target_table)

    def _dispatch(self, step: DraftStep, previous: jax.Array | None, sampling: SamplingBatch) -> jax.Array:
        """Hands a step to the device; int32[num_previous] what it samples."""
        assert self._pages is not None
        output = self._update_step(self._pages, step.plan, previous=previous, sampling=sampling)
        self._pages = output.pages
        return output.sampled

    def _make_update_step(self, sample_fn: SampleFn) -> UpdateStep:
        buckets = Buckets.default(
            max_num_batched_tokens=self._config.max_num_batched_tokens,
            max_num_seqs=self._config.max_num_seqs,
            max_model_len=self.plan.max_model_len,
            block_size=least_block_size(self.plan),
            max_buckets=self._config.max_buckets,
            decode_apart=decodes_apart(),
        )
        return make_update_step(
            self._model.module,
            self.plan.config,
            buckets,
            placement=self._placement,
            sample_fn=sample_fn,
            mrope=self._model.config.has_mrope,
            compiler_options=self._config.compiler_options,
        )

    def _shared_step(self, like: DraftModel) -> UpdateStep:
        layouts = (self.plan.config, self._placement)
        if like._model.module is not self._model.module or (like.plan.config, like._placement) != layouts:
            raise ValueError("expected `like` to have this draft model, mesh and cache layout, got another")
        check_limits_of_like(self._config, like._config, ("max_num_batched_tokens", "max_num_seqs"))
        check_limits_of_like(self.plan, like.plan, ("max_model_len",))
        return like._update_step


def check_speculation(target: ModelConfig, speculative: SpeculativeConfig | None, draft: ModelConfig | None) -> None:
    """Raises unless there is a draft model where one is asked for, and it can draft for `target`.

    Raises:
        ValueError: it is missing, given for nothing, or has another vocabulary.
        NotImplementedError: as `check_draft_model`.
    """
    wants_one = speculative is not None and speculative.method == "draft_model"
    if wants_one and draft is None:
        raise ValueError('expected draft_model with the method "draft_model", got none')
    if not wants_one and draft is not None:
        raise ValueError('expected SpeculativeConfig(method="draft_model") with draft_model, got another or none')
    if draft is not None:
        check_draft_model(target, draft)


def check_draft_model(target: ModelConfig, draft: ModelConfig) -> None:
    """Raises unless `draft` can draft for `target`.

    Raises:
        ValueError: it has another vocabulary.
        NotImplementedError: it has recurrent states, or reads an encoder.
    """
    if draft.vocab_size != target.vocab_size:
        raise ValueError(
            f"expected a draft model of {target.vocab_size} tokens, got {draft.vocab_size}; take one with the "
            "target's vocabulary"
        )
    if any(spec.state_pages is not None for spec in draft.kv_cache_specs().values()):
        raise NotImplementedError(
            f"expected a draft model of attention layers, got {draft.architecture}: a recurrent state cannot go back "
            "to the last accepted draft; take another draft model, or prompt lookup"
        )
    if draft.encoder_shapes:
        raise NotImplementedError(
            f"expected a draft model without an encoder, got {draft.architecture}: drafts see tokens alone; take "
            "another draft model, or prompt lookup"
        )


@jax.jit
def _joined(*drafts: jax.Array) -> jax.Array:
    """One array of all."""
    return jnp.concatenate(drafts)


__all__ = ["DraftModel", "check_draft_model", "check_speculation"]
