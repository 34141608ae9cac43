"""The encoder's program: one request's features to K and V in its pages, jitted once per declared shape.

Flow:    features of a request + slots of its encoder tokens -> [EncoderStep] -> KVPages, donated and updated in place
Source:  ARCHITECTURE.md, "Order inside a step"

It is a program of its own, dispatched before the step in which its request starts: were it part of the step, each shape
of features would multiply the number of compiled steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import jax
import numpy as np

from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import GroupPlan, StepPlan
from kvjax.device.encoder.encoder_cache import EncoderCache, encoder_groups
from kvjax.device.mesh.placement import Placement
from kvjax.device.mesh.transfers import hands_over
from kvjax.device.model.model_weights import ModelWeights
from kvjax.device.pages.kv_pages import KVPages, page_shardings

EncoderShapes: TypeAlias = Mapping[tuple[int, ...], int]  # shape of a request's features -> encoder tokens


class EncoderStep:
    """The encoder of one model over one cache config. Owned by one `UpdateStep`; a call costs a dispatch."""

    def __init__(
        self,
        weights: ModelWeights,  # of a model whose `encode(features, cache)` is called
        kv_cache_config: KVCacheConfig,
        shapes: EncoderShapes,
        placement: Placement,
        *,
        backend: str,
    ) -> None:
        """A program for each of `shapes`.

        Raises:
            ValueError: there are shapes and no layer that reads an encoder, the other way round, or a shape has more
                tokens than such a layer keeps.
        """
        self.shapes = dict(shapes)
        self.group_ids = encoder_groups(kv_cache_config)
        if bool(self.shapes) != bool(self.group_ids):
            raise ValueError(
                f"expected shapes of encoder inputs where layers read an encoder, and nowhere else, got "
                f"{len(self.shapes)} shapes and groups {self.group_ids}"
            )
        self.weights = weights
        self._config = kv_cache_config
        self._placement = placement
        self._backend = backend
        pages, replicated = page_shardings(kv_cache_config, placement), placement.replicated
        self._encode = jax.jit(
            self._traced,
            donate_argnums=1,
            in_shardings=(None, pages, replicated, replicated),
            out_shardings=pages,
        )

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far: one per shape that ran."""
        return int(self._encode._cache_size())  # type: ignore[attr-defined]

    @hands_over
    def __call__(
        self,
        pages: KVPages,
        features: np.ndarray,  # float32, of one of `shapes`
        slot_mappings: Sequence[np.ndarray],  # int32[num_encoder_tokens] of each of `group_ids`
    ) -> KVPages:
        """Dispatches the encoder for one request. `pages` is donated.

        Raises:
            ValueError: `features` are of another shape, or there is not a slot for each encoder token in each group,
                or one is outside its pool. The pages are untouched.
        """
        self.check(pages, features, slot_mappings)
        slots = {i: np.array(slots, np.int32) for i, slots in zip(self.group_ids, slot_mappings, strict=True)}
        return self._encode(self.weights.arrays, pages, np.array(features, np.float32), slots)

    def check(self, pages: KVPages, features: np.ndarray, slot_mappings: Sequence[np.ndarray]) -> None:
        """Raises ValueError as a call would; changes nothing."""
        if features.shape not in self.shapes:
            raise ValueError(
                f"expected encoder features of shape {shapes_text(self.shapes)}, got {list(features.shape)}"
            )
        wanted = [self.shapes[features.shape]] * len(self.group_ids)
        sizes = [slots.size for slots in slot_mappings]
        if sizes != wanted:
            raise ValueError(f"expected slots of {wanted} encoder tokens in groups {self.group_ids}, got {sizes}")
        for group_id, slots in zip(self.group_ids, slot_mappings, strict=True):
            group = self._config.kv_cache_groups[group_id]
            end = pages.num_pages(group.pool_id) * group.kv_cache_spec.block_size
            if slots.min() < -1 or slots.max() >= end:
                raise ValueError(f"group {group_id}: expected slots in [-1, {end}), got {slots.min()} to {slots.max()}")

    def check_plan(self, pages: KVPages, plan: StepPlan, features: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
        """Per request whose encoder runs in a step, int32[num_encoder_tokens] slots of each group.

        Raises:
            ValueError: there are not as many features, or one cannot be encoded. Nothing is changed.
        """
        by_request = _slots_of_requests([plan.groups[i] for i in self.group_ids])
        if len(by_request) != len(features):
            raise ValueError(
                f"expected encoder features of {len(by_request)} requests whose encoder runs in this step, "
                f"got {len(features)}"
            )
        for one, slot_mappings in zip(features, by_request, strict=True):
            self.check(pages, one, slot_mappings)
        return by_request

    def warmup(self, pages: KVPages) -> KVPages:
        """Compiles the program of each shape by running it without slots; returns the pages, unchanged in value."""
        for shape, num_tokens in self.shapes.items():
            nowhere = [np.full(num_tokens, -1, np.int32)] * len(self.group_ids)
            pages = self(pages, np.zeros(shape, np.float32), nowhere)
        return pages

    def compiled(self, pages: KVPages, shape: tuple[int, ...]) -> jax.stages.Compiled:
        """The compiled module of one shape, to look at aliases, memory and cost. Runs nothing."""
        slots = {i: jax.ShapeDtypeStruct((self.shapes[shape],), np.int32) for i in self.group_ids}
        return self._encode.lower(self.weights.arrays, pages, jax.ShapeDtypeStruct(shape, np.float32), slots).compile()

    def _traced(
        self,
        weights: tuple[jax.Array, ...],
        pages: KVPages,
        features: jax.Array,
        slots: dict[int, jax.Array],
    ) -> KVPages:
        """The program as jax traces it, once per shape."""
        model = self.weights.model(weights)
        cache = EncoderCache(pages, slots, self._config, self._placement, backend=self._backend)
        model.encode(features, cache)
        if cache.unwritten_layers:
            raise ValueError(f"the encoder did not write layers {cache.unwritten_layers} of the cache config")
        return cache.pages


def shapes_text(shapes: EncoderShapes) -> str:
    """For an error, such as "[80, 3000] or [80, 1500]"; "none" where there are no shapes."""
    return " or ".join(str(list(shape)) for shape in shapes) or "none"


def _slots_of_requests(groups: Sequence[GroupPlan]) -> list[list[np.ndarray]]:
    """The slots of each request that has any, for each of the groups, which have the same encoder tokens."""
    starts = groups[0].encoder_starts if groups else None
    if starts is None:
        return []
    places = np.flatnonzero(np.diff(starts)).tolist()
    return [[group.slot_mapping[starts[i] : starts[i + 1]] for group in groups] for i in places]


__all__ = ["EncoderShapes", "EncoderStep", "shapes_text"]
