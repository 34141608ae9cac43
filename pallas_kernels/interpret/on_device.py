"""Runs a function on a device that is not the default one: tests compute what they expect on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np


def call_on(device: jax.Device, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, jitted for `device`: arguments are copied there, results come back as numpy arrays."""
    compiled = jax.jit(function)

    def call(*arguments: Any) -> Any:
        with jax.default_device(device):  # kernels ask what chip they are compiled for
            return jax.tree.map(np.asarray, compiled(*jax.device_put(arguments, device)))

    return call
