"""One call of the model over the pages: jitted once per bucket, pages donated and updated in place.

Flow:    StepPlan -> page copies -> pages to zero -> idle states loaded -> encoders -> [model: KV writes, attention]
         -> logits -> tokens; idle states stored
Source:  ARCHITECTURE.md, "Order inside a step"

Page copies, zeroing and encoders are rare, so they are dispatched before the model as programs of their own: were they
part of the step, each of their lengths would multiply the number of compiled steps.

Asynchronous steps: `StepOutput.sampled` stays on the device, always `num_previous` long, and the next step reads it
where `StepPlan.token_source` says so. The host need not have seen those tokens. A drafting model may put its tokens
behind the `Buckets.max_num_requests` sampled ones, to be verified without the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import StepPlan
from kvjax.device.encoder.encoder_step import EncoderShapes, EncoderStep
from kvjax.device.inputs.batch import DeviceBatch, pick_bucket
from kvjax.device.inputs.buckets import Bucket, Buckets
from kvjax.device.inputs.packed_inputs import is_packed
from kvjax.device.inputs.rank_batches import join_batches, pick_bucket_of_ranks
from kvjax.device.layers.step_cache import StepCache
from kvjax.device.mesh.placement import Placement
from kvjax.device.model.model_weights import ModelWeights
from kvjax.device.pages.idle_states import check_moves, load_idle_states, store_idle_states, warm_up_moves
from kvjax.device.pages.kv_pages import KVPages, check_columns
from kvjax.device.pages.page_edits import check_edits, edit_pages, edit_pages_of_ranks, warm_up_edits
from kvjax.device.programs.step_cuts import LEAST_CUT
from kvjax.device.steps.draft_check import accept_drafts
from kvjax.device.steps.given_tokens import ScoreFn, score_given
from kvjax.device.steps.step_programs import CompilerOptions, StepPrograms

# (logits float32[N, vocab], sampling inputs padded to N rows, the sampler's state if there is one)
# -> (token ids int32[N], any pytree besides)
SampleFn: TypeAlias = Callable[..., tuple[jax.Array, Any]]


class StepOutput(NamedTuple):
    """What one step leaves on the device. Rows past the plan's `logits_indices` are padding."""

    pages: KVPages
    logits: jax.Array | None  # [N, vocab]; None unless asked for
    sampled: jax.Array  # int32[num_previous] newest token of each sampling request, then 0; all 0 without a sample_fn
    extras: Any  # second result of the sample_fn
    tokens: jax.Array  # int32[>= N] sampled at each row of logits: `sampled` itself in buckets without drafts
    num_accepted: jax.Array  # int32[>= S] drafts of each sampling request that were right
    scores: Any = None  # results of the score_fn with leading axis T; zeros where nothing is asked for


class _Outputs(NamedTuple):
    """What the compiled step returns beside the pages, None for what a bucket without drafts does not compute."""

    logits: jax.Array | None
    sampled: jax.Array
    extras: Any
    tokens: jax.Array | None
    num_accepted: jax.Array | None
    scores: Any


