"""The mark of tests that compile for TPU on a machine without one; CI installs libtpu (`scripts/setup.sh tpu-aot`)."""

from __future__ import annotations

import importlib.util

import pytest

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
