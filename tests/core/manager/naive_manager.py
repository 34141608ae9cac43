"""The KV cache in lists and dicts, one block at a time: the meaning that `KVCacheManager` must have.

A block id is an int, the null block is 0. What a block caches is named by the tokens that it ends, not by a hash.
Hits are found by trying every length. Nothing here is fast, and nothing shares code with the package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, lcm


@dataclass
class NaiveRequest:
    request_id: str
    tokens: list[int]
    salt: str | None = None
    computed: int = 0
    encoder: int = 0
    origin: tuple = ()  # adapter and weight version, where a test has them
    inserts: bool = True
    num_prompt: int = 0  # tokens, the rest are an answer; 0: all that it is made with

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prompt or len(self.tokens)

    def key(self, num_tokens: int) -> tuple:
        return self.salt, self.origin, tuple(self.tokens[:num_tokens])


@dataclass
class NaivePool:
    num_blocks: int
    uncached_first: bool = False
    free: list[int] = field(default_factory=list)  # next to hand out first
    refs: dict[int, int] = field(default_factory=dict)
    key_of: dict[int, tuple] = field(default_factory=dict)  # cached block -> (group, key)
    holders: dict[tuple, list[int]] = field(default_factory=dict)  # (group, key) -> blocks, oldest first
    forgotten: list[tuple[tuple, bool]] = field(default_factory=list)  # (group, key), and whether its block was reused

    def __post_init__(self) -> None:
        self.free = list(range(1, self.num_blocks))
        self.refs = dict.fromkeys(range(self.num_blocks), 0)

    def take(self) -> int:
        block = self.free.pop(0)
        self.forget(block, was_reused=True)
        self.refs[block] = 1
        return block

    def touch(self, block: int) -> None:
        if self.refs[block] == 0:
            self.free.remove(block)
        self.refs[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One call; blocks in eviction order."""
        released = []
        for block in blocks:
            if block:
                self.refs[block] -= 1
                if self.refs[block] == 0:
                    released.append(block)
        if self.uncached_first:
            self.free = [block for block in released if block not in self.key_of] + self.free
            released = [block for block in released if block in self.key_of]
        self.free += released

    def register(self, block: int, group: int, key: tuple) -> None:
        self.key_of[block] = (group, key)
        self.holders.setdefault((group, key), []).append(block)

    def forget(self, block: int, was_reused: bool = False) -> None:
        if block in self.key_of:
            name = self.key_of.pop(block)
            self.forgotten.append((name, was_reused))
            self.holders[name].remove(block)
            if not self.holders[name]:
                del self.holders[name]


MAX_ENCODER = 8


