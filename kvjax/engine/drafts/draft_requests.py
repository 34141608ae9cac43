"""The requests of a draft model: which of the target's it follows, with which blocks, and its steps as plans.

Flow:    the target's request table -> [DraftRequests] -> DraftSteps -> DraftModel -> drafts on the device
Source:  speculative decoding with a draft model (Leviathan et al., 2023, arXiv 2211.17192)

A followed request has a row and blocks in the draft model's own manager. Its tokens are a copy of the target's, and
follow them: what the target accepted is appended when the next drafts are asked for. One round goes

    1  `follow`    requests that are asked for are followed, as far as blocks last; cached prefixes are hits. They come
                   in order of urgency, and where one that is followed finds no blocks, the last of them gives its up
    2  `catch_up`  one step without samples: of prompts, and of other tokens that were no drafts, all but the last, at
                   most `max_num_batched_tokens` tokens together
    3  `drafts`    one token after another of those that have caught up, each from the sample before it

A draft stands in no table. Its KV is written behind the request's known tokens and counts as computed once the target
has accepted the draft; that of a rejected draft is overwritten. A request that gave its blocks up is followed no more:
it gets no drafts until another request has given blocks up. A prompt longer than a step takes several
rounds, and gets no drafts before the last of them.

Invariants (`check_invariants`):

    I1  followed rows of the target and rows of the own table name each other, and no other row is owned
    I2  a followed request's tokens are the first tokens of the target's request
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvjax.core import BlockHasher, KVCacheManager, MRopePositions, Request, StepPlan
from kvjax.core.requests.request_table import RequestTable
from kvjax.core.step.step_builder import PickShape, build_step_plan
from kvjax.errors import InvariantError

NO_ROW = -1
MOST_LEFT = 2  # tokens computed with the first draft: the newest, and the last draft where all were accepted


@dataclass(frozen=True)
class DraftStep:
    """One step of the draft model, which samples the next draft of some requests."""

    plan: StepPlan
    rows: np.ndarray  # int64[N] the target's rows of the requests that sample, in the order of the logits
    places: np.ndarray  # int64[N] of the tokens to sample in their sequences


class _TablesAhead:
    """The manager's tables as they were if every request had some more tokens, all but the last of them computed."""

    def __init__(self, manager: KVCacheManager, num_ahead: int) -> None:
        table = manager.request_table
        self.kv_cache_config = manager.kv_cache_config
        self.group_tables, self.reserved_blocks = manager.group_tables, manager.reserved_blocks
        self.take_page_copies, self.take_pages_to_zero = manager.take_page_copies, manager.take_pages_to_zero
        self.request_table = _TableAhead(
            table.token_ids,
            table.num_tokens + num_ahead,
            table.num_computed_tokens + num_ahead,
            table.request_ids,
        )


@dataclass(frozen=True)
class _TableAhead:
    """What `build_step_plan` reads of a request table."""

    token_ids: np.ndarray  # int32[rows, columns]
    num_tokens: np.ndarray  # int64[rows]
    num_computed_tokens: np.ndarray  # int64[rows]
    request_ids: np.ndarray  # object[rows]


