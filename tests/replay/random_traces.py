"""Small random traces whose prompts share prefixes, cut anywhere."""

from __future__ import annotations

import numpy as np

from kvjax.replay import TraceRequest


def random_trace(
    seed: int, num_requests: int, max_blocks: int = 6, max_output: int = 0, hash_block_size: int = 512
) -> list[TraceRequest]:
    """Prompts are walks down a random tree of trace blocks, each node with a hash id of its own."""
    rng = np.random.default_rng(seed)
    children: dict[tuple[int, ...], list[int]] = {}
    requests: list[TraceRequest] = []
    next_id, time_ms = 0, 0
    for _ in range(num_requests):
        path: tuple[int, ...] = ()
        for _ in range(rng.integers(1, max_blocks + 1)):
            known = children.setdefault(path, [])
            if not known or rng.random() < 0.3:
                known.append(next_id)
                next_id += 1
            path = (*path, int(rng.choice(known)))
        length = hash_block_size * (len(path) - 1) + int(rng.integers(1, hash_block_size + 1))
        time_ms += int(rng.exponential(50))
        requests.append(TraceRequest(time_ms, length, int(rng.integers(0, max_output + 1)), path, hash_block_size))
    return requests
