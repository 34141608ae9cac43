"""A first long prompt among short ones costs memory for what it holds, and none for good."""

from __future__ import annotations

import subprocess
import sys

import pytest

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")

CODE = """
import numpy as np
from kvjax.core import FullAttentionSpec, KVCacheConfig, KVCacheManager, Request, SlidingWindowSpec

HEADS = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
FULL, SLIDING = FullAttentionSpec(**HEADS), SlidingWindowSpec(sliding_window=1_024, **HEADS)
LONG, CHUNK = 1_000_000, 8_192

def tell():
    pages = int(open("/proc/self/statm").read().split()[1])
    print(pages * 4 / 1024)  # MiB

manager = KVCacheManager(KVCacheConfig.single_pool(130_000, FULL, *[SLIDING] * 5), 1 << 20, 16, max_num_reqs=256)
manager.block_pool.get_new_blocks(90_000)  # touches the pool's own arrays
manager.block_pool.free_blocks(np.arange(1, 90_001))
requests = [Request(f"r{i}", np.arange(500)) for i in range(200)]
long = Request("long", np.arange(LONG, dtype=np.int32))
rows = []
for request in requests:
    assert manager.allocate_slots(request, 500) is not None
tell()
while long.num_computed_tokens < LONG:
    num_new = min(CHUNK, LONG - long.num_computed_tokens)
    assert manager.allocate_slots(long, num_new) is not None
    long.num_computed_tokens += num_new
    if long.num_computed_tokens == CHUNK:
        tell()
tell()
manager.free(long)
tell()
"""


@needs_linux
def test_memory_of_a_long_prompt() -> None:
    """Tokens take 4 MB, the full group's table 0.25 MB; each window keeps a stretch of 64 KiB and what it sees."""
    command = [sys.executable, "-c", CODE]
    out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout
    before, first_chunk, computed, freed = map(float, out.split())
    assert first_chunk - before < 5
    assert computed - before < 6
    assert freed - before < 1.5
