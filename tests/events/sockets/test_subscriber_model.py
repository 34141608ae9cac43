"""Whatever a line loses and delays, however often a publisher restarts: a router is right, or knows that it is not."""

from __future__ import annotations

import random
from collections import deque

import pytest

from kvjax.events import CacheUnknown, EventEncoder, ZmqEventSubscriber
from kvjax.events.cached_blocks import CachedBlocks
from kvjax.events.replay_buffer import ReplayBuffer
from tests.events.workload import FULL, HYBRID, Workload, check_hits, index_of, make_manager

SNAPSHOT = (1 << 64) - 2
NUM_ROUNDS = [30, pytest.param(300, marks=pytest.mark.sweep)]


class Network:
    """A publisher behind a lossy line: stands for the subscriber's live socket and for its replay client."""

    def __init__(self, seed: int, groups: tuple, has_snapshots: bool, buffer_steps: int) -> None:
        self.rng, self.groups, self.buffer_steps = random.Random(seed), groups, buffer_steps
        self.has_snapshots = has_snapshots
        self.line: deque[list[bytes]] = deque()  # sent, and not arrived
        self.arrived: deque[list[bytes]] = deque()
        self.is_silent = False
        self.num_lives = 0
        self.restart()

    def restart(self) -> None:
        """A publisher with an empty cache."""
        self.num_lives += 1
        self.work = Workload(make_manager(self.groups, 30), self.rng.getrandbits(30))
        self.buffer, self.cached, self.next_seq = ReplayBuffer(self.buffer_steps), CachedBlocks(), 0
        self.was_heard = False

    def publish(self, is_sure: bool = False) -> None:
        events = []
        while not events:
            self.work.step()
            events = self.work.manager.take_events()
        payload = EventEncoder().encode(events, self.rng.random())
        self.buffer.append(self.next_seq, payload)
        self.cached.apply(events)
        if is_sure or self.rng.random() < 0.8:
            self.line.append([b"", self.next_seq.to_bytes(8, "big"), payload])
        self.next_seq += 1

    def deliver(self, count: int, expected_seq: int) -> None:
        """The next messages arrive; not the first of a publisher if it is just the one that the last owed."""
        for _ in range(min(count, len(self.line))):
            frames = self.line.popleft()
            seq = int.from_bytes(frames[1], "big")
            if self.was_heard or seq != expected_seq or self.num_lives == 1 or not seq:
                self.arrived.append(frames)
                self.was_heard = True

    # What the subscriber calls.

    def poll(self, timeout_ms: int) -> bool:
        return bool(self.arrived)

    def recv_multipart(self) -> list[bytes]:
        return self.arrived.popleft()

    def ask(self, asked: bytes) -> list[tuple[int, bytes]] | None:
        number = int.from_bytes(asked, "big")
        if self.rng.random() < 0.1:
            return None
        if number != SNAPSHOT:
            return list(self.buffer.since(number))
        parts = list(self.cached.snapshot()) if self.has_snapshots else []
        return [(self.next_seq, EventEncoder().encode(part, 0.0)) for part in parts]


@pytest.mark.parametrize("has_snapshots", [True, False])
@pytest.mark.parametrize("num_rounds", NUM_ROUNDS)
@pytest.mark.parametrize("seed", range(20))
def test_the_index_is_right_or_does_not_know_all(seed: int, num_rounds: int, has_snapshots: bool) -> None:
    rng = random.Random(seed)
    net = Network(seed, rng.choice([FULL, HYBRID]), has_snapshots, buffer_steps=rng.choice([1, 3, 10, 1_000]))
    index = index_of(net.work.manager)
    num_right = 0
    with ZmqEventSubscriber("inproc://nobody", "inproc://nobody") as subscriber:
        subscriber._context.destroy()
        subscriber._live = subscriber._replay = net  # type: ignore[assignment]

        def poll() -> None:
            for one in subscriber.poll():
                if isinstance(one, CacheUnknown):
                    index.forget(0)
                else:
                    index.apply(0, one.events)

        for _ in range(num_rounds):
            for _ in range(rng.randint(0, 4)):
                net.publish()
            if rng.random() < 0.05:
                net.line.clear()
                poll()
                net.restart()
                for _ in range(rng.choice([0, subscriber._next_seq + 3])):  # before it is heard
                    net.publish()
                net.line.clear()
            net.deliver(rng.randint(0, 6), subscriber._next_seq)
            poll()
            if rng.random() < 0.3:  # all that is under way arrives, the last batch among it
                net.publish(is_sure=True)
                net.deliver(len(net.line), subscriber._next_seq)
                poll()
                if index.knows_all(0) and net.was_heard and subscriber._next_seq == net.next_seq:
                    num_right += 1
                    check_hits(index, net.work, 3)
    assert num_right or not (has_snapshots or net.buffer_steps == 1_000)