class DraftRequests:
    """Follows the decoding requests of one target. Owned by the engine's thread; a round is a few numpy calls a step.

    Python looks at a request only when it starts and when it is released.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        hasher: BlockHasher | None,  # None: nothing is cached
        *,
        max_num_batched_tokens: int,
        has_mrope: bool = False,
        pick_shape: PickShape | None = None,
    ) -> None:
        self._manager = manager
        self._hasher = hasher
        self._max_num_batched_tokens = max_num_batched_tokens
        self._mrope = MRopePositions() if has_mrope else None
        self._pick_shape = pick_shape
        self._own = np.full(16, NO_ROW, np.int64)  # by row of the target
        self._target = np.full(16, NO_ROW, np.int64)  # by own row
        self._num_written = np.zeros(16, np.int64)  # by own row: drafts of the last round whose KV is in the cache
        self._num_right = np.zeros(16, np.int64)  # by own row: drafts that the target has accepted since
        self._is_full = False  # a request found no blocks, and no other has given any up since

    @property
    def num_followed(self) -> int:
        """Requests that hold blocks here."""
        return len(self._manager.request_table)

    def follow(
        self,
        table: RequestTable,  # the target's
        rows: np.ndarray,  # int64[n] rows of it, the most urgent first, with all known tokens but the last computed
        limits: np.ndarray,  # int64[n] drafts of each at most
    ) -> tuple[DraftStep | None, np.ndarray]:
        """Follows the requests up to their newest tokens, with blocks for them and for drafts.

        Returns:
            A step to dispatch first, where tokens are to be caught up with, and int64[n] how many drafts there may be.
        """
        self._manager.new_step_starts()
        self._grow(table.capacity)
        lengths, most = table.num_tokens[rows], self._manager.max_model_len
        for row in rows[(lengths > most) & (self._own[rows] >= 0)].tolist():
            self.release(row)
        counts = np.maximum(np.minimum(limits, most + 1 - lengths), 0)  # the last draft is not computed: no slot
        is_followed = self._own[rows] >= 0
        self._append(table, rows[is_followed], self._own[rows[is_followed]])
        late = self._own[rows[is_followed & (counts > 0)]]
        late, num_new = self._shares(late[self._num_left(late) > MOST_LEFT])
        late, num_new = self._allocated(rows, late, num_new, np.zeros_like(num_new))
        first, first_new = self._start(
            table, rows[~is_followed & (counts > 0)], self._max_num_batched_tokens - int(num_new.sum())
        )
        step = self._catch_up(np.concatenate([late, first]), np.concatenate([num_new, first_new]))
        return step, self._reserve_drafts(rows, counts)

    def drafts(
        self,
        rows: np.ndarray,  # int64[n] rows of the target, distinct
        counts: np.ndarray,  # int64[n] >= 1 drafts of each, at most what `follow` said
    ) -> Iterator[DraftStep]:
        """The steps of a round, each to be dispatched before the next is asked for; step j samples draft j."""
        own = self._own[rows]
        num_new, table = self._num_left(own), self._manager.request_table
        self._manager.plan_step(own, num_new)  # the blocks are there; those that fill become hits
        counts_of = np.zeros(self._target.size, np.int64)
        counts_of[own] = counts
        self._num_written[own] = counts - 1
        plan = self._plan(self._manager, own, num_new, None)
        table.advance(own, num_new)
        own = plan.rows
        yield self._step(plan)
        for num_drafts in range(1, int(counts.max(initial=0))):
            source = np.flatnonzero(counts_of[own] > num_drafts)
            own = own[source]
            tables = self._manager if num_drafts == 1 else _TablesAhead(self._manager, num_drafts - 1)
            yield self._step(self._plan(tables, own, np.ones(own.size, np.int64), source))

    def accept(
        self,
        rows: np.ndarray,  # int64[n] distinct rows of the target
        num_accepted: np.ndarray,  # int64[n] drafts of the last round that the target has accepted
    ) -> None:
        """Takes the KV of accepted drafts as computed, once the tokens are known; rows not followed are left out."""
        if rows.size and rows.max() >= self._own.size:
            self._grow(int(rows.max()) + 1)
        own = self._own[rows]
        followed = own >= 0
        own = own[followed]
        self._num_right[own] = np.minimum(num_accepted[followed], self._num_written[own])

    def release(self, row: int) -> None:
        """The target's request of `row` runs no more: its blocks here are freed. Nothing happens if it had none."""
        if row >= self._own.size or self._own[row] < 0:
            return
        self._drop(self._own.item(row))
        self._is_full = False

    def check_invariants(self, table: RequestTable) -> None:
        """Checks I1 and I2, and the manager; `table` is the target's.

        Raises:
            InvariantError: one does not hold.
        """
        self._manager.check_invariants()
        own_table = self._manager.request_table
        followed = np.flatnonzero(self._own >= 0)
        owned = [row for row, request in enumerate(own_table.requests) if request is not None]
        if sorted(self._own[followed].tolist()) != owned or (self._target[self._own[followed]] != followed).any():
            raise InvariantError(f"I1: rows {followed.tolist()} of the target are followed, rows {owned} are owned")
        for row in followed.tolist():
            own = self._own.item(row)
            num_tokens, num_target_tokens = own_table.num_tokens.item(own), table.num_tokens.item(row)
            same = table.token_ids[row, :num_tokens] == own_table.token_ids[own, :num_tokens]
            if num_tokens > num_target_tokens or not same.all():
                raise InvariantError(f"I2: row {row} of the target has other tokens than row {own} that follows it")

    def _num_left(self, own: np.ndarray) -> np.ndarray:  # int64[n]
        """Known tokens that the requests have not computed."""
        table = self._manager.request_table
        return table.num_tokens[own] - table.num_computed_tokens[own]

    def _append(self, table: RequestTable, rows: np.ndarray, own: np.ndarray) -> None:
        """Appends what the target's requests have more, and counts accepted drafts among it as computed.

        The last token is always left to compute: its logits give the first draft.
        """
        own_table = self._manager.request_table
        have = own_table.num_tokens[own]
        num_new = table.num_tokens[rows] - have
        for place in range(int(num_new.max(initial=0))):
            longer = num_new > place
            own_table.append_tokens(own[longer], table.token_ids[rows[longer], have[longer] + place])
        own_table.advance(own, np.minimum(self._num_right[own], self._num_left(own) - 1))
        self._num_right[own] = self._num_written[own] = 0

    def _shares(self, own: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The requests that catch up in this round, those with the fewest tokens first, and how many of each.

        All tokens but the last, which is computed with the drafts. The requests stay in order.
        """
        num_new = self._num_left(own) - 1
        if num_new.sum() > self._max_num_batched_tokens:
            order = np.argsort(num_new, kind="stable")
            wanted = num_new[order]
            num_new[order] = np.minimum(wanted, self._max_num_batched_tokens - (np.cumsum(wanted) - wanted))
            own, num_new = own[num_new > 0], num_new[num_new > 0]
        return own, num_new

    def _allocated(
        self,
        rows: np.ndarray,  # int64[n] of the target, all of the round
        own: np.ndarray,  # int64[k] own rows of some of them, in their order
        num_new: np.ndarray,  # int64[k]
        lookahead: np.ndarray,  # int64[k]
        *,
        delay_cache_blocks: bool = False,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The requests that find blocks, and their new tokens; while one finds none, the last of `rows` gives way.

        Its step may be planned: that is dispatched before any that writes the blocks anew.
        """
        start = 0
        while start < own.size:
            start += self._manager.plan_step(
                own[start:],
                num_new[start:],
                num_lookahead_tokens=lookahead[start:],
                delay_cache_blocks=delay_cache_blocks,
            ).num_planned
            if start < own.size:
                followed = self._own[rows]
                last = int(followed[followed >= 0][-1])
                self._drop(last)
                self._is_full = self.num_followed > 0
                num_left = own.size - int(last == own[-1])
                own, num_new, lookahead = own[:num_left], num_new[:num_left], lookahead[:num_left]
        return own, num_new

    def _start(self, table: RequestTable, rows: np.ndarray, budget: int) -> tuple[np.ndarray, np.ndarray]:
        """Follows requests from here on, while tokens and blocks last; their own rows, and tokens of this round."""
        started: list[tuple[int, int]] = []
        for row in rows.tolist():
            target = table.requests[row]
            assert target is not None  # the caller names rows that requests own
            if self._is_full or (budget < 1 and target.num_tokens > 1):
                break
            request = Request(
                target.request_id, target.token_ids, cache_salt=target.cache_salt, block_hasher=self._hasher
            )
            blocks, num_hit = self._manager.get_computed_blocks(request)
            num_new = min(request.num_tokens - 1 - num_hit, budget)
            # A request whose last token alone is left takes its blocks for that one, and computes it with the drafts.
            allocated = self._manager.allocate_slots(
                request, max(num_new, 1), num_hit, blocks, delay_cache_blocks=not num_new, full_sequence_must_fit=True
            )
            if allocated is None:
                self._is_full = self.num_followed > 0
                break
            request.num_computed_tokens = num_hit
            self._grow(self._manager.request_table.capacity)
            self._own[row], self._target[request.row] = request.row, row
            self._num_right[request.row] = self._num_written[request.row] = 0
            if num_new:
                started.append((request.row, num_new))
                budget -= num_new
        own, num_new_tokens = np.array(started, np.int64).reshape(-1, 2).T
        return own, num_new_tokens

    def _catch_up(self, own: np.ndarray, num_new: np.ndarray) -> DraftStep | None:
        if not own.size:
            return None
        nothing = np.zeros(0, np.int64)
        plan = self._plan(self._manager, own, num_new, None, samples=False)
        self._manager.request_table.advance(own, num_new)
        return DraftStep(plan, nothing, nothing)

    def _reserve_drafts(self, rows: np.ndarray, counts: np.ndarray) -> np.ndarray:  # int64[n]
        """Blocks for the last tokens and the drafts of requests that have caught up; drafts that there may be of all.

        No block becomes a hit: it is not certain yet that the tokens are computed next.
        """
        own = self._own[rows]
        ready = np.flatnonzero((own >= 0) & (counts > 0))
        ready = ready[self._num_left(own[ready]) <= MOST_LEFT]
        left = self._num_left(own[ready])
        kept, _ = self._allocated(rows, own[ready], left, counts[ready] - 1, delay_cache_blocks=True)
        return np.where(np.isin(own, kept), counts, 0)

    def _drop(self, own: int) -> None:
        request = self._manager.request_table.requests[own]
        assert request is not None
        self._manager.free(request)
        self._own[self._target[own]] = NO_ROW
        self._target[own] = NO_ROW

    def _plan(
        self,
        tables: KVCacheManager | _TablesAhead,
        own: np.ndarray,
        num_new_tokens: np.ndarray,
        source: np.ndarray | None,
        *,
        samples: bool = True,
    ) -> StepPlan:
        return build_step_plan(
            tables,
            own,
            num_new_tokens,
            wants_logits=np.full(own.size, samples),
            last_token_source=source,
            mrope=self._mrope,
            pick_shape=self._pick_shape,
        )

    def _step(self, plan: StepPlan) -> DraftStep:
        """A step all of whose requests sample."""
        return DraftStep(plan, self._target[plan.rows], plan.num_computed_tokens.astype(np.int64) + plan.num_new_tokens)

    def _grow(self, num_rows: int) -> None:
        """Room for rows of the target and own rows below `num_rows`."""
        more = num_rows - self._own.size
        if more > 0:
            self._own = np.append(self._own, np.full(more, NO_ROW, np.int64))
            self._target = np.append(self._target, np.full(more, NO_ROW, np.int64))
            self._num_written = np.append(self._num_written, np.zeros(more, np.int64))
            self._num_right = np.append(self._num_right, np.zeros(more, np.int64))


__all__ = ["DraftRequests", "DraftStep"]
