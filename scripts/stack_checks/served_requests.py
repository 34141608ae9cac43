"""Requests served through a prefix cache and a slot allocator with sglang-jax's surface, its own or kvjax's.

Flow:    random moves -> [ServedRequests] -> the cache and the allocator, called as the stack's scheduler calls them

Every slot remembers what was written to it: the namespace and all tokens up to its own. So a hit is right if its slots
hold the prefix, whoever keeps it, and a slot is given twice if somebody's row has it when it is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

MAX_TOKENS = 96


class Key:
    """What a match goes by, in the form of the stack's `RadixKey`."""

    def __init__(self, token_ids: Sequence[int], extra_key: str | None = None, dp_rank: int | None = None) -> None:
        self.token_ids, self.extra_key, self.dp_rank = token_ids, extra_key, dp_rank

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(eq=False)
class Served:
    """What caches read and write of the stack's `Req`."""

    origin_input_ids: list[int]
    extra_key: str | None
    dp_rank: int | None
    req_pool_idx: int
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: Any = ()
    last_node: Any = None
    swa_uuid_for_lock: int | None = None
    swa_evicted_seqlen: int = 0
    cache_protected_len: int = 0
    last_matched_prefix_len: int = 0
    kv_committed_len: int = 0
    recurrent_pool_idx: int | None = None
    recurrent_cow_src_index: int | None = None
    recurrent_ping_pong_track_buffer: list[int] | None = None
    recurrent_next_track_idx: int | None = None
    recurrent_last_track_seqlen: int | None = None

    def pop_committed_kv_cache(self) -> int:
        """The committed length, once."""
        length, self.kv_committed_len = self.kv_committed_len, 0
        return length


class Rows:
    """The stack's `ReqToTokenPool`."""

    def __init__(self, size: int) -> None:
        self.req_to_token = np.zeros((size, MAX_TOKENS), np.int32)
        self.free_rows = list(range(size))

    def write(self, place: Any, values: np.ndarray) -> None:
        """Sets slots of a row."""
        self.req_to_token[place] = values

    def read(self, row: int, length: int) -> np.ndarray:
        """A copy of the row's first slots."""
        return self.req_to_token[row, :length].copy()


class StateRows(Rows):
    """The stack's `HybridReqToTokenPool` of one rank: a state's slot a request, and two more with an extra buffer."""

    def __init__(self, size: int, num_states: int, interval: int | None) -> None:
        super().__init__(size)
        self.interval = interval  # tokens between boundaries; None: no extra buffer
        self.free_states = list(range(1, num_states + 1))

    @property
    def states_per_request(self) -> int:
        """Slots that a running request owns."""
        return 1 if self.interval is None else 3

    def alloc_states(self, req: Served) -> None:
        """Gives a request its slots, which are there."""
        req.recurrent_pool_idx = self.free_states.pop(0)
        if self.interval is not None:
            req.recurrent_ping_pong_track_buffer = [self.free_states.pop(0), self.free_states.pop(0)]
            req.recurrent_next_track_idx = 0

    def alloc_recurrent_slot(self, dp_rank: int = 0) -> int | None:
        """A free slot."""
        return self.free_states.pop(0) if self.free_states else None

    def free_recurrent_slot(self, slot: int, dp_rank: int = 0) -> None:
        """Takes a slot back."""
        assert slot not in self.free_states
        self.free_states.append(slot)

    def get_recurrent_ping_pong_keep_idx(self, req: Served) -> int:
        """The index of the slot with the last boundary's state."""
        return 1 - (req.recurrent_next_track_idx or 0)

    def set_recurrent_ping_pong_slot(self, req: Served, place: int, slot: int) -> None:
        """Names another slot."""
        assert req.recurrent_ping_pong_track_buffer is not None
        req.recurrent_ping_pong_track_buffer[place] = slot

    def donate_recurrent_ping_pong_slot(self, req: Served, new_slot: int) -> np.ndarray:
        """The slot with the last boundary's state, for a new one."""
        place = self.get_recurrent_ping_pong_keep_idx(req)
        assert req.recurrent_ping_pong_track_buffer is not None
        slot = req.recurrent_ping_pong_track_buffer[place]
        self.set_recurrent_ping_pong_slot(req, place, new_slot)
        return np.array([slot], np.int32)

    def commit_to_tree(self, req: Served) -> None:
        """The cache has the request's slot."""
        req.recurrent_pool_idx = None

    def free_recurrent_cache(self, req: Served) -> None:
        """Takes back what the request owns."""
        for slot in (req.recurrent_pool_idx, *(req.recurrent_ping_pong_track_buffer or ())):
            if slot:
                self.free_recurrent_slot(slot)
        req.recurrent_pool_idx = req.recurrent_ping_pong_track_buffer = None
        req.recurrent_last_track_seqlen = None