class UpdateStep:
    """The compiled steps of one model over one cache config. Made by `make_update_step`.

    Owned by one thread. A call costs the padding of the plan and one dispatch; it does not wait for the device.
    """

    def __init__(
        self,
        model: Any,
        kv_cache_config: KVCacheConfig,
        buckets: Buckets,
        placement: Placement,
        *,
        sample_fn: SampleFn | None,
        score_fn: ScoreFn | None,
        return_logits: bool,
        mrope: bool,
        encoder_shapes: EncoderShapes,
        takes_embeds: bool,
        num_previous: int,
        cut_layers: bool,
        compiler_options: CompilerOptions | None,
        backend: str,
    ) -> None:
        check_columns(kv_cache_config, placement)
        _check_drafts(kv_cache_config, buckets, num_previous)
        self.kv_cache_config = kv_cache_config
        self.buckets = buckets
        self.placement = placement
        self._sample_fn = sample_fn
        self._score_fn = score_fn
        self._return_logits = return_logits
        self._mrope = mrope
        self._takes_embeds = takes_embeds
        self.num_previous = num_previous
        self._backend = backend
        own_layers = sum(len(group.layer_names) for group in kv_cache_config.kv_cache_groups)
        may_cut = cut_layers and own_layers + len(kv_cache_config.shared_layers) >= LEAST_CUT
        self._packs_small = not may_cut  # a piece takes its layers' weights
        self._weights = ModelWeights(model, placement, packs_small=self._packs_small)
        self._programs = StepPrograms(
            self._update, kv_cache_config, placement, may_cut=may_cut, compiler_options=compiler_options
        )
        self.encoder = EncoderStep(self._weights, kv_cache_config, encoder_shapes, placement, backend=backend)

    @cached_property
    def no_tokens(self) -> jax.Array:  # int32[num_data * num_previous]
        """What the first step takes as the tokens of the step before."""
        return jax.device_put(np.zeros(self._all_previous, np.int32), self.placement.replicated)

    @property
    def _all_previous(self) -> int:
        """Tokens of the step before, of all data ranks."""
        return self.num_previous * self.placement.num_data

    @property
    def weights(self) -> ModelWeights:
        """What the next step computes with."""
        return self._weights

    def weights_of(self, model: Any) -> ModelWeights:
        """The weights of another model of the same make, for `use_weights`; all but the weights stays the first's.

        Raises:
            ValueError: they have other names, shapes or dtypes.
        """
        return ModelWeights(model, self.placement, packs_small=self._packs_small, like=self._weights)

    def use_weights(self, weights: ModelWeights) -> None:
        """The next step computes with what `weights_of` gave; nothing is compiled."""
        self._weights = self.encoder.weights = weights

    def set_weights(self, model: Any) -> None:
        """Takes the weights of another model; as `weights_of`, then `use_weights`."""
        self.use_weights(self.weights_of(model))

    @property
    def num_compiled(self) -> int:
        """Programs compiled for steps and encoders so far: one per bucket and shape of features that ran."""
        return self._programs.num_compiled + self.encoder.num_compiled

    def __call__(
        self,
        pages: KVPages,
        plan: StepPlan,
        *,
        previous: jax.Array | None = None,  # int32[num_previous], `sampled` of the step before, drafts behind it or not
        sampling: Any = None,  # pytree of numpy arrays, leading axis: rows of logits in the plan's order
        sampler_state: Any = None,  # pytree of device arrays, given to the sample_fn as they are
        features: Sequence[np.ndarray] = (),  # of the requests whose encoder runs in the step, in the plan's order
        embeds: jax.Array | None = None,  # [rows, dim] of models that take embeddings: `EmbedBuffer.array`
        embed_index: np.ndarray | None = None,  # int[T] -1: a token, else the row that stands for it; None: all tokens
        given: np.ndarray | None = None,  # int32[T] the token behind each that the score_fn scores, -1: none
    ) -> StepOutput:
        """Dispatches one step. `pages` is donated: use the output's. The plan and the host's state may change at once.

        Raises:
            ValueError: the plan fits no bucket, its page edits or token sources cannot be, its positions have other
                axes than the step's, `previous`, `sampling` or `embed_index` have other sizes, features or embeddings
                are missing, or given to a model that takes none. The pages are untouched.
        """
        if (plan.positions.ndim == 2) != self._mrope:
            wanted = (
                "[3, T] (build_step_plan with `mrope`)" if self._mrope else "[T] (or make the step with mrope=True)"
            )
            raise ValueError(f"expected positions {wanted}, got shape {list(plan.positions.shape)}")
        if plan.token_source.max(initial=-1) >= self.num_previous:
            raise ValueError(f"expected token sources below {self.num_previous}, got {plan.token_source.max()}")
        if embed_index is None and self._takes_embeds:
            embed_index = np.full(plan.num_tokens, -1, np.int32)
        if given is None and self._score_fn is not None:
            given = np.full(plan.num_tokens, -1, np.int32)
        batch = DeviceBatch.from_plan(plan, pick_bucket(plan, self.buckets), embed_index, given)
        arguments = self._arguments(batch, previous, sampling, embeds, sampler_state)
        check_edits(pages, plan)
        check_moves(pages, plan)
        slots = self.encoder.check_plan(pages, plan, features)
        pages = edit_pages(pages, plan, self.buckets.page_counts, backend=self._backend)
        pages = load_idle_states(pages, [plan], self.buckets.page_counts, backend=self._backend)
        for one, slot_mappings in zip(features, slots, strict=True):
            pages = self.encode(pages, one, slot_mappings)
        return self._stored(self._dispatch(pages, arguments), [plan])

    def call_ranks(
        self,
        pages: KVPages,
        plans: Sequence[StepPlan | None],  # of each data rank; None: it has no step. At least one has
        *,
        previous: jax.Array | None = None,  # int32[num_data * num_previous]
        sampling: Sequence[Any] = (),  # of each rank, as of a call; of one without a step of no rows
        sampler_state: Any = None,
        given: Sequence[np.ndarray | None] = (),  # of each rank
    ) -> StepOutput:
        """Dispatches one step of all data ranks. In every output those of a rank follow those of the rank before.

        Raises:
            ValueError: as a call. The pages are untouched.
        """
        bucket, ranks = pick_bucket_of_ranks(plans, self.buckets), range(len(plans))
        empty = self._empty_rank(bucket)
        batches = [empty] * len(plans)
        for rank, plan in enumerate(plans):
            if plan is None:
                continue
            own = given[rank] if given else None
            if own is None and self._score_fn is not None:
                own = np.full(plan.num_tokens, -1, np.int32)
            batches[rank] = DeviceBatch.from_plan(plan, bucket, given=own)
            check_edits(pages, plan)
            check_moves(pages, plan)
        padded = [jax.tree.map(lambda x: _padded_rows(x, bucket.num_logits), sampling[rank]) for rank in ranks]
        batch = join_batches(batches, self.num_previous)
        arguments = self._arguments(batch, previous, jax.tree.map(_joined, *padded), None, sampler_state)
        pages = edit_pages_of_ranks(pages, plans, self.buckets.page_counts, backend=self._backend)
        pages = load_idle_states(pages, plans, self.buckets.page_counts, backend=self._backend)
        return self._stored(self._dispatch(pages, arguments), plans)

    def encode(
        self,
        pages: KVPages,
        features: np.ndarray,  # float32, of one of the declared shapes
        slot_mappings: Sequence[np.ndarray],  # int32[num_encoder_tokens] of each group that reads an encoder, in order
    ) -> KVPages:
        """Dispatches the encoder for one request, which writes K and V of all cross-attention layers.

        `pages` is donated. Calling the step does it for the requests whose encoder the plan says to run.

        Raises:
            ValueError: features of another shape, other slots than one for each token, or slots outside the pool. The
                pages are untouched.
        """
        return self.encoder(pages, features, slot_mappings)

    def run(
        self,
        pages: KVPages,
        batch: DeviceBatch,
        *,
        previous: jax.Array | None = None,
        sampling: Any = None,
        embeds: jax.Array | None = None,
        sampler_state: Any = None,
    ) -> StepOutput:
        """Dispatches one step on a batch that is already padded. `pages` is donated.

        Raises:
            ValueError: as calling the step.
        """
        return self._dispatch(pages, self._arguments(batch, previous, sampling, embeds, sampler_state))

    def warmup(
        self,
        pages: KVPages,
        *,
        sampling: Any = None,
        embeds: jax.Array | None = None,
        sampler_state: Any = None,
        on_compiled: Callable[[int], object] | None = None,
    ) -> KVPages:
        """Compiles the step for every bucket, and encoders, page copies and zeroing for every size, by empty runs.

        `sampling` is an example of the sampling inputs, of any leading length; `on_compiled(1)` is called after each
        bucket. Returns the pages, unchanged in value.
        """
        for bucket in self.buckets.steps:
            batch = self._empty_batch(bucket)
            example = jax.tree.map(lambda x: x[:0], sampling)
            pages = self.run(pages, batch, sampling=example, embeds=embeds, sampler_state=sampler_state).pages
            if on_compiled is not None:
                on_compiled(1)
        pages = self.encoder.warmup(pages)
        groups = self.kv_cache_config.kv_cache_groups
        pools = {(groups[running].pool_id, groups[idle].pool_id) for running, idle in self.kv_cache_config.idle_groups}
        pages = warm_up_moves(pages, sorted(pools), self.buckets.page_counts, backend=self._backend)
        return jax.block_until_ready(warm_up_edits(pages, self.buckets.page_counts, backend=self._backend))

    def compiled(
        self, pages: KVPages, bucket: Bucket, *, sampling: Any = None, embeds: Any = None, sampler_state: Any = None
    ) -> jax.stages.Compiled:
        """The compiled module of one bucket, to look at aliases, memory and cost. Runs nothing.

        Weights and pages may be ShapeDtypeStructs with shardings (`nnx.eval_shape`, `page_shapes`), on devices that are
        only described (`jax.experimental.topologies`).
        """
        modules = self.compiled_programs(pages, bucket, sampling=sampling, embeds=embeds, sampler_state=sampler_state)
        if len(modules) > 1:
            raise ValueError(f"expected a step of one program, got {len(modules)}; ask for `compiled_programs`")
        return modules[0]

    def compiled_programs(
        self,
        pages: KVPages,
        bucket: Bucket,
        *,
        sampling: Any = None,
        embeds: Any = None,
        sampler_state: Any = None,
    ) -> tuple[jax.stages.Compiled, ...]:
        """As `compiled`, of a step that may be a chain of programs: the module of each, in order."""
        no_tokens: Any = jax.ShapeDtypeStruct((self._all_previous,), np.int32, sharding=self.placement.replicated)
        arguments = self._arguments(self._empty_batch(bucket), no_tokens, sampling, embeds, sampler_state)
        return self._programs.compiled(self._weights.arrays, pages, *arguments)

    def compiled_encoder(self, pages: KVPages, shape: tuple[int, ...]) -> jax.stages.Compiled:
        """The compiled encoder of features of one shape, likewise."""
        return self.encoder.compiled(pages, shape)

    def _empty_batch(self, bucket: Bucket) -> DeviceBatch:
        """A batch of this config without requests."""
        return join_batches([self._empty_rank(bucket)] * self.placement.num_data, self.num_previous)

    def _empty_rank(self, bucket: Bucket) -> DeviceBatch:
        """That of one data rank."""
        groups = self.kv_cache_config.kv_cache_groups
        pages = [group.kv_cache_spec.state_pages for group in groups]
        recurrent = {i: states.num_speculative_blocks for i, states in enumerate(pages) if states is not None}
        compressed = {i: group.tokens_per_state for i, group in enumerate(groups) if group.tokens_per_state != {1}}
        counts = {i: group.kv_cache_spec.num_reserved_blocks for i, group in enumerate(groups)}
        return DeviceBatch.empty(
            bucket,
            len(groups),
            mrope=self._mrope,
            embeds=self._takes_embeds,
            scores=self._score_fn is not None,
            recurrent=recurrent,
            compressed=compressed,
            encoder=self.encoder.group_ids,
            reserved={i: count for i, count in counts.items() if count},
            prompts=[i for i, group in enumerate(groups) if group.kv_cache_spec.rswa_window is not None],
        )

    def _update(
        self,
        weights: tuple[jax.Array, ...],
        pages: KVPages,
        batch: DeviceBatch,
        sampling: Any,
        previous: jax.Array,
        embeds: jax.Array | None,
        sampler_state: Any,
        may_narrow: bool,
    ) -> tuple[KVPages, _Outputs]:
        """The step as jax traces it, once per bucket; `may_narrow`: the last layer may differ from the others."""
        model = self._weights.model(weights)
        narrows = may_narrow and batch.given is None  # scores are of all tokens
        cache = StepCache(pages, batch, self.kv_cache_config, self.placement, narrows=narrows, backend=self._backend)
        inputs = {} if embeds is None else {"embeds": (embeds, batch.embed_index)}
        token_ids = _token_ids(batch, previous)
        if self.placement.num_data > 1:
            token_ids = jax.lax.with_sharding_constraint(token_ids, self.placement.rows_of_ranks)
        hidden = model(token_ids, batch.positions, cache, **inputs)
        if cache.unused_layers:
            raise ValueError(f"the model did not attend in layers {cache.unused_layers} of the cache config")
        is_narrowed = cache.wanted is not None and hidden.shape[0] == cache.wanted.shape[0]
        logits = model.logits(hidden if is_narrowed else hidden[batch.logits_indices])
        tokens, extras = jnp.zeros(logits.shape[0], jnp.int32), None
        if self._sample_fn is not None:
            given = (sampling,) if sampler_state is None else (sampling, sampler_state)
            tokens, extras = self._sample_fn(logits, *given)
        sampled = tokens = tokens.astype(jnp.int32)
        kept_logits, num_accepted = logits if self._return_logits else None, None
        if batch.logits_starts is not None and self._sample_fn is not None:
            by_rank = (self.placement.num_data, -1)
            starts, drafts = jnp.asarray(batch.logits_starts), token_ids[batch.logits_indices]
            accept = jax.vmap(partial(accept_drafts, num_drafts=self.buckets.max_num_drafts))
            of_ranks = accept(*(x.reshape(by_rank) for x in (drafts, tokens, starts)))
            sampled, num_accepted = (x.reshape(-1) for x in of_ranks)
        sampled = sampled.reshape(self.placement.num_data, -1)
        sampled = jnp.pad(sampled, ((0, 0), (0, self.num_previous - sampled.shape[1]))).reshape(-1)
        rows = None if num_accepted is None else tokens
        scores = None
        if self._score_fn is not None and batch.given is not None:
            scores = score_given(self._score_fn, model.logits, hidden, jnp.asarray(batch.given))
        return cache.pages, _Outputs(kept_logits, sampled, extras, rows, num_accepted, scores)

    def _dispatch(self, pages: KVPages, arguments: tuple[Any, ...]) -> StepOutput:
        """Runs the program of a bucket with or without drafts."""
        new_pages, outputs = self._programs(self._weights.arrays, pages, *arguments)
        logits, sampled, extras, tokens, num_accepted, scores = outputs
        if tokens is None or num_accepted is None:
            return StepOutput(new_pages, logits, sampled, extras, sampled, self.no_tokens, scores)
        return StepOutput(new_pages, logits, sampled, extras, tokens, num_accepted, scores)

    def _stored(self, output: StepOutput, plans: Sequence[StepPlan | None]) -> StepOutput:
        """The output, once the states that are cached from this step on are in the idle pools."""
        pages = store_idle_states(output.pages, plans, self.buckets.page_counts, backend=self._backend)
        return output._replace(pages=pages)

    def _arguments(
        self,
        batch: DeviceBatch,
        previous: jax.Array | None,
        sampling: Any,
        embeds: jax.Array | None,
        sampler_state: Any,
    ) -> tuple[DeviceBatch, Any, jax.Array, jax.Array | None, Any]:
        """What a step takes beside weights and pages, in the shapes that were compiled."""
        if (embeds is not None, batch.embed_index is not None) != (self._takes_embeds,) * 2:
            taken = "embeds [rows, dim]" if self._takes_embeds else "no embeds (or make the step with embeds=True)"
            raise ValueError(f"expected {taken}, got {'none' if embeds is None else list(embeds.shape)}")
        previous = self.no_tokens if previous is None else previous
        wanted = (self._all_previous,)
        if previous.shape != wanted:
            raise ValueError(f"expected previous tokens of shape {wanted}, got {previous.shape}")
        rows = batch.logits_indices.shape[0]
        leaves, tree = jax.tree.flatten(sampling)
        if not all(_is_taken_as_it_is(leaf, rows) for leaf in leaves):
            sampling = jax.tree.unflatten(tree, [_padded_rows(leaf, rows) for leaf in leaves])
        return batch, sampling, previous, embeds, sampler_state


