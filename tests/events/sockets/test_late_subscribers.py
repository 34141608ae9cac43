"""Subscribers that come late, of this publisher and of older ones; and what hostile peers cannot do."""

from __future__ import annotations

import logging
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from kvjax.core import BlockStored
from kvjax.events import (
    CacheUnknown,
    EventEncoder,
    KVEventsConfig,
    ZmqEventPublisher,
    ZmqEventSubscriber,
    replay_answers,
    replay_client,
)
from kvjax.events import zmq_publisher as module
from kvjax.routing import PrefixIndex
from tests.events.sockets.subscriber import END, wait_until_sent
from tests.events.workload import FULL, HYBRID, Workload, check_hits, index_of, make_manager

LOOPBACK = "tcp://127.0.0.1:*"
SNAPSHOT = (-2).to_bytes(8, "big", signed=True)
PATIENCE_S = 60  # of a subscriber whose peer answers


def follow(subscriber: ZmqEventSubscriber, index: PrefixIndex, is_done: Callable[[], bool]) -> int:
    """Brings the index up to date; how often the cache was unknown."""
    num_unknown = 0
    while True:
        for one in subscriber.poll(0.01):
            if isinstance(one, CacheUnknown):
                num_unknown += 1
                index.forget(0)
            else:
                index.apply(0, one.events)
        if is_done():
            return num_unknown


def follow_all(subscriber: ZmqEventSubscriber, index: PrefixIndex, publisher: ZmqEventPublisher) -> int:
    """`follow` as far as the publisher has come."""
    wait_until_sent(publisher)
    return follow(subscriber, index, lambda: subscriber._next_seq == publisher._next_seq)


class Counting:
    """A subscriber's live socket that counts what is received."""

    def __init__(self, subscriber: ZmqEventSubscriber) -> None:
        self.socket, self.num_received = subscriber._live, 0
        subscriber._live = self  # type: ignore[assignment]

    def poll(self, timeout_ms: int) -> int:
        return self.socket.poll(timeout_ms)

    def recv_multipart(self) -> list[bytes]:
        self.num_received += 1
        return self.socket.recv_multipart()


