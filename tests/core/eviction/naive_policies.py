"""The eviction policies one block at a time, over lists: what those of the package must agree with.

`hashed` is the set of hashed blocks, `hash_of` has their hashes; whoever drives the model keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class NaivePolicy:
    num_blocks: int
    hashed: set[int] = field(default_factory=set)
    hash_of: dict[int, bytes] = field(default_factory=dict)  # of hashed blocks, and stale ones
    blank: list[int] = field(default_factory=list)  # free and unhashed, oldest first

    def __post_init__(self) -> None:
        self.blank = list(range(1, self.num_blocks))

    def order(self) -> list[int]:
        raise NotImplementedError

    def take(self, count: int) -> list[int]:
        return [self.take_one() for _ in range(count)]

    def take_one(self) -> int:
        raise NotImplementedError

    def release_one(self, block: int) -> None:
        raise NotImplementedError

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.release_one(block)

    def remove(self, block: int) -> None:
        raise NotImplementedError

    def registered(self, block: int, start: int, block_size: int) -> None:
        pass

    def hit(self, block: int) -> None:
        pass

    def all_forgotten(self, blocks: list[int]) -> None:
        for block in blocks:
            self.forgotten(block)

    def forgotten(self, block: int) -> None:
        pass

    def put_on_probation(self, block: int) -> None:
        pass

    def step_planned(self) -> None:
        pass

    def admitted(self) -> None:
        pass

    def hits(self, blocks: list[int]) -> None:
        for block in blocks:
            self.hit(block)

    def kept(self, blocks: list[int]) -> None:
        pass


class NaiveProbationLRU(NaivePolicy):
    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.probation: list[int] = []
        self.lasting: list[int] = []
        self.young: set[int] = set()
        self.on_probation: set[int] = set()

    def queue_of(self, block: int) -> list[int]:
        if block not in self.hashed:
            return self.blank
        return self.probation if block in self.on_probation else self.lasting

    def order(self) -> list[int]:
        blocks = [*self.blank, *self.probation, *self.lasting]
        return sorted(blocks, key=self.young.__contains__)

    def take_one(self) -> int:
        block = self.order()[0]
        if block in self.young:
            self.young.clear()
        self.remove(block)
        self.on_probation.discard(block)
        return block

    def release_one(self, block: int) -> None:
        self.queue_of(block).append(block)
        self.young.add(block)

    def step_planned(self) -> None:
        self.young.clear()

    def remove(self, block: int) -> None:
        for queue in (self.blank, self.probation, self.lasting):
            if block in queue:
                queue.remove(block)
        self.young.discard(block)

    def hit(self, block: int) -> None:
        self.on_probation.discard(block)

    def put_on_probation(self, block: int) -> None:
        self.on_probation.add(block)

    def kept(self, blocks: list[int]) -> None:
        """Those that lasted already go to the tail, then those that were on probation."""
        self.on_probation.difference_update(blocks)
        lasted = [block for block in blocks if block in self.lasting]
        for block in lasted + [block for block in blocks if block in self.probation]:
            self.young.clear()
            self.remove(block)
            self.lasting.append(block)

    def all_forgotten(self, blocks: list[int]) -> None:
        """Those that lasted go first."""
        self.on_probation.difference_update(blocks)
        lasted = [block for block in blocks if block in self.lasting]
        for block in lasted + [block for block in blocks if block in self.probation]:
            self.young.clear()
            self.remove(block)
            self.blank.append(block)


class NaiveLRU(NaivePolicy):
    def order(self) -> list[int]:
        return self.blank

    def take_one(self) -> int:
        return self.blank.pop(0)

    def release_one(self, block: int) -> None:
        self.blank.append(block)

    def remove(self, block: int) -> None:
        self.blank.remove(block)


class NaiveSegmentedLRU(NaivePolicy):
    def __init__(self, num_blocks: int, max_protected: int) -> None:
        super().__init__(num_blocks)
        self.max_protected = max_protected
        self.probation: list[int] = []
        self.protected: list[int] = []
        self.was_hit: set[int] = set()

    def order(self) -> list[int]:
        return self.blank + self.probation + self.protected

    def take_one(self) -> int:
        block = (self.blank or self.probation or self.protected).pop(0)
        self.was_hit.discard(block)
        return block

    def release_one(self, block: int) -> None:
        if block not in self.hashed:
            self.blank.append(block)
        elif block not in self.was_hit:
            self.probation.append(block)
        else:
            self.protected.append(block)
            if len(self.protected) > self.max_protected:
                demoted = self.protected.pop(0)
                self.was_hit.remove(demoted)
                self.probation.append(demoted)

    def remove(self, block: int) -> None:
        for queue in (self.blank, self.probation, self.protected):
            if block in queue:
                queue.remove(block)

    def hit(self, block: int) -> None:
        if block in self.hashed:
            self.was_hit.add(block)

    def forgotten(self, block: int) -> None:
        self.was_hit.discard(block)
        if block in self.probation + self.protected:
            self.remove(block)
            self.blank.append(block)


class NaiveCostAware(NaivePolicy):
    def __init__(self, num_blocks: int, parity: float) -> None:
        super().__init__(num_blocks)
        self.parity = parity
        self.clock = 0.0
        self.uses: dict[int, int] = {}
        self.cost: dict[int, float] = {}
        self.start: dict[int, int] = {}
        self.cached: list[tuple[float, int, int]] = []  # priority, number of the release, block
        self.num_releases = 0

    def order(self) -> list[int]:
        return self.blank + [block for _, _, block in sorted(self.cached)]

    def take_one(self) -> int:
        if self.blank:
            return self.blank.pop(0)
        first = min(self.cached)
        self.cached.remove(first)
        self.clock = first[0]
        return first[2]

    def release(self, blocks: list[int]) -> None:
        """A block is worth at least what the one before it in its chain is; positions fall along a chain."""
        worth, start = 0.0, -1
        for block in blocks:
            if block not in self.hashed:
                self.blank.append(block)
                continue
            own = self.uses[block] * self.cost[block]
            worth = max(worth, own) if self.start[block] < start else own
            start = self.start[block]
            self.cached.append((self.clock + worth, self.num_releases, block))
            self.num_releases += 1

    def remove(self, block: int) -> None:
        self.blank = [b for b in self.blank if b != block]
        self.cached = [entry for entry in self.cached if entry[2] != block]

    def registered(self, block: int, start: int, block_size: int) -> None:
        self.uses[block], self.start[block] = 1, start
        self.cost[block] = block_size * (1 + (start + block_size / 2) / self.parity)

    def hit(self, block: int) -> None:
        if block in self.hashed:
            self.uses[block] += 1

    def forgotten(self, block: int) -> None:
        if block in [entry[2] for entry in self.cached]:
            self.remove(block)
            self.blank.append(block)
