"""A router in a process of its own: follows one publisher, and says what it knows for every line on its input.

    python -m tests.events.router_process ENDPOINT REPLAY_ENDPOINT

A line is a prompt's block hashes as hexadecimal digests; the answer is JSON: its leading blocks that the publisher has,
how many blocks it has in all, and how often its cache became unknown.
"""

from __future__ import annotations

import json
import sys

from kvjax.events import CacheUnknown, ZmqEventSubscriber
from kvjax.routing import PrefixIndex

QUIET_S = 0.3  # without a message for so long, all that was published has come


def main(endpoint: str, replay_endpoint: str) -> None:
    index, num_unknown = PrefixIndex(1), 0
    with ZmqEventSubscriber(endpoint, replay_endpoint) as subscriber:
        print("ready", flush=True)
        for line in sys.stdin:
            while received := subscriber.poll(QUIET_S):
                for one in received:
                    if isinstance(one, CacheUnknown):
                        num_unknown += 1
                        index.forget(0)
                    else:
                        index.apply(0, one.events)
            hashes = [bytes.fromhex(digest) for digest in line.split()]
            answer = {"matched": index.match(hashes)[0], "blocks": index.num_blocks(0), "unknown": num_unknown}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
