"""A cache's config as plain data: numbers, text, lists and dicts, for the head of a file.

Flow:    KVCacheConfig -> [encode_config] -> CBOR, JSON -> [decode_config] -> an equal KVCacheConfig

A spec is `{"class": its name, ...fields}`. Read back are specs of registered classes (`register_kv_cache_spec`),
through their constructors, which check the fields.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.core.kinds.registry import registered_specs
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, KVCacheSpec, SlabSpec
from pallas_kernels.layouts import ArrayLayout, PageLayout

CONFIG_CLASSES = (KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, SlabSpec, PageLayout, ArrayLayout)


def encode_config(value: Any) -> Any:
    """A config, or any part of one, as plain data.

    Raises:
        NotImplementedError: a spec's class is not registered, so that nobody could read it back.
    """
    if isinstance(value, KVCacheSpec) and type(value) not in registered_specs():
        raise NotImplementedError(f"{type(value).__name__} cannot be saved; decorate it with register_kv_cache_spec")
    if dataclasses.is_dataclass(value):
        fields = {f.name: encode_config(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"class": type(value).__name__, **fields}
    return [encode_config(part) for part in value] if isinstance(value, tuple) else value


def decode_config(plain: Any) -> Any:
    """The config, or the part of one, that was encoded.

    Raises:
        ValueError: a class is none of a config's, or has other fields.
    """
    if isinstance(plain, list):
        return tuple(map(decode_config, plain))
    if not isinstance(plain, dict):
        return plain
    fields = dict(plain)
    name = fields.pop("class", None)
    classes: dict[str, type] = {cls.__name__: cls for cls in (*CONFIG_CLASSES, *registered_specs())}
    if name not in classes:
        raise ValueError(f"expected a class of {', '.join(sorted(classes))}, got {name!r}; register it first")
    try:
        return classes[name](**{field: decode_config(part) for field, part in fields.items()})
    except TypeError as error:
        raise ValueError(f"expected the fields of a {name}: {error}") from error


def describe_config(config: KVCacheConfig) -> str:
    """Pools and groups in a line."""
    pools = ", ".join(str(pool.num_blocks) for pool in config.pools)
    groups = ", ".join(f"{g.kv_cache_spec.kind} ({g.kv_cache_spec.block_size})" for g in config.kv_cache_groups)
    return f"pools of {pools} blocks, groups {groups}"
