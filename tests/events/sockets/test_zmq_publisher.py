"""The publisher's frames, replay, bounds and end, over loopback and inproc."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import pytest
import zmq

from kvjax.core import AllBlocksCleared, BlockRemoved, BlockStored, KVCacheEvent
from kvjax.events import (
    EventDecoder,
    EventEncoder,
    KVEventsConfig,
    NullEventPublisher,
    ZmqEventPublisher,
    make_event_publisher,
    zmq_publisher,
)
from kvjax.events.replay_buffer import ReplayBuffer
from tests.events.sockets.subscriber import END, TIMEOUT_MS, Subscriber, wait_until_sent

LOOPBACK = "tcp://127.0.0.1:*"


def event(number: int) -> KVCacheEvent:
    return BlockRemoved((number.to_bytes(32, "big"),))


def numbers(payload: bytes) -> list[int]:
    return [h for told in EventDecoder().decode(payload).events for h in told.block_hashes]


def publisher_of(**options) -> ZmqEventPublisher:
    rank = options.pop("data_parallel_rank", 0)
    return ZmqEventPublisher(KVEventsConfig(**{"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, **options}), rank)


def subscriber_of(publisher: ZmqEventPublisher, apply: Callable[[bytes], None] = id, **options) -> Subscriber:
    return Subscriber(publisher.endpoint, publisher.replay_endpoint, apply, **options)


def publish_until_heard(publisher: ZmqEventPublisher, subscriber: Subscriber) -> list[bytes]:
    """Frames of the first batch that arrives: a subscription takes effect some time after it was made."""
    publisher.publish([event(0)])
    while not (frames := subscriber.receive(10)):
        publisher.publish([event(0)])
    return frames


def wait_for(publisher: ZmqEventPublisher, condition: Callable[[], bool]) -> None:
    """Waits for a change of the publisher's queue or state."""
    with publisher._changed:
        publisher._changed.wait_for(condition)


# -- frames


def test_frames_are_topic_number_payload() -> None:
    config = KVEventsConfig(endpoint=LOOPBACK, topic="kv@pod-0@llama")
    with ZmqEventPublisher(config, clock=lambda: 1.5) as publisher, subscriber_of(publisher, topic="kv@") as subscriber:
        topic, number, payload = publish_until_heard(publisher, subscriber)
        assert topic == b"kv@pod-0@llama"
        assert len(number) == 8
        first = EventEncoder().encode([event(0)], 1.5, 0)
        assert payload == first
        publisher.publish([event(1), AllBlocksCleared()])
        while payload == first:
            _, following, payload = subscriber.receive(TIMEOUT_MS)
        assert int.from_bytes(following, "big") > int.from_bytes(number, "big")
        assert payload == EventEncoder().encode([event(1), AllBlocksCleared()], 1.5, 0)
        assert publisher.replay_endpoint is None


def test_other_topics_are_not_heard() -> None:
    with publisher_of(topic="a") as publisher, subscriber_of(publisher, topic="b") as other:
        with subscriber_of(publisher, topic="a") as subscriber:
            publish_until_heard(publisher, subscriber)
        assert other.receive(20) is None


def test_the_rank_and_form_of_a_config_are_told() -> None:
    options = {"event_form": "array", "int_block_hashes": False, "data_parallel_rank": 3}
    with publisher_of(**options) as publisher, subscriber_of(publisher) as subscriber:
        publisher.publish([event(1)])
        ((_, seq, payload),) = answers_of(publisher, subscriber)
    batch = EventDecoder("array").decode(payload)
    assert (seq, batch.data_parallel_rank, batch.events[0].block_hashes) == (0, 3, [(1).to_bytes(32, "big")])
    assert abs(batch.ts - time.time()) < 60


def answers_of(publisher: ZmqEventPublisher, subscriber: Subscriber) -> list[tuple[bytes, int, bytes]]:
    """What is replayed of all that was published."""
    wait_until_sent(publisher)
    return subscriber.ask(0)


def test_no_events_are_no_batch() -> None:
    with publisher_of() as publisher, subscriber_of(publisher) as subscriber:
        publisher.publish([])
        publisher.publish([event(1)])
        ((_, seq, payload),) = answers_of(publisher, subscriber)
        assert (seq, numbers(payload)) == (0, [1])


def test_an_address_to_connect_to() -> None:
    """The router listens, the engines come: what is published before is lost to the live stream."""
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe("")
        router.rcvtimeo = TIMEOUT_MS
        port = router.bind_to_random_port("tcp://127.0.0.1")
        address = f"tcp://127.0.0.1:{port}"
        with ZmqEventPublisher(KVEventsConfig(endpoint=address)) as publisher:
            assert publisher.endpoint == address
            while not router.poll(5):
                publisher.publish([event(4)])
            assert numbers(router.recv_multipart()[2]) == [4]