def publisher_of(rank: int = 0, **options: object) -> ZmqEventPublisher:
    config = KVEventsConfig(**{"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, "buffer_steps": 2, **options})
    return ZmqEventPublisher(config, rank)


def subscriber_of(publisher: ZmqEventPublisher | OlderPublisher, event_form: str = "map") -> ZmqEventSubscriber:
    return ZmqEventSubscriber(
        publisher.endpoint, publisher.replay_endpoint, event_form=event_form, replay_timeout_s=PATIENCE_S
    )


def publish(publisher: ZmqEventPublisher, work: Workload, num_steps: int) -> None:
    for _ in range(num_steps):
        work.step()
        publisher.publish(work.manager.take_events())


def until_heard(subscriber: ZmqEventSubscriber, publish_one: Callable[[], None]) -> None:
    """Publishes until a batch arrives: a subscription takes effect some time after it was made."""
    while not subscriber._live.poll(10):
        publish_one()


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("groups", [FULL, HYBRID], ids=["full", "hybrid"])
def test_a_late_router_knows_an_idle_replica(groups: tuple, rank: int) -> None:
    """Nothing is published any more, and the kept batches are far from all."""
    work = Workload(make_manager(groups, 30), rank)
    with publisher_of(rank) as publisher:
        publish(publisher, work, 80)
        wait_until_sent(publisher)
        for event_form in ("map", "array"):
            index = index_of(work.manager)
            with ZmqEventSubscriber(publisher.endpoint, publisher.replay_endpoint, event_form=event_form) as subscriber:
                first, *_ = received = subscriber.poll()
                assert first.events[0].__struct_config__.tag == "AllBlocksCleared"
                assert {batch.data_parallel_rank for batch in received} == {rank}
                for batch in received:
                    index.apply(0, batch.events)
                assert index.knows_all(0)
                check_hits(index, work)


def test_routers_that_come_and_go_while_a_replica_works() -> None:
    """Whatever they come to hear live, in the snapshot or both, they end with what the replica has."""
    work = Workload(make_manager(HYBRID, 30), 5)
    with publisher_of() as publisher:
        for _ in range(6):
            publish(publisher, work, 10)
            index = index_of(work.manager)
            with subscriber_of(publisher) as subscriber:
                follow(subscriber, index, lambda: True)  # a snapshot
                until_heard(subscriber, lambda: publish(publisher, work, 1))
                for _ in range(10):
                    publish(publisher, work, 3)
                    assert not follow(subscriber, index, lambda: True)
                publish(publisher, work, 10)
                assert not follow_all(subscriber, index, publisher)
                assert index.knows_all(0)
                check_hits(index, work)


class OlderPublisher:
    """vLLM's before 0.26 and after: replays what it keeps, in 3 frames or 4, and has no snapshots."""

    def __init__(self, num_frames: int, event_form: str) -> None:
        self.context = zmq.Context()
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        self.endpoint, self.replay_endpoint = (
            f"tcp://127.0.0.1:{one.bind_to_random_port('tcp://127.0.0.1')}" for one in (self.pub, self.router)
        )
        self.encoder, self.num_frames, self.kept = EventEncoder(event_form), num_frames, []
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()

    def publish(self, events: list, is_lost: bool = False) -> None:
        self.kept.append(self.encoder.encode(events, 0.0))
        if not is_lost:
            self.pub.send_multipart((b"", (len(self.kept) - 1).to_bytes(8, "big"), self.kept[-1]))

    def _answer(self) -> None:
        while not self.stopped.is_set():
            if self.router.poll(10):
                client, _, number = self.router.recv_multipart()
                topic = [b""] * (self.num_frames - 3)
                for seq in range(min(int.from_bytes(number, "big"), len(self.kept)), len(self.kept)):
                    self.router.send_multipart((client, b"", *topic, seq.to_bytes(8, "big"), self.kept[seq]))
                self.router.send_multipart((client, b"", *topic, END, b""))

    def close(self) -> None:
        self.stopped.set()
        self.thread.join()
        self.context.destroy(linger=0)


@contextmanager
def older_publisher(num_frames: int, event_form: str) -> Iterator[OlderPublisher]:
    one = OlderPublisher(num_frames, event_form)
    try:
        yield one
    finally:
        one.close()


@pytest.mark.parametrize("event_form", ["map", "array"])
@pytest.mark.parametrize("num_frames", [3, 4])
def test_replays_of_older_publishers_are_taken(num_frames: int, event_form: str) -> None:
    """A router that comes late knows all at once, and again after it lost a third of what follows."""
    work = Workload(make_manager(FULL, 30), 7)
    index = index_of(work.manager)
    with older_publisher(num_frames, event_form) as publisher:
        for _ in range(20):
            work.step()
            publisher.publish(work.manager.take_events())
        with subscriber_of(publisher) as subscriber:
            assert not follow(subscriber, index, lambda: True)
            assert index.knows_all(0)
            check_hits(index, work)
            until_heard(subscriber, lambda: publisher.publish([]))
            for step in range(30):
                work.step()
                publisher.publish(work.manager.take_events(), is_lost=step % 3 == 1)
            publisher.publish([])
            assert not follow(subscriber, index, lambda: subscriber._next_seq == len(publisher.kept))
            assert index.knows_all(0)
            check_hits(index, work)


# -- malformed messages


def test_an_answer_without_an_end_is_none() -> None:
    """A peer that answers for ever: the subscriber goes on, and says that the cache is unknown."""
    stopped = threading.Event()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
        router.linger = 0

        def answer() -> None:
            client = None
            while not stopped.is_set():
                if client is not None:
                    router.send_multipart((client, b"", b"", bytes(8), b""))
                elif router.poll(10):
                    client = router.recv_multipart()[0]

        answering = threading.Thread(target=answer)
        answering.start()
        try:
            with ZmqEventSubscriber("inproc://nobody", address, replay_timeout_s=0.05) as subscriber:
                assert [type(one) for one in subscriber.poll()] == [CacheUnknown]
        finally:
            stopped.set()
            answering.join()


def unreadable(rng: random.Random, number: int) -> list[bytes]:
    """Frames that are no batch: too few or many, numbers of other lengths, payloads that cannot be read."""
    payload = rng.choice([b"", b"\xc1", rng.randbytes(rng.randint(0, 3)) + b"\xc1", msgspec.msgpack.encode([0.0])])
    seq = number if rng.random() < 0.7 else rng.choice([0, number + rng.randint(0, 9), rng.getrandbits(64), 2**64 - 1])
    frames = [b"", seq.to_bytes(8, "big"), payload]
    shape = rng.random()
    if shape < 0.1:
        return [rng.randbytes(rng.randint(0, 9)) for _ in range(rng.choice([1, 2, 4, 7]))]
    if shape < 0.2:
        frames[1] = rng.randbytes(rng.choice([0, 1, 7, 9]))
    return frames


@pytest.mark.parametrize("has_replay", [False, True])
def test_malformed_live_messages_are_noticed(has_replay: bool, caplog: pytest.LogCaptureFixture) -> None:
    """1,000 of them among true batches: nothing is raised, and the index is right or says that it does not know all."""
    rng, work = random.Random(1), Workload(make_manager(HYBRID, 30), 8)
    index, num_right, number = index_of(work.manager), 0, 0
    with publisher_of() as publisher, zmq.Context() as context, context.socket(zmq.XPUB) as forger:
        forger.set_hwm(0)
        endpoint = f"tcp://127.0.0.1:{forger.bind_to_random_port('tcp://127.0.0.1')}"
        replay_endpoint = publisher.replay_endpoint if has_replay else None
        with ZmqEventSubscriber(endpoint, replay_endpoint, replay_timeout_s=PATIENCE_S) as subscriber:
            live, num_sent = Counting(subscriber), 0
            assert forger.poll(60_000)
            forger.recv()  # the subscription
            for step in range(1_200):
                frames = unreadable(rng, number)
                if step % 6 == 0:
                    work._reset() if step % 300 == 0 else work.step()  # all is told again
                    events = work.manager.take_events()
                    publisher.publish(events)
                    frames = [b"", number.to_bytes(8, "big"), EventEncoder().encode(events, 0.0, 0)]
                    number += bool(events)
                if step % 6 or events:
                    forger.send_multipart(frames)
                    num_sent += 1
                if step % 20 == 0:
                    wait_until_sent(publisher)
                    follow(subscriber, index, lambda: live.num_received == num_sent)  # noqa: B023
                    if index.knows_all(0):
                        check_hits(index, work, 3)
                        num_right += 1
    assert num_right >= (50 if has_replay else 3)
    assert len({record.msg for record in caplog.records}) == len(caplog.records) == 2  # each kind is said once


def test_malformed_requests_change_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    """1,000 of them from several peers, among them frames that are too long, for which ZeroMQ drops the peer."""
    rng, work = random.Random(2), Workload(make_manager(FULL, 30), 9)
    with publisher_of() as publisher, zmq.Context() as context:
        publish(publisher, work, 40)
        peers = [context.socket(zmq.DEALER) for _ in range(5)]
        for peer in peers:
            peer.linger = 0
            peer.connect(publisher.replay_endpoint)
        for number in range(1_000):
            frames = [rng.randbytes(rng.choice([0, 1, 7, 8, 9, 200])) for _ in range(rng.randint(1, 5))]
            if number % 200 == 199:
                frames = [b"", bytes(module.MOST_REQUEST_BYTES + 1)]
            rng.choice(peers).send_multipart(frames)
            if number % 100 == 0:
                publish(publisher, work, 1)
        index = index_of(work.manager)
        wait_until_sent(publisher)
        with subscriber_of(publisher) as subscriber:
            assert not follow(subscriber, index, lambda: True)
        check_hits(index, work)
        for peer in peers:
            peer.close()
        assert publisher._thread.is_alive()
    assert caplog.text.count("expected a replay request") == 1


def test_who_asks_and_does_not_read_costs_a_queue(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """60 requests for 1,200 batches are unread: few messages are queued, then it is cut off. Others get theirs."""
    monkeypatch.setattr(replay_answers, "MOST_QUEUED", 20)
    monkeypatch.setattr(replay_answers, "PATIENCE_S", 0.5)
    caplog.set_level(logging.INFO)
    work = Workload(make_manager(FULL, 200), 10)
    with publisher_of(buffer_steps=4_000) as publisher, zmq.Context() as context, context.socket(zmq.DEALER) as greedy:
        publish(publisher, work, 1_200)
        wait_until_sent(publisher)
        greedy.linger, greedy.rcvhwm, greedy.rcvbuf = 0, 1, 1_024
        greedy.connect(publisher.replay_endpoint)
        for number in range(60):
            greedy.send_multipart((b"", bytes(8) if number % 2 else SNAPSHOT))
        index = index_of(work.manager)
        with subscriber_of(publisher) as subscriber:
            assert not follow(subscriber, index, lambda: True)
        check_hits(index, work)
        while "is cut off" not in caplog.text:  # here, or by TCP before
            time.sleep(0.01)
        assert "a request for a replay is dropped, too many wait" in caplog.text


def test_many_who_do_not_read_leave_room_for_one_who_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_answers, "MOST_QUEUED", 20)
    monkeypatch.setattr(replay_answers, "MOST_CLIENTS", 4)
    monkeypatch.setattr(replay_answers, "PATIENCE_S", 0.5)
    work = Workload(make_manager(FULL, 200), 10)
    with publisher_of(buffer_steps=4_000) as publisher, zmq.Context() as context:
        publish(publisher, work, 1_200)
        wait_until_sent(publisher)
        greedy_ones = [context.socket(zmq.DEALER) for _ in range(8)]
        for greedy in greedy_ones:
            greedy.linger, greedy.rcvhwm, greedy.rcvbuf = 0, 1, 1_024
            greedy.connect(publisher.replay_endpoint)
            greedy.send_multipart((b"", bytes(8)))
        while not publisher._answers._clients:
            time.sleep(0.001)
        index = index_of(work.manager)
        with subscriber_of(publisher) as subscriber:
            subscriber._replay._timeout_ms = 100
            follow(subscriber, index, lambda: index.knows_all(0))
        check_hits(index, work)
        for greedy in greedy_ones:
            greedy.close()


@pytest.mark.parametrize(
    ("fields", "said"),
    [({"token_ids": ("one",)}, "is not known any more"), ({"extra_keys": ((object(),),)}, "cannot be encoded, and is")],
)
def test_a_snapshot_that_cannot_be_told_is_none(fields: dict, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """The subscriber says that the cache is unknown; the publisher goes on."""
    work = Workload(make_manager(FULL, 30), 11)
    strange = BlockStored(
        **{"block_hashes": (bytes(32),), "parent_block_hash": None, "token_ids": (1,), **fields, "block_size": 1}
    )
    with publisher_of() as publisher:
        publish(publisher, work, 20)
        publisher.publish([strange])
        wait_until_sent(publisher)
        with subscriber_of(publisher) as subscriber:
            assert isinstance(subscriber.poll()[0], CacheUnknown)
        assert said in caplog.text
        assert publisher._thread.is_alive()


@pytest.mark.parametrize("seq", [30_000_000, 2**64 - 2, 2**64 - 1])
@pytest.mark.parametrize("has_replay", [False, True])
def test_a_number_far_ahead_costs_no_memory(seq: int, has_replay: bool) -> None:
    """As after a publisher that counts otherwise: what was missed is lost, and told."""
    with publisher_of() as publisher, zmq.Context() as context, context.socket(zmq.XPUB) as forger:
        endpoint = f"tcp://127.0.0.1:{forger.bind_to_random_port('tcp://127.0.0.1')}"
        with ZmqEventSubscriber(endpoint, publisher.replay_endpoint if has_replay else None) as subscriber:
            assert forger.poll(60_000)
            forger.recv()
            payload, received = EventEncoder().encode([], 0.0, 0), subscriber.poll()
            tracemalloc.start()
            for number in (0, seq, (seq + 1) % 2**64):
                forger.send_multipart([b"", number.to_bytes(8, "big"), payload])
                received += subscriber.poll(10.0)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
            tracemalloc.stop()
            assert any(isinstance(one, CacheUnknown) for one in received) != has_replay


def test_an_answer_without_bound_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a peer that sends on and on, in time and never to an end."""
    monkeypatch.setattr(replay_client, "MOST_BYTES", 1 << 16)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as peer:
        peer.linger = 0
        address = f"tcp://127.0.0.1:{peer.bind_to_random_port('tcp://127.0.0.1')}"
        client = replay_client.ReplayClient(context, zmq.DEALER, address, PATIENCE_S)
        answer: list[object] = []
        asking = threading.Thread(target=lambda: answer.append(client.ask(bytes(8))))
        asking.start()
        who = peer.recv_multipart()[0]
        for number in range(1_000):
            peer.send_multipart([who, b"", b"", number.to_bytes(8, "big"), bytes(100)])
        asking.join(30.0)
        client._socket.close(linger=0)
    assert answer == [None]
