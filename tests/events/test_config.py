"""Settings of KV events: vLLM's defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from kvjax.events import KVEventsConfig


def test_the_defaults_are_those_of_vllm() -> None:
    config = KVEventsConfig()
    assert (config.endpoint, config.replay_endpoint, config.topic) == ("tcp://*:5557", None, "")
    assert (config.buffer_steps, config.hwm, config.max_queue_size) == (10_000, 100_000, 100_000)
    assert (config.event_form, config.int_block_hashes) == ("map", True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"publisher": "kafka"}, "expected publisher of null, zmq, got 'kafka'"),
        ({"event_form": "json"}, "expected event_form of map, array, got 'json'"),
        ({"buffer_steps": 0}, "expected buffer_steps >= 1, got 0"),
        ({"hwm": 0}, "expected hwm >= 1, got 0"),
        ({"max_queue_size": -1}, "expected max_queue_size >= 1, got -1"),
        ({"endpoint": "localhost:5557"}, "^endpoint: expected tcp://host:port"),
        ({"endpoint": "udp://localhost:5557"}, "^endpoint: expected tcp://host:port"),
        ({"endpoint": "inproc://"}, "^endpoint: expected tcp://host:port"),
        ({"endpoint": "tcp://localhost"}, "^endpoint: expected a port below 65536"),
        ({"replay_endpoint": "tcp://*:65536"}, "^replay_endpoint: expected a port below 65536"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVEventsConfig(**options)
