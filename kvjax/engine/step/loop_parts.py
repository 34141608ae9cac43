"""Makes the host loops of an engine: requests, scheduler and manager, as at the start and after a restart.

Flow:    EngineConfig, KVCachePlan, ModelRunner -> [LoopParts.new_loops] -> HostLoop, or RankLoops of several data ranks
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax

from kvjax.core.requests.request_table import RequestTable
from kvjax.core.spec import KVCacheConfig
from kvjax.device import Placement
from kvjax.device.mesh.processes import spans_processes
from kvjax.device.pages.kv_pages import page_shapes
from kvjax.engine.scheduling.running_inputs import RunningInputs
from kvjax.engine.scheduling.scheduler import Scheduler, SchedulerConfig
from kvjax.engine.scheduling.speculation import Drafter
from kvjax.engine.step.config import EngineConfig
from kvjax.engine.step.host_loop import HostLoop
from kvjax.engine.step.make_manager import make_manager
from kvjax.engine.step.model_runner import ModelRunner
from kvjax.engine.step.rank_loops import RankLoops
from kvjax.models.config import ModelConfig
from kvjax.planning import KVCachePlan
from kvjax.tiers.connector import KVConnector, WeightsInUse


@dataclass(frozen=True)
class LoopParts:
    """What host loops are made of."""

    model: ModelConfig
    config: EngineConfig
    plan: KVCachePlan
    runner: ModelRunner
    connector: KVConnector | None  # of tiers below the pages
    new_drafter: Callable[[RequestTable], Drafter | None]
    clock: Callable[[], float]

    def new_loops(self) -> HostLoop | RankLoops:
        """One loop, or one for each data rank."""
        loops = [self._new_loop(rank) for rank in range(self.runner.placement.num_data)]
        return loops[0] if len(loops) == 1 else RankLoops(loops, num_step_stats=self.config.num_step_stats)

    def _new_loop(self, rank: int) -> HostLoop:
        config, runner = self.config, self.runner
        connector = None if self.connector is None else self.connector.of_rank(rank)
        manager = make_manager(config, self.plan, connector)
        limits = SchedulerConfig(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=config.max_model_len,
            watermark=config.watermark,
            max_steps_in_flight=config.max_steps_in_flight,
            num_drafts=config.num_drafts,
        )
        inputs = RunningInputs(runner.num_embedding_rows, has_mrope=self.model.has_mrope)
        return HostLoop(
            manager,
            Scheduler(
                manager,
                limits,
                inputs,
                self.new_drafter(manager.request_table),
                None if connector is None else connector.scheduler,
            ),
            num_step_stats=config.num_step_stats,
            pick_shape=runner.buckets.pick,
            sampler_sizes=runner.sampler_sizes,
            clock=self.clock,
        )


def check_parts(placement: Placement, *, has_draft_model: bool = False, connector: KVConnector | None = None) -> None:
    """Raises NotImplementedError where data ranks or several processes cannot have a part of an engine."""
    if placement.num_data > 1 and has_draft_model:
        raise NotImplementedError(
            f"draft models do not work over {placement.num_data} data ranks; run an engine on each"
        )
    works = connector is None or getattr(connector, "works_over_processes", False)
    if not works and spans_processes(placement.mesh):
        raise NotImplementedError(
            f"a {type(connector).__name__} does not work over several processes, where loads would end at other steps"
        )


def check_connector(connector: KVConnector, kv_cache_config: KVCacheConfig, placement: Placement) -> None:
    """Raises ValueError where the connector says by `placement` how pages lie, and the engine's lie otherwise."""
    own: Placement | None = getattr(connector, "placement", None)
    if own is None:
        return
    pairs = zip(*(jax.tree.leaves(page_shapes(kv_cache_config, each)) for each in (own, placement)), strict=True)
    if all(a.shape == b.shape and a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs):
        return
    raise ValueError(
        f"expected a connector of pages on {_named(placement)}, got one of pages on {_named(own)}; give it the "
        "engine's: placement=Placement.create(mesh)"
    )


def tell_weights(connector: KVConnector | None, weights: WeightsInUse) -> None:
    """Tells a connector that wants to know what computes K and V from here on.

    Raises:
        ValueError: the connector has KV of other weights under this version. Nothing is changed.
    """
    use_weights = getattr(connector, "use_weights", None)
    if use_weights is not None:
        use_weights(weights)


def _named(placement: Placement) -> str:
    axes = ", ".join(f"{name}={size}" for name, size in placement.mesh.shape.items())
    return f"a mesh ({axes}) of devices {[device.id for device in placement.mesh.devices.flat]}"


__all__ = ["LoopParts", "check_connector", "check_parts", "tell_weights"]