def test_an_inproc_address_in_a_shared_context() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        config = KVEventsConfig(endpoint="inproc://events")
        publisher = ZmqEventPublisher(config, 2, context=context)
        assert publisher.endpoint == "inproc://events_dp2"
        router.subscribe("")
        router.connect(publisher.endpoint)
        while not router.poll(5):
            publisher.publish([event(4)])
        publisher.shutdown()
        assert not context.closed


# -- replay


def test_replay_answers_as_the_live_stream_and_ends_with_a_marker() -> None:
    with publisher_of(topic="kv") as publisher, subscriber_of(publisher) as subscriber:
        for number in range(6):
            publisher.publish([event(number)])
        answers = answers_of(publisher, subscriber)
        assert [(topic, seq, numbers(payload)) for topic, seq, payload in answers] == [
            (b"kv", number, [number]) for number in range(6)
        ]
        assert [seq for _, seq, _ in subscriber.ask(4)] == [4, 5]
        assert subscriber.ask(6) == []
        assert subscriber.ask(int.from_bytes(END, "big")) == []


def test_the_buffer_keeps_the_latest() -> None:
    with publisher_of(buffer_steps=3) as publisher, subscriber_of(publisher) as subscriber:
        for number in range(8):
            publisher.publish([event(number)])
        assert [seq for _, seq, _ in answers_of(publisher, subscriber)] == [5, 6, 7]


def test_a_long_replay_loses_nothing() -> None:
    """More messages than ZeroMQ queues for one peer by default (1,000 on either side)."""
    with publisher_of() as publisher, subscriber_of(publisher) as subscriber:
        for number in range(5_000):
            publisher.publish([event(number)])
        assert [seq for _, seq, _ in answers_of(publisher, subscriber)] == list(range(5_000))


def test_a_subscriber_that_misses_messages_catches_up() -> None:
    taken: list[int] = []
    options = {"lose": lambda seq: seq % 7 in (2, 3)}
    with (
        publisher_of() as publisher,
        subscriber_of(publisher, lambda payload: taken.extend(numbers(payload)), **options) as subscriber,
    ):
        publish_until_heard(publisher, subscriber)
        for number in range(1, 200):
            publisher.publish([event(number)])
            subscriber.poll(TIMEOUT_MS)
        assert subscriber.num_replayed > 50
        wait_until_sent(publisher)
        subscriber.catch_up()
    assert [number for number in taken if number] == list(range(1, 200))


def test_a_late_subscriber_asks_for_all() -> None:
    taken: list[int] = []
    with publisher_of() as publisher:
        for number in range(50):
            publisher.publish([event(number)])
        with subscriber_of(publisher, lambda payload: taken.extend(numbers(payload))) as subscriber:
            wait_until_sent(publisher)
            subscriber.catch_up()
    assert taken == list(range(50))


def test_malformed_requests_are_not_answered_and_harm_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with publisher_of() as publisher, subscriber_of(publisher) as subscriber:
        publisher.publish([event(1)])
        for frames in ([b"12345678"], [b"", b"short"], [b"x", b"12345678"], [b"", b"", b"12345678"]):
            subscriber._replay.send_multipart(frames)
        assert len(answers_of(publisher, subscriber)) == 1
    refused = [record for record in caplog.records if "expected a replay request" in record.getMessage()]
    assert len(refused) == 1  # is said once


def test_a_batch_that_cannot_be_encoded_leaves_a_gap(caplog: pytest.LogCaptureFixture) -> None:
    strange = BlockStored((bytes(32),), None, (1,), 1, extra_keys=((object(),),))
    with publisher_of() as publisher, subscriber_of(publisher) as subscriber:
        for told in (event(0), strange, event(2)):
            publisher.publish([told])
        assert [(seq, numbers(payload)) for _, seq, payload in answers_of(publisher, subscriber)] == [
            (0, [0]),
            (2, [2]),
        ]
    assert "batch 1 cannot be encoded and is left out" in caplog.text


@pytest.mark.parametrize("capacity", [1, 4, 100])
def test_the_replay_buffer_is_the_end_of_the_list(capacity: int) -> None:
    buffer = ReplayBuffer(capacity)
    kept: list[tuple[int, bytes]] = []
    for seq in (0, 1, 2, 4, 5, 8, 9):
        buffer.append(seq, bytes([seq]))
        kept.append((seq, bytes([seq])))
        for start_seq in range(12):
            assert list(buffer.since(start_seq)) == [batch for batch in kept[-capacity:] if batch[0] >= start_seq]


# -- queue and end


def test_what_was_published_before_the_end_is_sent() -> None:
    publisher = publisher_of()
    with subscriber_of(publisher) as subscriber:
        publish_until_heard(publisher, subscriber)
        for number in range(1, 1_000):
            publisher.publish([event(number)])
        publisher.shutdown(timeout_s=10)
        heard: list[int] = []
        while not heard or heard[-1] < 999:
            heard += numbers(subscriber.receive(TIMEOUT_MS)[2])
    assert [number for number in heard if number] == list(range(1, 1_000))


