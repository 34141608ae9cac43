"""The baseline of the manager's cases: one Python object per block, one call per request, a loop over its groups."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench_host_cases.pool import PlainBlock, PlainPool


@dataclass
class PlainRequest:
    """Tokens are only counted: every block's hash is known beforehand."""

    name: str
    num_tokens: int
    hashes: list[bytes]
    num_computed: int = 0


@dataclass
class PlainGroup:
    """Full attention, or a window of `window` tokens."""

    key: bytes  # keeps the groups' hashes apart
    block_size: int
    window: int | None = None
    tables: dict[str, list[PlainBlock | None]] = field(default_factory=dict)  # None: given back
    num_cached: dict[str, int] = field(default_factory=dict)


class PlainManager:
    """What a scheduler calls for each request of each step."""

    def __init__(self, num_blocks: int, groups: list[PlainGroup]) -> None:
        self.groups = groups
        self.pool = PlainPool(num_blocks)

    def allocate_slots(self, request: PlainRequest, num_new: int) -> list[list[PlainBlock]] | None:
        after = request.num_computed + num_new
        for group in self.groups:
            self.release_skipped(group, request)
        tables = [group.tables.setdefault(request.name, []) for group in self.groups]
        needs = [
            max(-(-after // group.block_size) - len(table), 0) for group, table in zip(self.groups, tables, strict=True)
        ]
        if sum(needs) > len(self.pool.free):
            return None
        dealt = []
        for table, need in zip(tables, needs, strict=True):
            blocks = self.pool.get(need)
            table += blocks
            dealt.append(blocks)
        for group, table in zip(self.groups, tables, strict=True):
            full = min(after, request.num_tokens) // group.block_size
            for column in range(group.num_cached.get(request.name, 0), full):
                block = table[column]
                if block is not None:
                    self.pool.register([block], [request.hashes[column] + group.key])
            group.num_cached[request.name] = full
        return dealt

    def release_skipped(self, group: PlainGroup, request: PlainRequest) -> None:
        if group.window is None or request.name not in group.tables:
            return
        table = group.tables[request.name]
        released = []
        for column in range(max(request.num_computed - group.window + 1, 0) // group.block_size - 1, -1, -1):
            block = table[column]
            if block is None:
                break
            released.append(block)
            table[column] = None
        self.pool.release(released)

    def find_hit(self, request: PlainRequest) -> list[PlainBlock]:
        """Full attention only."""
        hit = []
        for block_hash in request.hashes:
            block_id = self.pool.index.get(block_hash + self.groups[0].key)
            if block_id is None:
                break
            hit.append(self.pool.blocks[block_id])
        return hit

    def free(self, request: PlainRequest) -> None:
        for group in self.groups:
            table = group.tables.pop(request.name)
            group.num_cached.pop(request.name)
            self.pool.release([block for block in reversed(table) if block is not None])


class PlainCrossManager(PlainManager):
    """One group of cross attention: `fixed_blocks` blocks from the first call on."""

    def __init__(self, num_blocks: int, fixed_blocks: int) -> None:
        super().__init__(num_blocks, [PlainGroup(b"\0", 1)])
        self.fixed_blocks = fixed_blocks

    def allocate_slots(self, request: PlainRequest, num_new: int) -> list[list[PlainBlock]] | None:
        [group] = self.groups
        table = group.tables.setdefault(request.name, [])
        group.num_cached.setdefault(request.name, 0)
        need = max(self.fixed_blocks - len(table), 0)
        if need > len(self.pool.free):
            return None
        blocks = self.pool.get(need)
        table += blocks
        return [blocks]
