"""Settings of every test: CPU devices, one compilation cache for all workers, hypothesis profiles."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import hypothesis

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(tempfile.gettempdir()) / f"kvjax-jax-cache-{os.getuid()}"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

hypothesis.settings.register_profile("default", deadline=None, max_examples=100)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=2_000, stateful_step_count=200)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
