"""A router in another process knows what a manager has, over gaps, replays and a restart of the publisher."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq

from kvjax.core import KVCacheManager
from kvjax.events import CacheUnknown, KVEventsConfig, ZmqEventPublisher, ZmqEventSubscriber, low_64_bits
from kvjax.routing import PrefixIndex
from tests.events.workload import FULL, HASH_BLOCK_SIZE, Workload, cached_blocks, check_hits, index_of, make_manager

ROOT = Path(__file__).parents[3]
LOOPBACK = "tcp://127.0.0.1:*"


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{one.getsockname()[1]}"


class TellingContext(zmq.Context):
    """Its publishing sockets tell of subscriptions that have taken effect."""

    def socket(self, kind: int, *args: Any, **options: Any) -> zmq.Socket:
        return super().socket(zmq.XPUB if kind == zmq.PUB else kind, *args, **options)


class Relay:
    """Stands between a publisher and its subscribers, and loses the messages whose numbers `lose` says."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.source, self.sink = self.context.socket(zmq.SUB), self.context.socket(zmq.XPUB)
        self.source.subscribe("")
        self.endpoint = f"tcp://127.0.0.1:{self.sink.bind_to_random_port('tcp://127.0.0.1')}"

    def follow(self, publisher: ZmqEventPublisher) -> None:
        """Hears all that is published from here on."""
        self.source.connect(publisher.endpoint)
        wait_for_a_subscriber(publisher._pub)

    def pass_on(self, until_seq: int, lose: Callable[[int], bool] = lambda seq: False) -> None:
        """Passes messages on until the one of a number."""
        while True:
            assert self.source.poll(5_000), until_seq
            frames = self.source.recv_multipart()
            seq = int.from_bytes(frames[1], "big")
            if not lose(seq):
                self.sink.send_multipart(frames)
            if seq == until_seq:
                return

    def close(self) -> None:
        self.context.destroy(linger=0)


def wait_for_a_subscriber(socket: zmq.Socket) -> None:
    assert socket.poll(10_000)
    socket.recv()


class Served:
    """A manager under random traffic whose events are published."""

    def __init__(self, replay_endpoint: str, seed: int, buffer_steps: int = 10_000) -> None:
        self.manager: KVCacheManager = make_manager(FULL, 30)
        self.workload = Workload(self.manager, seed)
        config = KVEventsConfig(endpoint=LOOPBACK, replay_endpoint=replay_endpoint, buffer_steps=buffer_steps)
        self.context = TellingContext()
        self.publisher = ZmqEventPublisher(config, context=self.context)
        self.num_published = 0

    def shutdown(self) -> None:
        """Its addresses are free again when this returns."""
        self.publisher.shutdown()
        self.context.term()

    def serve(self, num_batches: int) -> int:
        """Publishes so many batches; the number of the last."""
        for _ in range(num_batches):
            events = []
            while not events:
                self.workload.step()
                events = self.manager.take_events()
            self.publisher.publish(events)
            self.num_published += 1
        return self.num_published - 1

    def expected(self, hashes: list[bytes]) -> tuple[int, int]:
        """Leading tokens of whole blocks that the manager has, and how many blocks it has."""
        cached = {low_64_bits(key) for key in cached_blocks(self.manager)[0]}
        matched = next((i for i, key in enumerate(hashes) if low_64_bits(key) not in cached), len(hashes))
        return matched * HASH_BLOCK_SIZE, len(cached)

    def check(self, ask: Callable[[list[bytes]], dict]) -> None:
        for _ in range(4):
            hashes = self.workload.request(self.workload.prompt()).block_hashes
            answer = ask(hashes)
            assert (answer["matched"], answer["blocks"]) == self.expected(hashes)
            assert answer["knows_all"]
            assert not answer["unknown"]


def take(subscriber: ZmqEventSubscriber, index: PrefixIndex) -> int:
    """Brings the index up to date, as a router does; how often the cache was unknown."""
    num_unknown = 0
    while received := subscriber.poll(0.5):
        for one in received:
            if isinstance(one, CacheUnknown):
                num_unknown += 1
                index.forget(0)
            else:
                index.apply(0, one.events)
    return num_unknown


