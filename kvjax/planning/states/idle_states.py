"""Recurrent states that are only cached, in fewer bits than those that requests run on.

Flow:    specs of all layers -> [with_idle_states] -> a running and an idle layer for each -> plan_kv_cache
Source:  ARCHITECTURE.md, "Idle states"; what the device does with both: kvjax.device.pages.idle_states

A recurrent layer `name` keeps its name for the states of running requests, one each, which nobody hits; a layer
`name.idle` caches states at the ends of blocks: the same arrays, the last one as integers, and float32 scales behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import singledispatch

from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.unshared import RunningStateSpec
from kvjax.core.spec import KVCacheGroupSpec, KVCacheSpec

IDLE = ".idle"  # behind a layer's name
IDLE_STATE_DTYPES = ("int8", "int16")


def with_idle_states(specs: Mapping[str, KVCacheSpec], dtype: str) -> dict[str, KVCacheSpec]:
    """The specs with two layers in place of each that caches recurrent states; others as they are.

    Raises:
        ValueError: `dtype` is not int8 or int16.
    """
    if dtype not in IDLE_STATE_DTYPES:
        raise ValueError(f"expected idle states of {' or '.join(IDLE_STATE_DTYPES)}, got {dtype!r}")
    found: dict[str, KVCacheSpec] = {}
    for name, spec in specs.items():
        found.update(zip((name, name + IDLE), split(spec, dtype), strict=False))
    return found


@singledispatch
def split(spec: KVCacheSpec, dtype: str) -> tuple[KVCacheSpec, ...]:
    """What a request keeps of a layer, and what is cached of it, where that is another. Other kinds register theirs."""
    return (spec,)


@split.register
def _(spec: MambaSpec, dtype: str) -> tuple[KVCacheSpec, ...]:
    if spec.mamba_cache_mode != "align":
        return (spec,)
    shapes, dtypes = (*spec.shapes, spec.shapes[-1][:1]), (*spec.dtypes[:-1], dtype, "float32")
    idle = replace(spec, shapes=shapes, dtypes=dtypes, page_size_padded=None)
    return RunningStateSpec.of(spec), idle


def idle_groups_of(groups: Sequence[KVCacheGroupSpec]) -> tuple[tuple[int, int], ...]:
    """(running group, idle group) of layers that `with_idle_states` split.

    Raises:
        NotImplementedError: running and idle layers are grouped in different ways.
    """
    by_names = {group.layer_names: group_id for group_id, group in enumerate(groups)}
    pairs = []
    for idle_id, group in enumerate(groups):
        if all(name.endswith(IDLE) for name in group.layer_names):
            names = tuple(name.removesuffix(IDLE) for name in group.layer_names)
            if names not in by_names:
                raise NotImplementedError(f"expected a group of the layers {names} for their idle states, got none")
            pairs.append((by_names[names], idle_id))
    return tuple(pairs)


__all__ = ["IDLE_STATE_DTYPES", "idle_groups_of", "with_idle_states"]
