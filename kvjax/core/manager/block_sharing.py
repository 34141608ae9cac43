"""What a `KVCacheManager` offers beyond a request's own blocks: forks, the page edits that they cause, and pins.

Flow:    running request -> [BlockSharing.fork] -> child requests; take_page_copies, take_pages_to_zero -> StepPlan
Source:  ARCHITECTURE.md, "Forks"; when a shared block is copied: copy_on_write.py; what pins hold: pins.py
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from itertools import count, islice

import numpy as np

from kvjax.core.manager.coordinator import KVCacheCoordinator
from kvjax.core.manager.pins import PinnedPrefix
from kvjax.core.pool.block_pool import BlockPool
from kvjax.core.pool.page_edits import PageCopies
from kvjax.core.requests.hasher_check import HasherCheck
from kvjax.core.requests.request import Request
from kvjax.core.requests.request_table import RequestTable
from kvjax.errors import UnknownRequestError


class BlockSharing(abc.ABC):
    """The part of `KVCacheManager` that lets requests share blocks on purpose."""

    coordinator: KVCacheCoordinator
    request_table: RequestTable
    block_pools: tuple[BlockPool, ...]
    hash_block_size: int
    _hasher_check: HasherCheck

    @abc.abstractmethod
    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Registers the full blocks of the first `num_computed_tokens` tokens."""

    def fork(
        self, request: Request, n: int, *, request_ids: Sequence[str] | None = None, num_in_flight_tokens: int = 0
    ) -> tuple[Request, ...] | None:
        """`n` running requests more with the tokens of a running one: several samples of a prompt, or beams.

        Children share all of the request's blocks of computed tokens, a partly filled last one included. That one is
        copied, one page per group, for each request that then writes to it while others still hold it, the parent
        like the children; `take_page_copies` tells. Only blocks for drafts of recurrent kinds are taken here. Full
        blocks become prefix hits, if they are not yet and the request registers any.

        Call it when the step that computes the request's tokens is dispatched and `num_computed_tokens` advanced, not
        while a step of the request is being planned.

        Args:
            request: running here.
            n: children, at least 1.
            request_ids: theirs; None: `<id>.1`, `<id>.2`, ... as far as they are free.
            num_in_flight_tokens: the last computed tokens that children shall not share: drafts that may be taken
                back, or tokens that they compute for themselves.

        Returns:
            The children, or None: with `reserve=True` their worst cases do not fit beside what runs, or blocks for
            drafts are missing.

        Raises:
            UnknownRequestError: the manager does not hold the request.
            ValueError: `n` or a count is out of range, ids repeat or are in use, nothing is computed, or windows have
                given back blocks that the children would need.
            NotImplementedError: in-flight tokens with a kind that has one state for all tokens.
        """
        row = self._row(request)
        names = self._child_names(request, n, request_ids)
        shared = self._shared_tokens(request, row, num_in_flight_tokens)
        coordinator, table = self.coordinator, self.request_table
        reservations = coordinator.reservations
        if reservations is not None and not reservations.admits([n * b for b in reservations.blocks_of(row)]):
            return None
        if not coordinator.fits(coordinator.num_blocks_for_share(n)):
            return None
        self.cache_blocks(request, shared)
        children = tuple(request.fork(name) for name in names)
        rows = np.array([table.add(child) for child in children])
        coordinator.reserve_rows(table.capacity)
        if table.skips_registration[row]:
            for child_row in rows.tolist():
                table.skip_registration(child_row)
        table.num_computed_tokens[rows] = shared
        table.num_encoder_tokens[rows] = table.num_encoder_tokens[row]
        coordinator.share_row(row, rows, shared)
        return children

    def take_page_copies(self) -> tuple[PageCopies, ...]:
        """Per pool the pages to copy before the next step writes anything, since the last call; once per step.

        All sources are to be read before any destination is written. Their blocks are held until this call, so put
        the copies into the step that is being planned: `build_step_plan` does.
        """
        return tuple(pool.page_edits.take_copies() for pool in self.block_pools)

    def take_pages_to_zero(self) -> tuple[np.ndarray, ...]:  # int32[Z] each
        """Per pool the pages to zero after the copies of the next step, since the last call; once per step.

        None without `zero_new_pages`; else those of all new blocks that no copy fills.
        """
        return tuple(pool.page_edits.take_pages_to_zero() for pool in self.block_pools)

    def pin(self, request: Request, longest_request: int | None = None) -> PinnedPrefix | None:
        """Keeps the longest cached prefix of a request's tokens in the cache until `unpin`, running or not.

        Requests that start with the same tokens, and have more, hit it. Pinned blocks count as held: while there are
        any, `reset_prefix_cache` refuses. `evict_blocks` and `invalidate` make them no hits, and they stay held.

        Args:
            request: with all the tokens that are to be hit.
            longest_request: tokens of the longest request that must find room beside all pins; None: `max_model_len`.

        Returns:
            What is pinned, or None: nothing of it is cached.

        Raises:
            ValueError: `longest_request` is below 1, or the request was hashed with another block size.
            OutOfBlocksError: a pool would have fewer blocks left than such a request may need, or than the running
                requests have reserved. Nothing is changed.
        """
        longest = self.coordinator.settings.max_model_len if longest_request is None else longest_request
        if longest < 1:
            raise ValueError(f"expected longest_request >= 1, got {longest}")
        self._hasher_check.check(request)
        if self.coordinator.reads_encoder and not request.names_input(self.hash_block_size):
            return None
        hits, num_tokens = self.coordinator.pins.find(request.block_hashes, request.num_tokens)
        if not num_tokens:
            return None
        return self.coordinator.pins.add(tuple(tuple(ids.tolist()) for ids in hits), num_tokens, longest)

    def unpin(self, prefix: PinnedPrefix) -> None:
        """Lets a pinned prefix go; what no request holds may be evicted, its last block first.

        Raises:
            BlockStateError: the prefix is not pinned here. Nothing is changed.
        """
        self.coordinator.pins.remove(prefix)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _row(self, request: Request) -> int:
        row = request.row
        if 0 <= row < self.request_table.capacity and self.request_table.requests[row] is request:
            return row
        raise UnknownRequestError(
            f"expected a request that runs here, got {request.request_id!r}, which was freed already or never allocated"
        )

    def _child_names(self, request: Request, n: int, request_ids: Sequence[str] | None) -> list[str]:
        if n < 1:
            raise ValueError(f"expected n >= 1 children, got {n}")
        if request_ids is None:
            candidates = (f"{request.request_id}.{i}" for i in count(1))
            return list(islice((name for name in candidates if name not in self.request_table), n))
        names = list(request_ids)
        if len(set(names)) != n or len(names) != n:
            raise ValueError(f"expected {n} distinct request_ids, got {names}")
        for name in names:
            if name in self.request_table:
                raise ValueError(f"another request with the id {name!r} is running; ids are unique")
        return names

    def _shared_tokens(self, request: Request, row: int, num_in_flight: int) -> int:
        """Tokens whose blocks the children share, checked."""
        if num_in_flight < 0:
            raise ValueError(f"expected num_in_flight_tokens >= 0, got {num_in_flight}")
        name, shared = request.request_id, request.num_computed_tokens - num_in_flight
        if shared < 1:
            raise ValueError(
                f"request {name!r}: expected computed tokens to share, got {request.num_computed_tokens}, "
                f"{num_in_flight} of them in flight; fork it after its first step"
            )
        if shared > request.num_tokens:
            raise ValueError(
                f"request {name!r}: expected to share at most the {request.num_tokens} tokens that are known, got "
                f"{shared}; give the others as num_in_flight_tokens"
            )
        self.coordinator.check_share(row, shared, num_in_flight)
        return shared


__all__ = ["BlockSharing"]
