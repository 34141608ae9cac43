"""EasyDeL's cache update of version "v2" over converted steps: its slices of writes against kvjax's slots.

Flow:    AttendedStep, ragged_pages_metadata_fields -> kv_cache_update_jax -> the cells that it wrote
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np

from kvjax.adapters.easydel import ragged_pages_metadata_fields
from scripts.stack_checks.checkouts import module_of
from scripts.stack_checks.random_steps import BLOCK_SIZE, random_steps

_UPDATE = "easydel.caching.ragged_page.utils"
_STANDS_IN = ("ejkernel", "jaxtyping")
_COMPILES = "ejkernel.callib"  # has the decorator that compiles the update; here it runs as it is


def steps_written_alike(root: Path, seed: int) -> list[bool]:
    """For each step, whether the stack's update writes each new token where its slot says, and nothing else."""
    uncompiled: Any = ModuleType(_COMPILES)
    uncompiled.ejit = lambda **_: lambda function: function
    sys.modules.setdefault(_COMPILES, uncompiled)
    update = module_of(root, _UPDATE, _STANDS_IN).kv_cache_update_jax
    alike = []
    for kind in ("full", "windowed"):
        for step in random_steps(seed, kind):
            fields = ragged_pages_metadata_fields(step.plan, step.config, step.shape, num_slices_per_update=8)[0]
            tokens = np.arange(1, step.shape.num_tokens + 1, dtype=np.float32)
            slots = step.plan.groups[0].slot_mapping
            cells = np.zeros(int(step.written[0].shape[0]) * BLOCK_SIZE, np.float32)
            cells[slots[slots >= 0]] = tokens[: len(slots)][slots >= 0]
            found = update(
                jnp.asarray(tokens)[:, None, None],
                jnp.asarray(fields["slot_mapping"]),
                jnp.zeros((cells.size, 1, 1)),
                jnp.asarray(fields["num_kv_update_slices"]),
                page_size=BLOCK_SIZE,
            )
            alike.append(bool((np.asarray(found)[:, 0, 0] == cells).all()))
    return alike
