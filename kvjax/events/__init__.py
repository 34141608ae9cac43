"""KV events for routers: vLLM's batches over ZeroMQ, with replay. Needs `kvjax[events]` once something is published.

Flow:    KVCacheManager.take_events -> [kvjax.events] -> Dynamo, llm-d and other consumers of vLLM's events, or
         a publisher of such events -> [ZmqEventSubscriber] -> kvjax.routing
"""

from kvjax.events.config import KVEventsConfig
from kvjax.events.encoding import EventDecoder, EventEncoder, low_64_bits
from kvjax.events.factory import make_event_publisher
from kvjax.events.publisher import EventPublisher, NullEventPublisher
from kvjax.events.zmq_publisher import ZmqEventPublisher
from kvjax.events.zmq_subscriber import CacheUnknown, ZmqEventSubscriber

__all__ = [
    "CacheUnknown",
    "EventDecoder",
    "EventEncoder",
    "EventPublisher",
    "KVEventsConfig",
    "NullEventPublisher",
    "ZmqEventPublisher",
    "ZmqEventSubscriber",
    "low_64_bits",
    "make_event_publisher",
]