def test_after_the_end_nothing_is_taken() -> None:
    publisher = publisher_of()
    publisher.shutdown()
    publisher.shutdown()
    with pytest.raises(RuntimeError, match="expected an open publisher of KV events, got one that is shut down"):
        publisher.publish([event(1)])
    assert not publisher._thread.is_alive()
    assert publisher._context.closed
    with publisher_of(endpoint=publisher.endpoint.replace("127.0.0.1", "*")):
        pass  # the port is free again


class SlowEncoder:
    """Encodes when it is let."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def encode(self, events, ts, rank) -> bytes:
        self.gate.wait()
        return EventEncoder().encode(events, ts, rank)


def test_a_full_queue_makes_publish_wait() -> None:
    with publisher_of(max_queue_size=2) as publisher, subscriber_of(publisher) as subscriber:
        publisher._encoder = slow = SlowEncoder()
        publisher.publish([event(0)])
        wait_for(publisher, lambda: not publisher._queue)  # the thread has it in hand
        publisher.publish([event(1)])
        publisher.publish([event(2)])
        waiting = threading.Thread(target=publisher.publish, args=([event(3)],))
        waiting.start()
        waiting.join(0.05)
        assert waiting.is_alive()
        slow.gate.set()
        waiting.join()
        assert [seq for _, seq, _ in answers_of(publisher, subscriber)] == [0, 1, 2, 3]


def test_a_waiting_publish_is_refused_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    publisher = publisher_of(max_queue_size=1)
    publisher._encoder = slow = SlowEncoder()
    publisher.publish([event(0)])
    wait_for(publisher, lambda: not publisher._queue)
    publisher.publish([event(1)])
    errors: list[RuntimeError] = []

    def publish() -> None:
        with pytest.raises(RuntimeError, match="shut down") as caught:
            publisher.publish([event(2)])
        errors.append(caught.value)

    def encode_after_the_end() -> None:
        wait_for(publisher, lambda: not publisher._is_open)
        slow.gate.set()

    threads = [threading.Thread(target=target) for target in (publish, encode_after_the_end)]
    for thread in threads:
        thread.start()
    with caplog.at_level(logging.WARNING):
        publisher.shutdown(timeout_s=0)
    for thread in threads:
        thread.join()
    assert len(errors) == 1
    assert "1 batches were not sent before the shutdown" in caplog.text


def test_publishing_from_several_threads() -> None:
    with publisher_of() as publisher, subscriber_of(publisher) as subscriber:
        threads = [
            threading.Thread(target=lambda i=i: [publisher.publish([event(i * 1_000 + k)]) for k in range(300)])
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        told = [numbers(payload)[0] for _, _, payload in answers_of(publisher, subscriber)]
    assert sorted(told) == [i * 1_000 + k for i in range(4) for k in range(300)]
    for i in range(4):
        mine = [number for number in told if number // 1_000 == i]
        assert mine == sorted(mine)


def test_a_terminated_context_ends_the_publisher(caplog: pytest.LogCaptureFixture) -> None:
    context = zmq.Context()
    publisher = ZmqEventPublisher(KVEventsConfig(endpoint=LOOPBACK), context=context)
    terminating = threading.Thread(target=context.term)
    terminating.start()
    wait_for(publisher, lambda: not publisher._is_open)
    with pytest.raises(RuntimeError, match="shut down"):
        publisher.publish([event(1)])
    publisher.shutdown()
    terminating.join()
    assert "was terminated before the publisher" in caplog.text


def test_a_taken_address_is_refused_and_leaves_nothing_open() -> None:
    with publisher_of() as publisher:
        address = publisher.endpoint.replace("127.0.0.1", "*")
        with pytest.raises(OSError, match=r"KV events cannot be published at tcp://\*:.*in use"):
            publisher_of(endpoint=address)
        with pytest.raises(OSError, match=r"KV events cannot be published at tcp://\*:.*in use"):
            publisher_of(replay_endpoint=address)


# -- choosing one


@pytest.mark.parametrize("config", [None, KVEventsConfig(publisher="null")])
def test_the_null_publisher_takes_all_and_does_nothing(config: KVEventsConfig | None) -> None:
    with make_event_publisher(config) as publisher:
        publisher.publish([event(1)])
    assert isinstance(publisher, NullEventPublisher)
    publisher.publish([event(2)])


def test_a_config_makes_its_publisher() -> None:
    with make_event_publisher(KVEventsConfig(endpoint=LOOPBACK), data_parallel_rank=1) as publisher:
        assert isinstance(publisher, ZmqEventPublisher)


def test_a_negative_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="expected data_parallel_rank >= 0, got -1"):
        make_event_publisher(None, -1)


def test_the_end_marker_is_minus_one() -> None:
    assert (-1).to_bytes(8, "big", signed=True) == zmq_publisher.END_OF_REPLAY
