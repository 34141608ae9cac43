"""The publisher of KV events that a config names.

Flow:    KVEventsConfig -> [make_event_publisher] -> EventPublisher
Source:  vLLM 0.33 distributed/kv_events.py (EventPublisherFactory)

A server publishes once per step, after it planned the step:

    manager = KVCacheManager(config, max_model_len, hash_block_size, enable_kv_cache_events=True)
    with make_event_publisher(KVEventsConfig(replay_endpoint="tcp://*:5657", topic="kv@pod-0@llama")) as publisher:
        while serving:
            ...  # allocate_slots, plan_step, free
            publisher.publish(manager.take_events())
"""

from __future__ import annotations

from kvjax.events.config import KVEventsConfig
from kvjax.events.publisher import EventPublisher, NullEventPublisher
from kvjax.events.zmq_publisher import ZmqEventPublisher


def make_event_publisher(config: KVEventsConfig | None, data_parallel_rank: int = 0) -> EventPublisher:
    """The publisher of one data-parallel rank; None: one that drops all events.

    Raises:
        ValueError: the rank is negative, or its port exceeds 65535.
        MissingExtraError: pyzmq or msgspec is not installed.
        OSError: an address cannot be bound or connected to.
    """
    if data_parallel_rank < 0:
        raise ValueError(f"expected data_parallel_rank >= 0, got {data_parallel_rank}")
    if config is None or config.publisher == "null":
        return NullEventPublisher()
    return ZmqEventPublisher(config, data_parallel_rank)
