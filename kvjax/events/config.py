"""Where and how KV events are published.

Flow:    a server's options -> [KVEventsConfig] -> make_event_publisher
Source:  vLLM 0.33 config/kv_events.py
"""

from __future__ import annotations

from dataclasses import dataclass

from kvjax.events.encoding import EVENT_FORMS
from kvjax.events.endpoints import check_endpoint

PUBLISHERS = ("null", "zmq")
SIZES = ("buffer_steps", "hwm", "max_queue_size")


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Names and defaults of vLLM's `--kv-events-config`, then the form of the messages."""

    publisher: str = "zmq"  # "null": events are dropped
    endpoint: str = "tcp://*:5557"  # bound if it has a wildcard or is ipc or inproc, otherwise connected to
    replay_endpoint: str | None = None  # always bound; None: no replay
    buffer_steps: int = 10_000  # latest batches kept for replay
    hwm: int = 100_000  # batches queued for a slow subscriber before ZeroMQ drops some
    max_queue_size: int = 100_000  # batches waiting for the publisher's thread before `publish` waits
    topic: str = ""  # llm-d expects "kv@<pod id>@<model>"
    event_form: str = "map"  # or "array", for consumers that read the older form of vLLM only
    int_block_hashes: bool = True  # the low 64 bits of a hash; False: the whole digest
    every_block: bool = False  # True, as vLLM: a hash is told with each block that holds it, not with first and last

    def __post_init__(self) -> None:
        if self.publisher not in PUBLISHERS:
            raise ValueError(f"expected publisher of {', '.join(PUBLISHERS)}, got {self.publisher!r}")
        if self.event_form not in EVENT_FORMS:
            raise ValueError(f"expected event_form of {', '.join(EVENT_FORMS)}, got {self.event_form!r}")
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)}")
        check_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            check_endpoint("replay_endpoint", self.replay_endpoint)
