"""A router in a process of its own: follows one publisher, and says what it knows for every line on its input.

    python -m tests.events.sockets.router_process ENDPOINT REPLAY_ENDPOINT

A line is a prompt's block hashes as hexadecimal digests. The answer is JSON: tokens of it that the publisher has, all
blocks that it has, how often its cache became unknown, and whether all of it is known.
"""

from __future__ import annotations

import json
import sys

from kvjax.core import Request
from kvjax.events import CacheUnknown, ZmqEventSubscriber
from kvjax.routing import PrefixIndex
from tests.events.workload import FULL, HASH_BLOCK_SIZE, MAX_MODEL_LEN, make_manager

QUIET_S = 0.3  # without a message for so long, all that was published has come


def main(endpoint: str, replay_endpoint: str) -> None:
    index = PrefixIndex(1, make_manager(FULL, 2).kv_cache_config, MAX_MODEL_LEN, HASH_BLOCK_SIZE)
    num_unknown = 0
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
            prompt = Request("asked", [0] * (len(hashes) * HASH_BLOCK_SIZE + 1), block_hashes=hashes)
            answer = {
                "matched": index.match(prompt)[0],
                "blocks": index.num_blocks(0),
                "unknown": num_unknown,
                "knows_all": index.knows_all(0),
            }
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
