"""What an engine does between runs: gives its pages up and takes them again, takes new weights, keeps prompts.

Flow:    a training loop, an operator -> [EngineLifeCycle] -> EngineCore, KVCacheManager, connector
Source:  sleep and wake of vLLM's LLM class; the versions of weights in hashes are ours

    awake --sleep--> asleep: no page arrays on the device; with tiers the host has what was cached
    asleep --wake--> awake: pages made anew; what the host has is loaded where prompts begin with it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvjax.core import KVCacheManager, Request
from kvjax.core.manager.pins import PinnedPrefix
from kvjax.engine.drafts.draft_model import DraftModel
from kvjax.engine.front.engine_weights import EngineWeights
from kvjax.engine.front.request_maker import RequestMaker
from kvjax.engine.requests.request_inputs import GivenInputs
from kvjax.engine.step.engine_core import EngineCore
from kvjax.engine.step.loop_parts import tell_weights
from kvjax.engine.step.rank_loops import RankPin
from kvjax.errors import EngineClosedError, TierDataError
from kvjax.tiers.connector import KVConnector
from kvjax.tiers.stats import TierStats


class EngineLifeCycle:
    """The half of `LLMEngine` that runs nothing, over its attributes, without state of its own but `is_asleep`."""

    connector: KVConnector | None
    is_asleep: bool = False
    _core: EngineCore
    _maker: RequestMaker
    _weights: EngineWeights
    _draft_model: DraftModel | None

    def sleep(self) -> None:
        """Frees the pages on the device, after what is cached has gone to the tiers; requests are refused until `wake`.

        Without tiers what was cached is gone.

        Raises:
            ValueError: requests are unfinished, or prefixes pinned. Nothing is changed.
            NotImplementedError: there is a draft model, whose pages are not freed.
        """
        if self._draft_model is not None:
            raise NotImplementedError("sleep does not work with a draft model")
        if self.is_asleep:
            return
        managers = self._idle_managers("sleep")
        with self._core.changing():
            runner = self._core.runner
            if self.connector is not None:
                runner.pages = self.connector.save_all(runner.pages)
            for manager in managers:
                manager.reset_prefix_cache()
            runner.release_pages()
            self.is_asleep = True

    def wake(self) -> None:
        """Makes the pages anew, empty."""
        if self.is_asleep:
            with self._core.changing():
                self._core.runner.make_pages()
                self.is_asleep = False

    def set_weights(self, version: int | str, model: Any = None) -> None:
        """Goes on with other weights: nothing that was computed by others is a hit, on the device or in any tier.

        Hashes of requests have the version from here on, so a version that comes again, with the same weights, hits
        what it computed, where a disk still has it. The weights are read once, for a digest of them.

        Args:
            version: of the weights; another for each update.
            model: what computes from here on, the same but for its weights; numpy arrays are copied. None: weights are
                the same arrays as before. Engines that share compiled steps (`like`) share them, and each is told.

        Raises:
            ValueError: requests are unfinished, prefixes pinned, the version is neither an integer nor text, or it is
                that of other weights, here or in the disk store; or the model differs by more than its weights.
                Nothing is changed.
        """
        Request("version", [0], weight_version=version)  # checks it
        managers = self._idle_managers("set_weights")
        step = self._core.runner.update_step
        weights = step.weights if model is None else step.weights_of(model)
        in_use = self._weights.of_version(version, weights, model)
        tell_weights(self.connector, in_use)
        with self._core.changing():
            self._core.runner.use_weights(weights)
            self._weights.note(in_use)
            for manager in managers:
                manager.reset_prefix_cache()
            if self.connector is not None:
                self.connector.reset()
                for rank, manager in enumerate(managers):
                    self.connector.of_rank(rank).scheduler.bind_kv_cache_manager(manager)
            self._maker.weight_version = version

    def save_cache(self) -> None:
        """Brings what is cached to the tiers, as a process does before it ends; waits until it is there.

        Raises:
            ValueError: requests are unfinished, or prefixes pinned. Nothing is changed.
            TierDataError: disk or shared store did not take all of it, and the message says why. What they took is
                there.
        """
        self._idle_managers("save_cache")
        if self.connector is None or self.is_asleep:
            return
        stats = self.tier_stats
        num_skips = (0, 0) if stats is None else (stats.num_disk_skips, stats.num_shared_skips)
        with self._core.changing():
            self._core.runner.pages = self.connector.save_all(self._core.runner.pages)
        if stats is not None and stats.num_disk_skips > num_skips[0]:
            reason = stats.disk_problem or "they are larger than disk_bytes"
            raise TierDataError(f"{stats.num_disk_skips - num_skips[0]} units did not go to disk: {reason}")
        if stats is not None and stats.num_shared_skips > num_skips[1]:
            reason = stats.shared_problem or "a call failed, or took longer than timeout_s"
            raise TierDataError(
                f"{stats.num_shared_skips - num_skips[1]} units did not go to the shared store: {reason}"
            )

    @property
    def tier_stats(self) -> TierStats | None:
        """What the tiers have done; None: there are none."""
        return getattr(self.connector, "stats", None)

    def pin_prompt(
        self, prompt: str | Sequence[int] | np.ndarray, *, cache_salt: str | None = None, lora_name: str | None = None
    ) -> PinnedPrefix | RankPin | None:
        """Keeps what is cached of a prompt's beginning until `unpin_prompt`; None: nothing is.

        Of several data ranks that which has most of it keeps it.

        Raises:
            ValueError: as `LLMEngine.add_request`.
            OutOfBlocksError: too few blocks would be left for the longest request. Nothing is changed.
        """
        given = GivenInputs(cache_salt=cache_salt, lora_name=lora_name)
        request = self._maker.make(prompt, None, "pin", given, ())[0].request
        return self._core.loop.pin(request)

    def unpin_prompt(self, prefix: PinnedPrefix | RankPin) -> None:
        """Lets a prefix go.

        Raises:
            BlockStateError: it is not pinned, or the cache was emptied since. Nothing is changed.
        """
        self._core.loop.unpin(prefix)

    def _check_awake(self) -> None:
        if self.is_asleep:
            raise EngineClosedError("the engine is asleep and has no pages; call wake() first")

    def _idle_managers(self, what: str) -> tuple[KVCacheManager, ...]:
        """The manager of each data rank, once nothing is in flight.

        Raises:
            ValueError: one holds blocks.
        """
        self._core.sweep()
        scheduler = self._core.loop.scheduler
        if scheduler.num_unfinished:
            raise ValueError(f"expected {what} without requests, got {scheduler.num_unfinished} unfinished")
        while self._core.runner.num_in_flight:
            self._core.step()
        managers = self._core.loop.managers
        for manager in managers:
            if manager.usage:
                raise ValueError(f"expected {what} without pinned prefixes, got {manager.usage:.1%} of the cache held")
        return managers


__all__ = ["EngineLifeCycle"]