def make_update_step(
    model: Any,  # model(token_ids[T], positions[T], cache) -> hidden[T, d]; model.logits(hidden[N, d])
    kv_cache_config: KVCacheConfig,
    buckets: Buckets,
    *,
    placement: Placement | None = None,
    sample_fn: SampleFn | None = None,
    score_fn: ScoreFn | None = None,  # of tokens that are given, beside those that are sampled; None: none are
    return_logits: bool | None = None,  # None: only where nothing samples
    mrope: bool = False,  # whether the model takes positions int32[3, T]
    encoder_shapes: EncoderShapes | None = None,  # of features for model.encode(features, cache), with their tokens
    embeds: bool = False,  # whether the model takes embeds=(array[rows, dim], index int32[T])
    num_previous: int | None = None,  # tokens of `previous`: sampled ones, then drafts; None: buckets.max_num_requests
    cut_layers: bool = True,  # many layers alike are a chain of programs, compiled once: `step_cuts`; else one program
    compiler_options: CompilerOptions | None = None,  # of XLA; an unknown one raises when a step compiles
    backend: str = "auto",
) -> UpdateStep:
    """The update step of `model` over pages of `kv_cache_config`, sampling in the same program if `sample_fn` is given.

    `model` is a module of Flax NNX, or any pytree that can be called: a module of Equinox, a `FunctionModel`. Its
    arrays are weights, and arguments of the compiled step; all other leaves are constants.
    Weights that do not lie on the placement's devices are copied to each of them once, now.

    Raises:
        ValueError: the config's columns do not fit its layers, its KV heads do not split over the placement, encoder
            shapes are missing, or given where no layer reads an encoder, recurrent groups have states for fewer drafts
            than the buckets, or `num_previous` is below the requests of the buckets.
    """
    return UpdateStep(
        model,
        kv_cache_config,
        buckets,
        Placement.create() if placement is None else placement,
        sample_fn=sample_fn,
        score_fn=score_fn,
        return_logits=sample_fn is None if return_logits is None else return_logits,
        mrope=mrope,
        encoder_shapes={} if encoder_shapes is None else encoder_shapes,
        takes_embeds=embeds,
        num_previous=buckets.max_num_requests if num_previous is None else num_previous,
        cut_layers=cut_layers,
        compiler_options=compiler_options,
        backend=backend,
    )


