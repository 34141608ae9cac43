"""Processes that run one engine each over one mesh, and must plan the same steps.

Flow:    settings, HostStep of every step -> [Agreement] -> nothing, or DivergenceError with a report
Source:  docs/parallelism.md; the same calls in the same order give the same steps, so nothing else is sent

Every process runs the same scheduler and managers on the same requests; what they plan is hashed, and the hashes of
the last steps are compared every so many steps. Where they differ the engine stops: pages would hold other tokens than
some process believes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.engine.step.config import EngineConfig
from kvjax.engine.step.host_loop import HostStep
from kvjax.engine.step.rank_loops import RankSteps
from kvjax.errors import DivergenceError
from kvjax.models.config import ModelConfig
from kvjax.tiers.units import NOTHING, TierMeta


class Board(Protocol):
    """`kvjax.device.mesh.processes.ProcessBoard`."""

    index: int

    def exchange(self, topic: str, text: str) -> list[str]:
        """The texts of all processes on a topic."""

    def check_peers(self, error: BaseException | None = None) -> None:
        """Raises PeerLostError, from `error`, if a process is gone."""


class Agreement:
    """One process's account of its steps. Owned by the engine's thread; costs a hash of each step's arrays."""

    def __init__(self, board: Board, interval: int) -> None:
        """`interval`: steps between comparisons."""
        self._board = board
        self._interval = interval
        self._lines: list[str] = []  # of the steps since the last comparison
        self._num_steps = 0
        self._transfers = hashlib.blake2b(digest_size=8)  # all that were planned
        self._failure: DivergenceError | None = None

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Compares what the processes were told.

        Raises:
            ValueError: they differ; the message names what.
        """
        lines = [f"{name}={value!r}" for name, value in settings.items()]
        texts = self._board.exchange("settings", "\n".join(lines))
        for process, text in enumerate(texts):
            theirs, first = text.split("\n"), texts[0].split("\n")
            if theirs != first:
                others = [f"{b} (process 0: {a})" for a, b in zip(first, theirs, strict=False) if a != b]
                raise ValueError(
                    f"expected the same settings on all processes, got on process {process} {'; '.join(others)}"
                )

    def check_peers(self, error: BaseException | None = None) -> None:
        """Raises PeerLostError, from `error`, if one of the processes is gone."""
        self._board.check_peers(error)

    def note_transfers(self, metadata: Sequence[TierMeta]) -> None:
        """Remembers what tiers are to do before the next step."""
        for one in metadata:
            if one is not NOTHING:
                self._transfers.update(one.digest())

    def note(self, step: HostStep | RankSteps) -> None:
        """Remembers a step that is about to be dispatched, and compares when it is time.

        Raises:
            DivergenceError: the processes have planned other steps; from then on, always.
        """
        if self._failure is not None:
            raise self._failure
        self._num_steps += 1
        self._lines.append(f"{describe(step)}, transfers so far {self._transfers.hexdigest()}")
        if self._num_steps % self._interval == 0:
            try:
                self._compare()
            except DivergenceError as failure:
                self._failure = failure
                raise

    def _compare(self) -> None:
        own, self._lines = self._lines, []
        texts = self._board.exchange(f"step {self._num_steps}", "\n".join(own))
        by_process = [text.split("\n") for text in texts]
        first_step = self._num_steps - len(own) + 1
        for number, lines in enumerate(zip(*by_process, strict=True), start=first_step):
            if len(set(lines)) > 1:
                raise DivergenceError(
                    f"processes planned other steps from step {number} on: "
                    f"{'; '.join(f'process {i}: {line}' for i, line in enumerate(lines))}. They must be given the same "
                    "requests in the same order; make new engines"
                )


def settings_of(config: EngineConfig, model: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """What all processes of an engine must have alike."""
    return {
        **{field.name: getattr(config, field.name) for field in fields(config) if field.name != "compilation_cache"},
        "model": model,
        "mesh": (dict(mesh.shape), [device.id for device in mesh.devices.flat]),
        "jax": jax.__version__,
    }


def describe(step: HostStep | RankSteps) -> str:
    """A hash of what a step computes and samples, and its size."""
    digest = hashlib.blake2b(digest_size=8)
    num_requests = num_tokens = 0
    for rank, one in enumerate(step.by_rank):
        digest.update(b"rank %d" % rank)
        if one is None:
            continue
        plan = one.plan
        num_requests, num_tokens = num_requests + plan.num_requests, num_tokens + plan.num_tokens
        digest.update("\n".join(map(str, plan.request_ids)).encode())
        for group in plan.groups:
            states = (group.state_read, group.state_write, group.checkpoint_ends, group.checkpoint_pages)
            _add(digest, (group.block_tables, group.seq_lens, group.slot_mapping, *states))
        _add(
            digest, [getattr(plan, field.name) for field in fields(plan) if field.name not in ("request_ids", "groups")]
        )
        _add(digest, one.sampling)
    return f"{digest.hexdigest()} ({num_requests} requests, {num_tokens} tokens)"


def _add(digest: hashlib.blake2b, values: Sequence[Any]) -> None:
    """Hashes arrays, in tuples or not, with their shapes."""
    for leaf in jax.tree.leaves([_plain(value) for value in values]):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(array.view(np.uint8).data if array.size else b"")


def _plain(value: Any) -> Any:
    """Page copies, and those of states, as the arrays that they are made of."""
    if isinstance(value, tuple) and value and hasattr(value[0], "loads"):
        return [_plain((one.loads, one.stores)) for one in value]
    if isinstance(value, tuple) and value and hasattr(value[0], "sources"):
        return [(one.sources, one.destinations) for one in value]
    return value


__all__ = ["Agreement", "Board", "describe", "settings_of"]