class ServedRequests:
    """A scheduler of few words over one cache; with `StateRows` of a model with recurrent layers."""

    def __init__(self, cache: Any, allocator: Any, rows: Rows, classes: dict[str, Any], window: int | None) -> None:
        self.cache, self.allocator, self.rows, self.classes, self.window = cache, allocator, rows, classes, window
        self.running: list[Served] = []
        self.hits: list[int] = []
        self.page_size = allocator.page_size
        self._written: dict[tuple[int, int], Any] = {}  # by rank and slot
        self._written_swa: dict[tuple[int, int], Any] = {}
        self._states: dict[int, Any] = {}  # by slot
        self._ended: list[tuple[list[int], str | None]] = []  # tokens and namespace

    # -- moves --------------------------------------------------------------------------------------------------------

    def start(self, prompt: list[int], extra_key: str | None, rank: int | None, num_chunks: int) -> bool:
        """Matches, locks and computes a prompt in chunks; False: it does not fit, and nothing is held."""
        if not self.rows.free_rows:
            return False
        req = Served(prompt, extra_key, rank, self.rows.free_rows[-1])
        key = self.classes["RadixKey"](prompt[:-1], extra_key, rank)
        keeps_states = isinstance(self.rows, StateRows)
        match = self.cache.match_prefix(self.classes["MatchPrefixParams"](key=key, cow_recurrent=keeps_states, req=req))
        hit = len(match.device_indices)
        req.last_node, req.prefix_indices = match.last_device_node, match.device_indices
        req.last_matched_prefix_len = req.cache_protected_len = hit
        self._check_hit(req, match.device_indices)
        if hit and keeps_states:
            assert req.recurrent_cow_src_index is not None
            assert self._states[req.recurrent_cow_src_index] == (extra_key, tuple(prompt[:hit]))
        ends = np.linspace(hit, len(prompt), num_chunks + 1).astype(int)[1:].tolist()
        locked = self.cache.inc_lock_ref(req.last_node)
        req.swa_uuid_for_lock = locked.swa_uuid_for_lock
        if isinstance(self.rows, StateRows):
            short = self.rows.states_per_request - len(self.rows.free_states)
            if short > 0:
                self.cache.evict(
                    self.classes["EvictParams"](num_tokens=0, swa_num_tokens=0, dp_rank=rank, recurrent_num=short)
                )
            if self.rows.states_per_request > len(self.rows.free_states):
                self.cache.dec_lock_ref(req.last_node)
                return False
            self.rows.alloc_states(req)
            if self.rows.interval is not None:  # chunks end at boundaries
                ends = [*range(hit + 1, len(prompt)), len(prompt)]
                ends = [end for end in ends if end % self.rows.interval == 0 or end == len(prompt)]
        self.rows.free_rows.pop()
        self.rows.write((req.req_pool_idx, slice(0, hit)), match.device_indices)
        for end in ends:
            if end > len(req.prefix_indices) and not self._extend(req, end):
                self._release(req, is_insert=False)
                return False
        self.hits.append(hit)
        self.running.append(req)
        return True

    def decode(self) -> None:
        """A token more for each running request that has room; those that do not fit are retracted."""
        for req in list(self.running):
            length = req.kv_committed_len
            if length + 1 >= MAX_TOKENS:
                continue
            last = int(self.rows.req_to_token[req.req_pool_idx, length - 1])
            if not self._make_room(self.page_size, _rank(req)):
                self.end(self.running.index(req), is_insert=False)
                continue
            slots = (
                self.allocator.alloc(1, dp_rank=_rank(req))
                if self.page_size == 1
                else self.allocator.alloc_decode([length + 1], [last], dp_rank=_rank(req))
            )
            req.output_ids.append(length * 7 % 5)
            self._write(req, slots, length)
            if self.window is not None:
                self.cache.evict_req_swa(req, length + 1, dp_rank=_rank(req))

    def end(self, number: int, is_insert: bool = True) -> None:
        """Finishes or retracts the running request of that number."""
        req = self.running.pop(number)
        self._ended.append((req.origin_input_ids + req.output_ids, req.extra_key))
        self._release(req, is_insert)

    def turn(self, draw: float, tail: list[int]) -> None:
        """Starts a request on top of one that ended, if there is room in its row."""
        if self._ended:
            tokens, extra_key = self._ended[int(draw * len(self._ended))]
            if len(tokens) + len(tail) < MAX_TOKENS:
                self.start([*tokens, *tail], extra_key, None, 2)

    def end_all(self) -> None:
        """Finishes what runs, and evicts everything."""
        while self.running:
            self.end(0)
        everything = self.classes["EvictParams"](num_tokens=10**6, swa_num_tokens=0, dp_rank=None, recurrent_num=10**6)
        self.cache.evict(everything)

    # -- laws ---------------------------------------------------------------------------------------------------------

    def check_sizes(self, size: int, size_swa: int, ranks: Sequence[int]) -> None:
        """That every token's place of a rank is free, cached, or in a running request's pages, once."""
        for rank in ranks:
            rows = [self.rows.read(r.req_pool_idx, r.kv_committed_len) for r in self.running if _rank(r) == rank]
            held = set(np.concatenate([*rows, np.zeros(0, np.int32)]).tolist())
            if self.window is None:
                sizes = (self.allocator.available_size(rank), self.cache.evictable_size(rank))
                owned = {s // self.page_size for s in held} - self._cached_pages(rank)
                assert sum(sizes) + self.cache.protected_size(rank) + len(owned) * self.page_size == size
            else:
                full = self.allocator.full_available_size(rank) + self.cache.full_evictable_size(rank)
                assert full + self.cache.full_protected_size(rank) <= size
                swa = self.allocator.swa_available_size(rank) + self.cache.swa_evictable_size(rank)
                assert swa + self.cache.swa_protected_size(rank) <= size_swa

    def _cached_pages(self, rank: int) -> set[int]:
        """Pages of running requests that the cache has: those of the locked prefixes."""
        locked = [r for r in self.running if _rank(r) == rank]
        slots = [self.rows.read(r.req_pool_idx, r.cache_protected_len) for r in locked]
        return {int(s) // self.page_size for row in slots for s in row}

    def _check_hit(self, req: Served, slots: np.ndarray) -> None:
        assert len(slots) % self.page_size == 0
        for place, slot in enumerate(slots.tolist()):
            wanted = (req.extra_key, tuple(req.origin_input_ids[: place + 1]))
            assert self._written[_rank(req), slot] == wanted
            if self.window is not None and place >= len(slots) - self.window:
                swa = int(self._mapping(_rank(req))[slot])
                assert swa
                assert self._written_swa[_rank(req), swa] == wanted

    # -- as the scheduler does ----------------------------------------------------------------------------------------

    def _extend(self, req: Served, end: int) -> bool:
        start = len(req.prefix_indices)
        last = int(req.prefix_indices[-1]) if start else -1
        if not self._make_room(end - start + self.page_size, _rank(req)):
            return False
        slots = (
            self.allocator.alloc(end - start, dp_rank=_rank(req))
            if self.page_size == 1
            else self.allocator.alloc_extend([start], [end], [last], end - start, dp_rank=_rank(req))
        )
        req.fill_ids = req.origin_input_ids[:end]
        self._write(req, slots, start)
        self.cache.cache_unfinished_req(req)
        for place in range(end):  # the row may name other slots than were written
            slot = int(self.rows.req_to_token[req.req_pool_idx, place])
            assert self._written[_rank(req), slot] == (req.extra_key, tuple(req.origin_input_ids[: place + 1]))
        return True

    def _make_room(self, num_tokens: int, rank: int) -> bool:
        """Evicts as the scheduler does before it allocates; whether that is enough."""
        if self.window is None:
            short, short_swa = num_tokens - self.allocator.available_size(rank), 0
            short = num_tokens if short > 0 else 0
        else:
            short = num_tokens - self.allocator.full_available_size(rank)
            short_swa = num_tokens - self.allocator.swa_available_size(rank)
        if short > 0 or short_swa > 0:
            params = self.classes["EvictParams"](
                num_tokens=max(short, 0), swa_num_tokens=max(short_swa, 0), dp_rank=rank, recurrent_num=0
            )
            self.cache.evict(params)
        return bool(self.allocator.available_size(rank) >= num_tokens)

    def _write(self, req: Served, slots: np.ndarray, start: int) -> None:
        tokens = req.origin_input_ids + req.output_ids
        rank = _rank(req)
        others = [r for r in self.running if r is not req and _rank(r) == rank]
        taken = {s for r in others for s in self.rows.read(r.req_pool_idx, r.kv_committed_len).tolist()}
        own = set(self.rows.read(req.req_pool_idx, start).tolist())
        assert len(set(slots.tolist())) == len(slots)
        assert not (taken | own) & set(slots.tolist()), "a slot is given twice"
        self.rows.write((req.req_pool_idx, slice(start, start + len(slots))), slots)
        req.kv_committed_len = start + len(slots)
        self._write_state(req, (req.extra_key, tuple(tokens[: req.kv_committed_len])))
        for place, slot in enumerate(slots.tolist(), start):
            self._written[rank, slot] = (req.extra_key, tuple(tokens[: place + 1]))
            if self.window is not None:
                self._written_swa[rank, int(self._mapping(rank)[slot])] = self._written[rank, slot]

    def _write_state(self, req: Served, state: Any) -> None:
        """As the model leaves it: in the request's slot, and at a boundary in its next track slot."""
        if not isinstance(self.rows, StateRows):
            return
        assert req.recurrent_pool_idx is not None
        self._states[req.recurrent_pool_idx] = state
        if self.rows.interval is not None and req.kv_committed_len % self.rows.interval == 0:
            assert req.recurrent_ping_pong_track_buffer is not None
            assert req.recurrent_next_track_idx is not None
            self._states[req.recurrent_ping_pong_track_buffer[req.recurrent_next_track_idx]] = state
            req.recurrent_last_track_seqlen = req.kv_committed_len
            req.recurrent_next_track_idx = 1 - req.recurrent_next_track_idx

    def _mapping(self, rank: int) -> np.ndarray:
        mapping = self.allocator.full_to_swa_index_mapping
        return mapping if isinstance(mapping, np.ndarray) else mapping[rank]

    def _release(self, req: Served, is_insert: bool) -> None:
        self.cache.cache_finished_req(req, is_insert=is_insert)
        if isinstance(self.rows, StateRows):
            self.rows.free_recurrent_cache(req)
        self.rows.free_rows.append(req.req_pool_idx)


def _rank(req: Served) -> int:
    return req.dp_rank or 0


def random_moves(seed: int, count: int, num_ranks: int, *, turns: bool = False) -> list[tuple[str, Any]]:
    """Moves of requests whose prompts share prefixes: (kind, its arguments); `turns`: half go on from an ended one."""
    random = np.random.default_rng(seed)
    documents = [random.integers(0, 5, MAX_TOKENS).tolist() for _ in range(3)]
    moves: list[tuple[str, Any]] = []
    for _ in range(count):
        kind = random.choice(["start", "decode", "decode", "end", "retract"], p=[0.35, 0.2, 0.2, 0.2, 0.05])
        if kind == "start":
            document = documents[random.integers(3)][: random.integers(1, 48)]
            tail = random.integers(0, 5, random.integers(1, 16)).tolist()
            extra_key = [None, "a", "b"][random.choice(3, p=[0.8, 0.1, 0.1])]
            rank = int(random.integers(num_ranks)) if num_ranks > 1 else None
            if turns and len(moves) % 2:
                moves.append(("turn", (float(random.random()), tail)))
                continue
            moves.append(("start", (document + tail, extra_key, rank, int(random.integers(1, 4)))))
        else:
            moves.append((str(kind), float(random.random())))
    return moves


def play(served: ServedRequests, move: tuple[str, Any]) -> None:
    """Makes a move."""
    kind, given = move
    if kind == "start":
        served.start(*given)
    elif kind == "turn":
        served.turn(*given)
    elif kind == "decode":
        served.decode()
    elif served.running:
        served.end(int(given * len(served.running)), is_insert=kind == "end")