@dataclass
class NaiveGroup:
    block_size: int
    window: int | None = None  # None: full attention
    pool: int = 0
    eagle: bool = field(default=False, compare=False)
    chunk: int | None = None  # chunked local attention
    sinks: int = 0  # blocks of attention sinks
    first: int = 0  # tokens at the start of a request that all others see, of a window
    rswa: int | None = None  # tokens of the answer that are seen beside the whole prompt
    latent: bool = False  # MLA
    cross: bool = False  # cross attention, of at most `MAX_ENCODER` tokens

    mamba: str | None = None  # "none" or "align"
    drafts: int = 0  # speculative blocks of Mamba

    @property
    def is_local(self) -> bool:
        return self.mamba is not None or self.window is not None or self.chunk is not None

    def sees(self, token: int, key: int) -> bool:
        """The mask: whether a token attends to what is kept of an earlier one, or goes on from its state."""
        if self.mamba is not None:
            return key == token - 1
        if self.window is not None:
            return token - key < self.window or key < self.first
        return self.chunk is None or key // self.chunk == token // self.chunk

    def first_seen(self, token: int) -> int:
        """The first token that `token` attends to."""
        if self.mamba is not None:
            return max(0, token - 1) if self.mamba == "align" else 0
        if self.window is not None:
            return max(0, token - self.window + 1)
        return 0 if self.chunk is None else token - token % self.chunk

    def skipped_blocks(self, computed: int) -> int:
        return self.first_seen(computed) // self.block_size

    @property
    def kept_blocks(self) -> int:
        """Of the first tokens."""
        return ceil(self.first / self.block_size)

    def needed_for_hit(self, length: int) -> set[int]:
        """Blocks of the tokens that the token after a hit of `length` tokens sees."""
        return {key // self.block_size for key in range(length) if self.sees(length, key)}

    def needs_some_block(self, max_model_len: int) -> bool:
        """Whether a hit of any number of blocks needs one of them."""
        return all(self.needed_for_hit(n) for n in range(self.block_size, max_model_len + 1, self.block_size))

    def required(self, slots: int, encoder: int) -> int:
        """Blocks of a new request, or columns of Mamba."""
        if self.mamba == "none":
            return 1 + self.drafts
        if self.mamba == "align":
            return ceil(slots / self.block_size) + self.drafts
        return ceil((encoder if self.cross else slots) / self.block_size)

    def most_blocks(self, in_flight: int, max_model_len: int, prompt: int) -> int:
        """The admission cap of a request with so many prompt tokens."""
        if self.rswa is not None:
            in_window = ceil((self.rswa - 1 + in_flight) / self.block_size) + 1
            return ceil(prompt / self.block_size) + in_window
        if self.cross:
            return ceil(MAX_ENCODER / self.block_size)
        if self.window is not None:
            in_window = ceil(min(self.window - 1 + in_flight, max_model_len) / self.block_size) + 1
            return min(in_window + self.kept_blocks, max(in_window, ceil(max_model_len / self.block_size)))
        if self.chunk is not None:
            straddles = self.chunk % self.block_size > 0
            return ceil(min(self.chunk + in_flight, max_model_len) / self.block_size) + straddles
        return ceil(max_model_len / self.block_size)


class NaiveManager:
    """Groups of equal kind stand together in every order of work, at the place of the first of them."""

    def __init__(
        self,
        groups: list[NaiveGroup],
        pool_sizes: list[int],
        max_model_len: int,
        *,
        caching: bool = True,
        eagle: bool = False,
        uncached_first: bool = False,
        same_step_hits: bool = True,
        max_in_flight: int | None = None,
        retention: int | None = None,
        ends: str = "all",
    ) -> None:
        self.groups = groups
        self.ends = ends
        self.retention = retention
        self.checkpoints: dict[str, set[int]] = {}  # request -> lengths at which hits of it may end
        self.order = sorted(range(len(groups)), key=lambda i: groups.index(groups[i]))
        self.pools = [NaivePool(size, uncached_first) for size in pool_sizes]
        self.max_model_len = max_model_len
        self.caching = caching
        self.eagle = eagle
        self.same_step_hits = same_step_hits
        self.max_in_flight = max_in_flight or max_model_len
        self.tables: dict[str, list[list[int]]] = {}  # request -> per group its blocks
        self.prompts: dict[str, int] = {}  # running request -> tokens of its prompt
        windows = [group.rswa for group in groups if group.rswa is not None]
        self.shared_answer = min(windows, default=max_model_len)  # tokens behind a prompt that see all before them
        self.cached: dict[str, list[int]] = {}  # request -> per group how many were registered
        self.fresh: list[set[int]] = [set() for _ in pool_sizes]
        self.stopped: set[str] = set()  # running requests that register no more
        self.computed: list[list[tuple]] = [[] for _ in groups]  # keys of blocks that requests came by, kept or not
        self.hits_end_anywhere = False  # inside blocks too: then every block is of use
        self._kept: dict[tuple[int, int, int], bool] = {}  # (group, column, tokens between checkpoints)
        # a hit rests on something cached: on its last blocks, if no group needs a block at every length
        self.needs_last = not any(group.needs_some_block(max_model_len) for group in groups if not group.cross)
        for i in self.order:
            for _ in range(groups[i].sinks):
                self.pools[groups[i].pool].take()

    # -- hits

    def find_hit(self, request: NaiveRequest) -> tuple[list[list[int]], int]:
        cached = [group for group in self.groups if not group.cross]
        names_input = request.salt is not None or len(cached) == len(self.groups)
        if not (self.caching and cached and names_input):
            return [[] for _ in self.groups], 0
        limit = min(len(request.tokens) - 1, request.num_prompt + self.shared_answer)
        step = lcm(*(group.block_size for group in cached))
        for length in range(limit // step * step, 0, -step):
            hit = [self._hit_of(i, request, length, limit) for i in range(len(self.groups))]
            if None not in hit:
                return hit, length
        return [[] for _ in self.groups], 0

    def _hit_of(
        self, group_id: int, request: NaiveRequest, length: int, limit: int, needs_last: bool | None = None
    ) -> list[int] | None:
        group = self.groups[group_id]
        if group.cross:
            return []
        if group.mamba == "none":
            return None
        needed = self.needed_for_hit(group, length, needs_last)
        if self._drops(group):
            # in a hybrid the dropped block may hold the last token: it is computed again
            if length + group.block_size > limit + (len(self.groups) > 1):
                return None
            if group.mamba is None:
                needed.add(length // group.block_size)
        found = {i: self._cached_block(group_id, request.key((i + 1) * group.block_size)) for i in needed}
        if None in found.values():
            return None
        return [found.get(i, 0) for i in range(length // group.block_size)]

    def needed_for_hit(self, group: NaiveGroup, length: int, needs_last: bool | None = None) -> set[int]:
        """Blocks that a hit of `length` tokens needs of a group, apart from the one that EAGLE drops."""
        needed = group.needed_for_hit(length)
        if self.needs_last if needs_last is None else needs_last:
            needed.add(length // group.block_size - 1)
        return needed

    def _drops(self, group: NaiveGroup) -> bool:
        """Groups of equal kind share a flag; without any flag the rule is everybody's."""
        flagged = [other for other in self.groups if other.eagle]
        return self.eagle and (group in flagged or not flagged)

    def _cached_block(self, group_id: int, key: tuple) -> int | None:
        pool_id = self.groups[group_id].pool
        blocks = self.pools[pool_id].holders.get((group_id, key))
        if not blocks or blocks[0] in self.fresh[pool_id]:
            return None
        return blocks[0]

    def new_step_starts(self) -> None:
        for fresh in self.fresh:
            fresh.clear()

    # -- what is kept

    @property
    def hit_step(self) -> int:
        """Every hit is a multiple; one block of Mamba `none` holds more than any request."""
        sizes = [group.block_size for group in self.groups if not group.cross]
        is_none = any(group.mamba == "none" for group in self.groups)
        return lcm(*sizes) * (self.max_model_len + 1 if is_none else 1)

    def find_shared(self, request: NaiveRequest) -> int:
        """The longest prefix that all groups have that keep everything before it; of the first, if there is none."""
        limit = min(len(request.tokens) - 1, request.num_prompt + self.shared_answer)
        cached = [i for i in self.order if not self.groups[i].cross]
        closed = [i for i in cached if not self.groups[i].is_local] or cached[:1]
        names_input = request.salt is not None or len(cached) == len(self.groups)
        if self.retention is None or not (self.caching and cached and names_input):
            return 0
        for length in range(limit // self.hit_step * self.hit_step, 0, -self.hit_step):
            if all(self._hit_of(i, request, length, limit, needs_last=True) is not None for i in closed):
                return length
        return 0

    def note_checkpoints(self, request: NaiveRequest, shared: int) -> None:
        dropping = [group.block_size for group in self.groups if self._drops(group) and not group.cross]
        dropped, most = max(dropping, default=0), len(request.tokens)
        lengths = [most - dropped - 1, most - dropped, shared]
        if self.ends == "vllm-0.33":
            most = request.num_prompt
            ends = [most - 1 - self.hit_step, most - self.hit_step] if dropped else [most - 1]
            lengths = [*ends, shared, shared - dropped]
        self.checkpoints[request.request_id] = {max(n, 0) // self.hit_step * self.hit_step for n in lengths} - {0}

    def keeps(self, name: str, group: NaiveGroup, column: int) -> bool:
        """Whether a hit of an aligned length needs the block; where there are checkpoints, one that ends at one."""
        is_whole = group.chunk is not None and (self.retention is None or self.ends == "vllm-0.33")
        if self.hits_end_anywhere or not group.is_local or is_whole or column < group.kept_blocks:
            return True
        every = self.hit_step if self.retention is None else self.retention
        key = (self.groups.index(group), column, every)
        if every and key not in self._kept:
            seen = group.window or group.chunk or 0
            first, last = column * group.block_size, (column + 1) * group.block_size + seen
            multiples = range(max(first // every * every, every), last + every, every)
            self._kept[key] = any(self._needs(group, length, column) for length in multiples)
        own = () if self.retention is None else self.checkpoints[name]
        return bool(every and self._kept[key]) or any(self._needs(group, length, column) for length in own)

    def _needs(self, group: NaiveGroup, length: int, column: int) -> bool:
        """Whether a hit of `length` tokens needs a block, the one that EAGLE drops among them."""
        drops = self._drops(group) and group.mamba is None
        return column in self.needed_for_hit(group, length) or (drops and column == length // group.block_size)

    # -- slots

    def allocate(
        self,
        request: NaiveRequest,
        new: int,
        hit: list[list[int]] | None = None,
        hit_tokens: int = 0,
        *,
        lookahead: int = 0,
        external: int = 0,
        delay: bool = False,
        in_flight: int = 0,
        must_fit: bool = False,
        shared: int = 0,
    ) -> list[list[int]] | None:
        name = request.request_id
        running = name in self.tables
        computed = request.computed if running else hit_tokens + external
        settled = max(computed - in_flight, 0) if running else computed
        hit = hit or [[] for _ in self.groups]
        if running:
            self.release_skipped(name, settled)
        tables = self.tables.get(name) or [[] for _ in self.groups]
        slots = min(computed + new + lookahead, self.max_model_len)
        if must_fit:
            whole = min(max(len(request.tokens), computed + new), self.max_model_len)
            if not self._fits(tables, hit, whole, whole, computed, running, request.encoder, request.num_prompt):
                return None
        after = computed + new
        if not self._fits(tables, hit, slots, after, computed, running, request.encoder):
            return None
        if not running:
            self.cached[name] = [0] * len(self.groups)
            self.note_checkpoints(request, shared if shared > hit_tokens else 0)
            self.tables[name] = tables
            self.prompts[name] = request.num_prompt
            for i in self.order:
                group = self.groups[i]
                skipped = group.skipped_blocks(computed)
                kept = hit[i][: min(group.kept_blocks, skipped)]
                for block in kept + hit[i][skipped:]:
                    self.pools[group.pool].touch(block)
                tables[i] += kept + [0] * (skipped - len(kept)) + hit[i][skipped:]
                is_kept = len(kept) == min(group.kept_blocks, skipped)
                self.cached[name][i] = len(tables[i]) if is_kept else len(kept)
            if external:
                self._append(tables, computed, computed, 0, is_first=True, sees=computed)
        dealt = self._append(tables, slots, after, 0 if running else request.encoder, not (running or external))
        if not delay:
            self.register(request, computed + new)
        return dealt

    def _fits(
        self,
        tables: list,
        hit: list,
        slots: int,
        after: int,
        computed: int,
        running: bool,
        encoder: int,
        capped_prompt: int = 0,  # tokens, where the admission cap counts
    ) -> bool:
        needs = [0] * len(self.pools)
        for i, group in enumerate(self.groups):
            if group.mamba is not None:
                needs[group.pool] += self._mamba_needs(i, tables[i], hit[i], after, computed, running)
                continue
            required = group.required(slots, 0 if running else encoder)
            if capped_prompt:
                required = min(required, group.most_blocks(self.max_in_flight, self.max_model_len, capped_prompt))
            if running:
                needs[group.pool] += max(required - len(tables[i]), 0)
            else:
                skipped = group.skipped_blocks(computed)
                refs = self.pools[group.pool].refs
                kept = min(group.kept_blocks, skipped)
                needs[group.pool] += max(required - max(skipped, len(hit[i])), 0) + max(kept - len(hit[i]), 0)
                needs[group.pool] += sum(refs[block] == 0 for block in hit[i][:kept] + hit[i][skipped:])
        return all(need <= len(pool.free) for need, pool in zip(needs, self.pools, strict=True))

    def _mamba_needs(self, i: int, table: list[int], hit: list[int], after: int, computed: int, running: bool) -> int:
        group = self.groups[i]
        if running:
            return int(group.required(after, 0) > len(table))
        states = 1 + group.drafts
        if computed > len(hit) * group.block_size:  # the state of external tokens, and then that of the step
            return states + (group.required(after, 0) > group.required(computed, 0))
        return states + (self.pools[group.pool].refs[hit[-1]] == 0 if hit else 0)

    def _advance_mamba(self, i: int, table: list[int], after: int, is_first: bool) -> list[int]:
        """Moves a table on to the column of `after` tokens; what the columns after its old end hold."""
        group, pool = self.groups[i], self.pools[self.groups[i].pool]
        columns, held = group.required(after, 0), len(table)
        if columns <= held:
            return []
        blocks = [pool.take() for _ in range(1 + group.drafts if is_first else 1)]
        moved: list[int] = []
        if not is_first:
            running = columns - group.drafts - 1
            for column in range(held - group.drafts, min(held, running)):
                moved.append(table[column])
                table[column] = 0
        table += [0] * (columns - held - len(moved) - len(blocks)) + moved + blocks
        return table[held:]

    def _append(
        self,
        tables: list[list[int]],
        slots: int,
        after: int,
        encoder: int,
        is_first: bool,
        sees: int | None = None,  # only groups whose token of this number sees one before it take blocks
    ) -> list[list[int]]:
        dealt: list[list[int]] = [[] for _ in self.groups]
        for i in self.order:
            group = self.groups[i]
            if sees is not None and self.groups.index(group) == i:  # groups of equal kind take theirs together
                for j in [j for j in self.order if self.groups[j] == group]:
                    for column in range(min(group.kept_blocks, group.skipped_blocks(sees))):
                        tables[j][column] = tables[j][column] or self.pools[group.pool].take()
            if sees is not None and (group.cross or group.first_seen(sees) >= sees):
                continue
            if group.mamba is not None:
                dealt[i] = self._advance_mamba(i, tables[i], after, is_first)
                continue
            missing = group.required(slots, encoder) - len(tables[i])
            dealt[i] = [self.pools[group.pool].take() for _ in range(missing)]
            tables[i] += dealt[i]
        return dealt

    def register(self, request: NaiveRequest, num_tokens: int) -> None:
        if not self.caching or not request.inserts or request.request_id in self.stopped:
            return
        for i, group in enumerate(self.groups):
            if group.cross or group.mamba == "none":
                continue
            table = self.tables[request.request_id][i]
            num_tokens = min(num_tokens, request.num_prompt + self.shared_answer)
            full = min(num_tokens, len(request.tokens)) // group.block_size
            for column in range(self.cached[request.request_id][i], full):
                key = request.key((column + 1) * group.block_size)
                self.computed[i].append(key)
                if table[column] and self.keeps(request.request_id, group, column):
                    self.pools[group.pool].register(table[column], i, key)
                    if group.mamba is not None or not self.same_step_hits:
                        self.fresh[group.pool].add(table[column])
            self.cached[request.request_id][i] = max(self.cached[request.request_id][i], full)

    def release_skipped(self, name: str, settled: int) -> None:
        for i in self.order:
            group, table = self.groups[i], self.tables[name][i]
            kept = 0 if group.mamba is None else 1 + group.drafts
            columns = range(group.kept_blocks, min(group.skipped_blocks(settled), len(table) - kept))
            if group.rswa is not None:
                first_seen = max(settled - group.rswa + 1, 0) // group.block_size
                columns = range(ceil(self.prompts[name] / group.block_size), min(first_seen, len(table)))
            self.pools[group.pool].release([table[column] for column in reversed(columns)])
            for column in columns:
                table[column] = 0

    def free(self, name: str) -> None:
        tables = self.tables.pop(name)
        del self.prompts[name]
        del self.cached[name]
        self.stopped.discard(name)
        for i in self.order:
            self.pools[self.groups[i].pool].release(tables[i][::-1])

    # -- the cache as a whole

    def evict(self, pool_id: int, blocks: list[int]) -> None:
        for block in blocks:
            self.pools[pool_id].forget(block)

    def reset(self) -> bool:
        if any(any(table) for tables in self.tables.values() for table in tables):
            return False
        for pool in self.pools:
            for block in sorted(pool.key_of):
                pool.forget(block)
        self.new_step_starts()
        return True

    def common_prefix(self, name: str) -> list[int]:
        counts = []
        for i, group in enumerate(self.groups):
            count = 0
            if not group.is_local and not group.cross and group.rswa is None:
                for column, block in enumerate(self.tables[name][i]):
                    if any(len(t[i]) <= column or t[i][column] != block for t in self.tables.values()):
                        break
                    count += 1
            counts.append(count)
        return counts