@pytest.fixture
def relay() -> Iterator[Relay]:
    one = Relay()
    yield one
    one.close()


@contextmanager
def following(
    relay: Relay, served: Served, replay_endpoint: str | None = None, **options: Any
) -> Iterator[ZmqEventSubscriber]:
    """A subscriber behind the relay, which hears what is passed on from here on; the publisher ends with it."""
    relay.follow(served.publisher)
    with ZmqEventSubscriber(relay.endpoint, replay_endpoint, **options) as subscriber:
        wait_for_a_subscriber(relay.sink)
        yield subscriber
    served.shutdown()


def test_a_router_in_another_process_over_a_gap_and_a_restart(relay: Relay) -> None:
    replay_endpoint = free_address()
    served = Served(replay_endpoint, seed=1)
    relay.follow(served.publisher)
    command = [sys.executable, "-m", "tests.events.sockets.router_process", relay.endpoint, replay_endpoint]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(hashes: list[bytes]) -> dict:
            stdin.write(" ".join(key.hex() for key in hashes) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

        assert stdout.readline() == "ready\n"
        wait_for_a_subscriber(relay.sink)
        relay.pass_on(served.serve(10), lose=lambda seq: seq < 3)  # a late subscriber, as good as
        served.check(ask)
        relay.pass_on(served.serve(10), lose=lambda seq: 12 <= seq < 16)  # a gap in the middle
        served.check(ask)
        served.shutdown()
        served = Served(replay_endpoint, seed=2)  # a restart with an empty cache, numbers from 0
        relay.follow(served.publisher)
        relay.pass_on(served.serve(5))
        served.check(ask)
        served.shutdown()
        stdin.close()
        assert process.wait(10) == 0


def test_what_left_the_buffer_is_in_the_snapshot(relay: Relay) -> None:
    """With a replay of the last 3 batches: a late subscriber, and one that lost more than those, start right."""
    served = Served(LOOPBACK, seed=3, buffer_steps=3)
    with following(relay, served, served.publisher.replay_endpoint) as subscriber:
        index = index_of(served.manager)
        for lost in (range(9), range(12, 19)):
            relay.pass_on(served.serve(10), lose=lambda seq: seq in lost)  # noqa: B023
            assert not take(subscriber, index)
            assert index.knows_all(0)
            check_hits(index, served.workload)


def test_without_a_replay_what_is_missed_is_told_as_lost(relay: Relay) -> None:
    """What is known then is a lower bound, until the replica clears its cache."""
    served = Served(LOOPBACK, seed=3)
    with following(relay, served) as subscriber:
        index = index_of(served.manager)
        relay.pass_on(served.serve(10), lose=lambda seq: seq < 9)
        assert take(subscriber, index) == 2  # at first, and at the gap
        assert not index.knows_all(0)
        for _ in range(20):
            request = served.workload.request(served.workload.prompt())
            assert index.match(request)[0] <= served.manager.get_computed_blocks(request)[1]
        served.workload._reset()
        relay.pass_on(served.serve(10))
        assert not take(subscriber, index)
        assert index.knows_all(0)
        check_hits(index, served.workload)


def test_all_from_number_0_on_is_all_there_is(relay: Relay) -> None:
    """A subscriber without a replay that was there from the beginning."""
    served = Served(LOOPBACK, seed=6)
    with following(relay, served) as subscriber:
        index = index_of(served.manager)
        relay.pass_on(served.serve(10))
        assert take(subscriber, index) == 1
        assert index.knows_all(0)
        check_hits(index, served.workload)


def test_a_replay_that_never_answers_costs_its_time_and_no_more(relay: Relay) -> None:
    """Its time at first, and at each gap; the other batches come."""
    served = Served(LOOPBACK, seed=4)
    with following(relay, served, free_address(), replay_timeout_s=0.2) as subscriber:
        relay.pass_on(served.serve(4), lose=lambda seq: seq == 1)
        received = []
        while new := subscriber.poll(0.5):
            received += new
    assert [isinstance(one, CacheUnknown) for one in received] == [True, False, False, True, False, False]


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="expected endpoints to connect to"):
        ZmqEventSubscriber("nowhere")
