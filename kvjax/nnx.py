"""The cache as a module of Flax NNX: its pages are an `nnx.Cache`, updated in place by jitted functions of NNX.

Flow:    StepPlan -> [PagedKVCache.load] -> DeviceBatch -> in `nnx.jit`: [PagedKVCache.step] -> what layers call
Source:  ARCHITECTURE.md, "The step plan"

    cache = PagedKVCache(config)

    @partial(nnx.jit, donate_argnums=1)
    def forward(model, cache, batch):
        with cache.step(batch) as attend:
            hidden = model(batch.token_ids, batch.positions, attend)
        return model.logits(hidden[batch.logits_indices])

    logits = forward(model, cache, cache.load(plan, buckets))

For a training loop's own step functions, or a module that owns its cache. `kvjax.device.make_update_step` does more:
warm-up, sampling in the step, tokens that never leave the device, encoders, drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flax import nnx

from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_plan import StepPlan
from kvjax.device import Buckets, DeviceBatch, Placement, StepCache, create_pages
from kvjax.device.inputs.batch import pick_bucket
from kvjax.device.pages.page_edits import check_edits, edit_pages


class PagedKVCache(nnx.Module):
    """The pages of one config. Donate it to jitted functions, or XLA copies all pages at every step."""

    def __init__(
        self, kv_cache_config: KVCacheConfig, placement: Placement | None = None, *, backend: str = "auto"
    ) -> None:
        """Zero pages.

        Args:
            kv_cache_config: pools and groups, as `kvjax.planning` makes them.
            placement: the devices; None: the default device.
            backend: of the ops of pallas_kernels: "auto", "reference" or a platform's.

        Raises:
            ValueError: the config's columns do not fit its layers, or KV heads do not split over the placement.
        """
        self.kv_cache_config = kv_cache_config
        self.placement = Placement.create() if placement is None else placement
        self.backend = backend
        if kv_cache_config.idle_groups:
            raise NotImplementedError(
                "idle states are moved by `kvjax.device.make_update_step` alone; plan without them"
            )
        self.pages = nnx.Cache(create_pages(kv_cache_config, self.placement))

    def load(self, plan: StepPlan, buckets: Buckets) -> DeviceBatch:
        """The padded inputs of a step; copies and zeroes the pages that the plan names. Outside of jitted functions.

        Raises:
            ValueError: the plan fits no bucket, or its page edits cannot be. The pages are untouched.
        """
        batch = DeviceBatch.from_plan(plan, pick_bucket(plan, buckets))
        pages = self.pages.get_value()
        check_edits(pages, plan)
        self.pages.set_value(edit_pages(pages, plan, buckets.page_counts, backend=self.backend))
        return batch

    @contextmanager
    def step(self, batch: DeviceBatch) -> Iterator[StepCache]:
        """What the layers of one forward pass call, each once; the pages are theirs when the block ends.

        Raises:
            ValueError: at the end of the block, if a layer of the config did not attend.
        """
        attend = StepCache(self.pages.get_value(), batch, self.kv_cache_config, self.placement, backend=self.backend)
        yield attend
        if attend.unused_layers:
            raise ValueError(f"the model did not attend in layers {attend.unused_layers} of the cache config")
        self.pages.set_value(attend.pages)


__all__ = ["PagedKVCache"]
