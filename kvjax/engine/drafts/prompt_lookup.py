"""Drafts from a request's own tokens: what followed when its last few tokens stood there before.

Flow:    RequestTable tokens -> [PromptLookup.count, propose] -> Drafts -> verified by the step
Source:  prompt lookup decoding (Saxena, 2023); chained hash tables as in RFC 1951, section 4

Of the sizes from `max_ngram` down to `min_ngram`, the largest whose n-gram at a request's end stood there before says
where: at its newest earlier occurrence. Drafts are the tokens behind that. Where they reach the request's end they go
on with themselves, as an overlapping copy does.

A wrong draft costs its share of a step. So a row has at most one draft more than twice those that were right the last
time, and one at first; and a step has no drafts where few are expected to be right (`DraftGate`).

Every row has a hash table per size. A slot is the head of a chain of nodes, one for each distinct n-gram, which is the
place where the n-gram first ended; the node keeps where it ended last. Indexing a token looks its n-grams up, so the
newest token's are found by the way. A step costs some 50 numpy calls over all rows, and as many again where rows got
several tokens, however long they are; a prompt is indexed by sorting its n-grams once.

N-grams are told apart by hashes of 64 bits: two that share one would cost a draft, no token.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvjax.core.requests.request_table import RequestTable
from kvjax.engine.drafts.draft_gate import DraftGate
from kvjax.engine.requests.engine_request import EngineRequest
from kvjax.engine.sampling.sampling_table import SamplingTable
from kvjax.engine.scheduling.speculation import Drafts, SpeculativeConfig

MAX_SLOTS = 1 << 15  # of a row and size; longer rows have longer chains
NONE = -1
_MIX = np.uint64(0x9E3779B97F4A7C15)


class _Nodes(NamedTuple):
    """What is known of the n-gram that first ended at each token: G sizes, R rows, C columns."""

    links: np.ndarray  # int32[G, R, C] next node of the chain, -1: the last
    newest: np.ndarray  # int32[G, R, C] where the n-gram ended last
    hashes: np.ndarray  # uint64[G, R, C]

    @classmethod
    def empty(cls, *shape: int) -> _Nodes:
        return cls(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.uint64))


class PromptLookup:
    """The drafter of one request table: 16 bytes a token and size. Rows are indexed when they are first asked about."""

    def __init__(self, table: RequestTable, config: SpeculativeConfig, max_model_len: int) -> None:
        longest, shortest = config.ngram_sizes
        self._table = table
        self._num_drafts = config.num_drafts
        self._gate = DraftGate(config.least_gain)
        self._sizes = np.arange(longest, shortest - 1, -1)  # int64[G], the largest first
        self._factors = np.cumprod(np.full(longest, _MIX))[:, None]  # one for each place in an n-gram
        self._num_slots = min(1 << (2 * max_model_len - 1).bit_length(), MAX_SLOTS)
        self._shift = np.uint64(64 - self._num_slots.bit_length() + 1)
        self._heads = np.zeros((self._sizes.size, 0, self._num_slots), np.int32)  # int32[G, R, slots], -1: no chain
        self._nodes = _Nodes.empty(self._sizes.size, 0, 0)
        self._num_indexed = np.zeros(0, np.int64)  # tokens of each row
        self._most = np.zeros(0, np.int64)  # drafts of each row in its next step
        self._found = np.zeros(
            (self._sizes.size, 0), np.int32
        )  # int32[G, R] where the last n-grams ended before, or -1

    def start(self, request: EngineRequest) -> None:
        """Forgets what the request's row held before."""
        self._reserve()
        row = request.request.row
        self._heads[:, row] = NONE
        self._num_indexed[row] = 0
        self._most[row] = 1
        self._gate.start(row)

    def stop(self, request: EngineRequest) -> None:
        """Nothing: the row is forgotten when another request starts in it."""

    def settle(self, rows: np.ndarray, num_drafts: np.ndarray, num_accepted: np.ndarray) -> None:
        """As `Drafter.settle`. New tokens are found in the table."""
        self._most[rows] = np.minimum(1 + 2 * num_accepted, self._num_drafts)
        self._gate.settle(rows, self._table.num_tokens[rows], num_drafts, num_accepted)

    @property
    def device_tokens(self) -> None:
        """None: the host has all drafts."""

    def count(self, rows: np.ndarray, limits: np.ndarray) -> np.ndarray:  # int64[n] each
        """As many as each row can use where one of its last n-grams stood in it before, else 0; or none of any."""
        self._index(rows)
        counts = np.where((self._found[:, rows] >= 0).any(axis=0), np.minimum(limits, self._most[rows]), 0)
        return self._gate.opened(rows, self._table.num_tokens[rows], counts)

    def propose(self, rows: np.ndarray, counts: np.ndarray, sampling: SamplingTable) -> Drafts:
        """What followed the newest earlier occurrence of each row's longest n-gram."""
        found = self._found[:, rows]
        before = found[(found >= 0).argmax(axis=0), np.arange(rows.size)]
        before = np.where(counts > 0, before, 0)
        distance = np.maximum(self._table.num_tokens[rows] - 1 - before, 1)
        ahead = 1 + np.arange(int(counts.max(initial=0))) % distance[:, None]
        return Drafts(self._table.token_ids[rows[:, None], before[:, None] + ahead])

    def _index(self, rows: np.ndarray) -> None:
        """Takes in the tokens that rows got since they were last asked about."""
        self._reserve()
        for row in rows[self._num_indexed[rows] == 0].tolist():
            self._index_prompt(row)
        num_tokens, indexed = self._table.num_tokens[rows], self._num_indexed[rows]
        behind = (num_tokens > indexed).nonzero()[0]
        if not behind.size:
            return
        rows, last, first = rows[behind], num_tokens[behind] - 1, indexed[behind]
        num_before = last - first
        if num_before.any():
            places = np.arange(int(num_before.sum())) + np.repeat(
                first - np.cumsum(num_before) + num_before, num_before
            )
            self._index_tokens(np.repeat(rows, num_before), places, repeats=bool((num_before > 1).any()))
        self._found[:, rows] = self._index_tokens(rows, last)
        self._num_indexed[rows] = last + 1

    def _index_tokens(
        self,
        rows: np.ndarray,  # int64[n]
        places: np.ndarray,  # int64[n] of tokens
        *,
        repeats: bool = False,  # whether a row may come several times, with places that rise
    ) -> np.ndarray:  # int32[G, n]
        """Takes in n tokens; where their n-grams ended before, or -1. Of several of a row, before all of them."""
        hashes = self._hashes(rows, places)
        num_rows, num_columns = self._nodes.links.shape[1:]
        of_row = np.arange(self._sizes.size)[:, None] * num_rows + rows  # int64[G, n]
        slots = (of_row * self._num_slots + (hashes >> self._shift).astype(np.int64)).reshape(-1)
        start = (of_row * num_columns).reshape(-1)
        places, hashes = np.tile(places, self._sizes.size), hashes.reshape(-1)
        heads, links, newest, known = (x.reshape(-1) for x in (self._heads, *self._nodes))
        found, left = None, slots.size
        while left:
            nodes = heads[slots]
            at = start + nodes
            while (differs := (nodes >= 0) & (known[at] != hashes)).any():
                nodes[differs] = links[at[differs]]
                at = start + nodes
            is_known = nodes >= 0
            if found is None:
                found = np.where(is_known, newest[at], NONE)
            newest[at[is_known]] = places[is_known]  # of several the last stays
            new = (~is_known).nonzero()[0]
            head, others = heads[slots[new]], new[:0]
            if repeats:
                order = np.arange(new.size, dtype=np.int32)
                heads[slots[new[::-1]]] = order[::-1]  # one new node a slot at a time, the first; the others look again
                is_first = heads[slots[new]] == order
                others, new, head = new[~is_first], new[is_first], head[is_first]
            here = start[new] + places[new]
            heads[slots[new]] = newest[here] = places[new]
            links[here], known[here] = head, hashes[new]
            left = others.size
            if left:
                slots, start, places, hashes = slots[others], start[others], places[others], hashes[others]
        assert found is not None  # n >= 1
        return found.reshape(self._sizes.size, -1)

    def _index_prompt(self, row: int) -> None:
        """Takes in all tokens of a row of which none was."""
        num_tokens = self._table.num_tokens.item(row)
        places = np.arange(num_tokens)
        for i, hashes in enumerate(self._hashes(np.full(num_tokens, row), places)):
            order = np.argsort(hashes, kind="stable")  # of equal n-grams the oldest first; slots rise
            ordered = hashes[order]
            is_first = np.append(True, ordered[1:] != ordered[:-1])
            firsts = np.flatnonzero(is_first)
            lasts = np.append(firsts[1:], num_tokens) - 1
            node = order[firsts]
            slots = (ordered[firsts] >> self._shift).astype(np.int64)
            heads_chain = np.append(True, slots[1:] != slots[:-1])
            self._nodes.links[i, row, node] = np.where(heads_chain, NONE, np.append(NONE, node[:-1]))
            self._nodes.newest[i, row, node] = order[lasts]
            self._nodes.hashes[i, row, node] = ordered[firsts]
            self._heads[i, row, slots] = node  # of a slot's nodes the last stays
            newest_place = int(np.flatnonzero(order == num_tokens - 1)[0])
            self._found[i, row] = NONE if is_first[newest_place] else order[newest_place - 1]
        self._num_indexed[row] = num_tokens

    def _hashes(self, rows: np.ndarray, places: np.ndarray) -> np.ndarray:  # uint64[G, n]
        """Hashes of the n-grams that end at `places`. One that would begin before the row is like no other."""
        columns = places - np.arange(self._sizes[0])[:, None]
        tokens = self._table.token_ids[rows, np.maximum(columns, 0)].astype(np.uint64) + np.uint64(1)
        if int(places.min(initial=0)) < self._sizes[0]:
            tokens[columns < 0] = 0
        tokens *= self._factors
        sums = np.cumsum(tokens, axis=0)[self._sizes - 1]
        sums ^= sums >> np.uint64(29)
        sums *= _MIX
        return sums

    def _reserve(self) -> None:
        """Room for the table's rows and columns."""
        num_rows, num_columns = self._table.token_ids.shape
        old_rows, old_columns = self._nodes.links.shape[1:]
        if (num_rows, num_columns) == (old_rows, old_columns):
            return
        nodes = _Nodes.empty(self._sizes.size, num_rows, num_columns)
        for new, old in zip(nodes, self._nodes, strict=True):
            new[:, :old_rows, :old_columns] = old
        self._nodes = nodes
        if num_rows == old_rows:
            return
        heads = np.zeros((self._sizes.size, num_rows, self._num_slots), np.int32)
        heads[:, :old_rows] = self._heads
        self._heads = heads
        self._gate.reserve(num_rows)
        self._num_indexed = np.append(self._num_indexed, np.zeros(num_rows - old_rows, np.int64))
        self._most = np.append(self._most, np.zeros(num_rows - old_rows, np.int64))
        self._found = np.pad(self._found, ((0, 0), (0, num_rows - old_rows)))


__all__ = ["PromptLookup"]
