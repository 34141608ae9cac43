"""A first long prompt among short ones costs memory for what it holds, and none for good."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvjax.core import KVCacheConfig, KVCacheManager, Request, SlidingWindowSpec

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads the resident set from /proc")

CODE = """
import ctypes
import numpy as np
from kvjax.core import FullAttentionSpec, KVCacheConfig, KVCacheManager, Request, SlidingWindowSpec

HEADS = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
FULL, SLIDING = FullAttentionSpec(**HEADS), SlidingWindowSpec(sliding_window=1_024, **HEADS)
LONG, CHUNK = 1_000_000, 8_192

def tell():
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: 0)(0)  # free memory of the heap does not count
    pages = int(open("/proc/self/statm").read().split()[1])
    print(pages * 4 / 1024)  # MiB

manager = KVCacheManager(KVCacheConfig.single_pool(130_000, FULL, *[SLIDING] * 5), 1 << 20, 16, max_num_reqs=256)
for _ in range(2):  # touches the pool's own arrays
    manager.block_pool.free_blocks(manager.block_pool.get_new_blocks(90_000))
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


def test_first_blocks_stay_where_memory_behind_a_window_is_returned() -> None:
    """Of a row longer than what is returned at once; the blocks in use are those at the start and in the window."""
    spec = SlidingWindowSpec(
        block_size=1, sliding_window=9, num_sink_tokens=2, num_kv_heads=1, head_size=8, dtype="float32"
    )
    manager = KVCacheManager(KVCacheConfig.single_pool(9_000, spec), 40_000, 1, max_num_reqs=16)
    request = Request("r", np.arange(40_000))
    while request.num_computed_tokens < 40_000:
        assert manager.allocate_slots(request, 8_000) is not None
        request.num_computed_tokens += 8_000
    held = np.flatnonzero(manager.get_block_ids("r")[0])
    assert held[:3].tolist() == [0, 1, 32_000 - 8]
    manager.check_invariants()
    manager.free(request)
    assert manager.block_pool.num_free_blocks == 9_000 - 1
