"""A router in another process knows what a manager has, over gaps, replays and a restart of the publisher."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from kvjax.core import KVCacheManager
from kvjax.events import CacheUnknown, KVEventsConfig, ZmqEventPublisher, ZmqEventSubscriber, low_64_bits
from tests.events.workload import FULL, Workload, cached_blocks, make_manager

ROOT = Path(__file__).parents[2]
LOOPBACK = "tcp://127.0.0.1:*"


def free_address() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{one.getsockname()[1]}"


class Relay:
    """Stands between a publisher and its subscribers, and loses the messages whose numbers `lose` says."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.source, self.sink = self.context.socket(zmq.SUB), self.context.socket(zmq.XPUB)
        self.source.subscribe("")
        self.endpoint = f"tcp://127.0.0.1:{self.sink.bind_to_random_port('tcp://127.0.0.1')}"

    def follow(self, publisher: ZmqEventPublisher) -> None:
        self.source.connect(publisher.endpoint)

    def wait_for_a_subscriber(self) -> None:
        assert self.sink.poll(10_000)
        self.sink.recv()

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


class Served:
    """A manager under random traffic whose events are published."""

    def __init__(self, replay_endpoint: str, seed: int, buffer_steps: int = 10_000) -> None:
        self.manager: KVCacheManager = make_manager(FULL, 30)
        self.workload = Workload(self.manager, seed)
        config = KVEventsConfig(endpoint=LOOPBACK, replay_endpoint=replay_endpoint, buffer_steps=buffer_steps)
        self.publisher = ZmqEventPublisher(config)
        self.num_published = 0

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
        """Leading blocks that the manager has, and how many it has."""
        cached = {low_64_bits(key) for key in cached_blocks(self.manager)[0]}
        matched = next((i for i, key in enumerate(hashes) if low_64_bits(key) not in cached), len(hashes))
        return matched, len(cached)

    def check(self, ask: Callable[[list[bytes]], dict], num_unknown: int) -> None:
        for _ in range(4):
            hashes = self.workload.request(self.workload.prompt()).block_hashes
            answer = ask(hashes)
            assert (answer["matched"], answer["blocks"]) == self.expected(hashes)
            assert answer["unknown"] == num_unknown


@pytest.fixture
def relay() -> Iterator[Relay]:
    one = Relay()
    yield one
    one.close()


def test_a_router_in_another_process_over_a_gap_and_a_restart(relay: Relay) -> None:
    replay_endpoint = free_address()
    served = Served(replay_endpoint, seed=1)
    relay.follow(served.publisher)
    command = [sys.executable, "-m", "tests.events.router_process", relay.endpoint, replay_endpoint]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def ask(hashes: list[bytes]) -> dict:
            stdin.write(" ".join(key.hex() for key in hashes) + "\n")
            stdin.flush()
            return json.loads(stdout.readline())

        assert stdout.readline() == "ready\n"
        relay.wait_for_a_subscriber()
        time.sleep(0.3)  # the relay's own subscription takes effect
        relay.pass_on(served.serve(10), lose=lambda seq: seq < 3)  # a late subscriber, as good as
        served.check(ask, num_unknown=0)
        relay.pass_on(served.serve(10), lose=lambda seq: 12 <= seq < 16)  # a gap in the middle
        served.check(ask, num_unknown=0)
        served.publisher.shutdown()
        served = Served(replay_endpoint, seed=2)  # a restart with an empty cache, numbers from 0
        relay.follow(served.publisher)
        time.sleep(0.3)
        relay.pass_on(served.serve(5))
        served.check(ask, num_unknown=1)
        served.publisher.shutdown()
        stdin.close()
        assert process.wait(10) == 0


@pytest.mark.parametrize("has_replay", [True, False])
def test_what_left_the_buffer_is_told_as_lost(relay: Relay, has_replay: bool) -> None:
    """With a replay of the last 3 batches, or with none: then the batches behind the gap are all that is known."""
    served = Served(LOOPBACK, seed=3, buffer_steps=3)
    relay.follow(served.publisher)
    with ZmqEventSubscriber(relay.endpoint, served.publisher.replay_endpoint if has_replay else None) as subscriber:
        relay.wait_for_a_subscriber()
        time.sleep(0.3)
        relay.pass_on(served.serve(10), lose=lambda seq: seq < 9)
        received = []
        while new := subscriber.poll(0.5):
            received += new
    assert [isinstance(one, CacheUnknown) for one in received] == [True, False]
    served.publisher.shutdown()


def test_a_replay_that_never_answers_costs_its_time_and_no_more(relay: Relay) -> None:
    served = Served(LOOPBACK, seed=4)
    relay.follow(served.publisher)
    with ZmqEventSubscriber(relay.endpoint, free_address(), replay_timeout_s=0.2) as subscriber:
        relay.wait_for_a_subscriber()
        time.sleep(0.3)
        relay.pass_on(served.serve(4), lose=lambda seq: seq == 1)
        received = []
        while new := subscriber.poll(0.5):
            received += new
    assert [isinstance(one, CacheUnknown) for one in received] == [False, True, False, False]
    served.publisher.shutdown()


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="expected endpoints to connect to"):
        ZmqEventSubscriber("nowhere")
