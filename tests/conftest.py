"""Settings of every test: CPU devices, quick compilation and one cache of it, interrupts, hypothesis profiles."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import hypothesis
import pytest

from tests import sweep_slice

# Where there is a TPU or an NVIDIA GPU, the tests of its kernels run on it (pallas_kernels/interpret);
# the CPU stays the default. A TPU is held by one process: this one, if it runs tests itself, never a child of it.
HAS_TPU = importlib.util.find_spec("libtpu") is not None and (
    any(Path("/dev").glob("accel*")) or Path("/dev/vfio/0").exists()
)
HAS_GPU = Path("/dev/nvidiactl").exists() and importlib.util.find_spec("jax_plugins") is not None
if HAS_GPU:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # two processes share it
# Tests compile much and run little of it: on a CPU XLA leaves most optimizations out, in the processes of tests too.
QUICK_COMPILATION = "JAX_DISABLE_MOST_OPTIMIZATIONS"
if not (HAS_TPU or HAS_GPU):
    os.environ.setdefault(QUICK_COMPILATION, "1")
if "JAX_PLATFORMS" not in os.environ:
    os.environ["JAX_PLATFORMS"] = ",".join(["cpu", *["cuda"] * HAS_GPU])
    if HAS_TPU:
        import jax

        jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"] + ",tpu")
# The interpreter of GPU kernels runs each warpgroup as a program of its own, which blocks one of XLA's threads: XLA
# needs more threads than a kernel has warpgroups, and reads their number here.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"kvjax-jax-cache-{os.getuid()}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

# A shell's background jobs ignore interrupts, and so would the programs that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("default", deadline=None, max_examples=100)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2_000, stateful_step_count=200)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# Tests of many long cases run a few of them, evenly spread; the others are sweeps (scripts/quick_cases.py).
KEPT_CASES: dict[str, int] = json.loads((Path(__file__).parent / "quick_cases.json").read_text())


def pytest_addoption(parser: pytest.Parser) -> None:
    """Those of the sweep."""
    sweep_slice.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Small caches may never hit; only tests of the warning look at it."""
    config.addinivalue_line("filterwarnings", "ignore::kvjax.errors.NeverHitsWarning")
    seed = config.getoption("--sweep-slice")
    if seed is not None:
        config.pluginmanager.register(sweep_slice.SweepSlice(seed, config.getoption("--sweep-seconds")))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the cases that are left out as sweeps. A case that is named alone runs."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sweep") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for test, found in cases.items():
        count = KEPT_CASES.get(test, len(found)) or len(items) == 1
        kept = {i * len(found) // count for i in range(min(count, len(found)))}
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.sweep)


# Every compiled program takes some maps of memory, of which Linux gives a process 65,530 (vm.max_map_count).
MOST_MAPS = 25_000
_tests = count(1)


def pytest_runtest_teardown() -> None:
    """Lets jax forget its programs before there are too many; what a later test needs of them is compiled again."""
    maps = Path("/proc/self/maps")
    if next(_tests) % 25 or "jax" not in sys.modules or not maps.exists():
        return
    if maps.read_bytes().count(b"\n") > MOST_MAPS:
        sys.modules["jax"].clear_caches()


@pytest.fixture
def full_optimization(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """XLA optimizes as it does for users, here and in processes that are started: for tests of what it makes."""
    import jax

    quick = os.environ.get(QUICK_COMPILATION) == "1"
    monkeypatch.delenv(QUICK_COMPILATION, raising=False)
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", quick)