def _token_ids(batch: DeviceBatch, previous: jax.Array) -> jax.Array:
    """Token ids of the step, those that the step before sampled filled in."""
    source = jnp.asarray(batch.token_source)
    return jnp.where(source >= 0, previous[jnp.maximum(source, 0)], batch.token_ids)


def _check_drafts(kv_cache_config: KVCacheConfig, buckets: Buckets, num_previous: int) -> None:
    """Raises ValueError unless recurrent groups have states for the buckets' drafts, and `previous` the sampled."""
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        pages = group.kv_cache_spec.state_pages
        if pages is not None and pages.num_drafts < buckets.max_num_drafts:
            raise ValueError(
                f"group {group_id}: expected states for {buckets.max_num_drafts} drafts (num_speculative_blocks), as "
                f"the buckets have, got {pages.num_drafts}"
            )
    if num_previous < buckets.max_num_requests:
        raise ValueError(f"expected num_previous >= {buckets.max_num_requests}, got {num_previous}")


def _joined(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate(parts)


def _is_taken_as_it_is(values: Any, num_rows: int) -> bool:
    """Whether an array has `num_rows` rows and packing copies it."""
    return isinstance(values, np.ndarray) and len(values) == num_rows and is_packed(values.size, values.dtype)


def _padded_rows(values: np.ndarray, num_rows: int) -> np.ndarray:
    """`values` with zeros after its rows up to `num_rows`; a fresh copy, unless packing copies it."""
    values = np.asarray(values)
    if _is_taken_as_it_is(values, num_rows):
        return values
    if values.shape[0] > num_rows:
        raise ValueError(f"expected sampling inputs of at most {num_rows} rows, got {values.shape[0]}")
    out = np.zeros((num_rows, *values.shape[1:]), values.dtype)
    out[: values.shape[0]] = values
    return out


__all__ = ["SampleFn", "StepOutput", "UpdateStep", "make_update_step"]
