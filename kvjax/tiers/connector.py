"""What an engine asks of whoever brings KV from outside its pools: the scheduler's side and the worker's side.

Flow:    Scheduler -> [SchedulerConnector] -> metadata -> [WorkerConnector] -> ConnectorOutput -> SchedulerConnector
Source:  names of vLLM v1/core's KV connectors (kv_connector/v1/base.py); no torch, and pages as values

A step, in order:

    get_finished             worker      what has arrived since the last step
    update_connector_output  scheduler   requests whose blocks are loaded may run; those that failed compute again
    get_num_new_matched_tokens, update_state_after_alloc   scheduler, for each request that is admitted
    build_connector_meta     scheduler   all that the step asks for
    start_load_kv            worker      pages are read before, and written before, the step that is dispatched next

A JAX step is one program over all layers. It takes the pages that `start_load_kv` returns, so it waits for what was
written there by itself: vLLM's `wait_for_layer_load` and `save_kv_layer` have nothing to do here, and nobody asks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvjax.core import CacheTier, KVCacheBlocks, KVCacheManager, Request


@dataclass(frozen=True)
class ConnectorOutput:
    """What a worker has done since it was asked last, and what it is still at."""

    finished_recving: Mapping[int, int] = field(default_factory=dict)  # load -> pages written
    failed_recving: frozenset[int] = frozenset()  # loads of which a page could not be written
    pending_recving: frozenset[int] = frozenset()  # loads that go on
    finished_sending: tuple[Any, ...] = ()  # stores that ended, in their order
    pending_sending: int = 0  # stores that go on


class LoadResults(NamedTuple):
    """Requests whose loads have ended."""

    loaded: tuple[str, ...]
    failed: tuple[str, ...]


@dataclass(frozen=True)
class WeightsInUse:
    """What computes K and V from here on."""

    model: Mapping[str, str]  # all beside weights that K and V depend on, by name
    version: int | str | None  # None: those that the engine began with
    digest: Callable[[], str]  # of the weights; takes as long as to read them all

    def text(self, name: str) -> str:
        """What to compare with other engines. A `name` stands for the weights, empty: their digest does."""
        weights = (name, self.version) if name else self.digest()
        source = hashlib.sha256(repr((sorted(self.model.items()), weights)).encode()).hexdigest()[:16]
        return f"{name} {source}".strip()


class StepConnector(Protocol):
    """What an engine asks of the scheduler's side in every step, for the requests of all data ranks."""

    def build_connector_meta(self) -> Any:
        """What the worker is to do before the next step; the same thing is asked for once."""

    def update_connector_output(self, output: Any) -> LoadResults:
        """Takes note of what the worker did, as `get_finished` says it; whose loads have ended."""


class SchedulerConnector(StepConnector, Protocol):
    """The side of the thread that schedules, of one data rank. It knows blocks and requests, and no arrays."""

    def bind_kv_cache_manager(self, manager: KVCacheManager) -> None:
        """Whose blocks are meant from here on; nothing is in flight."""

    def get_num_new_matched_tokens(
        self, request: Request, blocks: KVCacheBlocks, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens behind a lookup's hit that can be loaded, and whether that takes other steps.

        None: not to be said yet; ask in the next step.
        """

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The request has its blocks, those of external tokens among them; `blocks` are what its lookup found."""

    def request_finished(self, request: Request) -> None:
        """The request is about to give its blocks up: nothing may be written into them from the next metadata on.

        It has ended, or is preempted while it loads; then it is asked for again when it is admitted again. What is read
        of the blocks has to be read by the next `start_load_kv`.
        """


class WorkerConnector(Protocol):
    """The side that has the pages. It knows no requests."""

    @property
    def has_work(self) -> bool:
        """Whether `wait` would wait for anything."""

    def warmup(self, pages: Any) -> Any:
        """Compiles all that it runs on pages; the pages."""

    def start_load_kv(self, pages: Any, metadata: Any) -> Any:
        """Reads pages that are to be kept, then writes those that have arrived; the pages. Waits for nothing."""

    def get_finished(self) -> Any:
        """What has happened since the last call: a `ConnectorOutput`, where there is one worker."""

    def wait(self) -> None:
        """Waits until there is something to report or to ask for anew, or nothing to wait for."""


class RankConnector(Protocol):
    """What the manager and the scheduler of one data rank are given."""

    @property
    def tier(self) -> CacheTier:
        """What the manager tells of blocks that it reuses."""

    @property
    def scheduler(self) -> SchedulerConnector:
        """The half for the thread that schedules."""


class KVConnector(Protocol):
    """Both sides, of one process.

    Where it has a `placement`, an engine whose pages lie otherwise refuses it. Where it has `use_weights`, that is
    called with `WeightsInUse` when an engine is made with it and before the engine's weights change; a ValueError there
    is raised to the engine's caller, and nothing is changed.
    """

    @property
    def scheduler(self) -> StepConnector:
        """The half for the thread that schedules, all data ranks together."""

    @property
    def worker(self) -> WorkerConnector:
        """Beside the pages."""

    def of_rank(self, rank: int) -> RankConnector:
        """The part of one data rank; of one rank there may be one alone."""

    def save_all(self, pages: Any) -> Any:
        """Keeps all that the manager has cached; the pages. Waits until it is there. Nothing runs."""

    def reset(self, *, forget: bool = True) -> None:
        """Ends all that is in flight; with `forget` nothing that lies in memory is found any more."""

    def close(self) -> None:
        """Ends its threads, after what they are at. Nothing else may be called then."""


__all__ = [
    "ConnectorOutput",
    "KVConnector",
    "LoadResults",
    "RankConnector",
    "SchedulerConnector",
    "StepConnector",
    "WeightsInUse",
    "WorkerConnector",
]
