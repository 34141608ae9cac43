"""A stand-in for an installed vLLM, made from what was recorded of a release: names and defaults, no code."""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
from abc import ABCMeta
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import kvjax.adapters.vllm.release as release_module
from kvjax.adapters.vllm.description import REQUIRED

RECORDED = Path(release_module.__file__).parent / "recorded"
RELEASES = tuple(release_module.RULES)
NEW = ("0.32", "0.33")  # their manager is told of steps, and the scheduler counts lookups


class Request:
    """What the adapter reads of a request."""

    def __init__(self, request_id: str, token_ids: list[int], block_hashes: list[bytes]) -> None:
        self.request_id = request_id
        self.all_token_ids = list(token_ids)
        self.block_hashes = block_hashes
        self.cache_salt: str | None = None
        self.lora_request: Any = None
        self.mm_features: list[Any] = []
        self.num_computed_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.num_prompt_tokens = len(token_ids)
        self.shared_prefix_boundary = 0
        self.prompt_embeds = None
        self.skip_reading_prefix_cache = False
        self.sampling_params: Any = None

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


class PrefixCacheStats:
    def __init__(self) -> None:
        self.records: list[tuple[int, int, bool]] = []
        self.reset = False

    def record(self, num_tokens: int, num_hits: int, preempted: bool) -> None:
        self.records.append((num_tokens, num_hits, preempted))


class BlockCopy(NamedTuple):
    src_block_id: int
    dst_block_id: int


def recorded(name: str) -> dict[str, Any]:
    description: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text())
    return description


def _method(parameters: dict[str, Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("vLLM's own manager is called")

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    listed = [
        inspect.Parameter(name, kind, default=inspect.Parameter.empty if value == REQUIRED else value)
        for name, value in parameters.items()
    ]
    method.__signature__ = inspect.Signature([inspect.Parameter("self", kind), *listed])  # type: ignore[attr-defined]
    return method


def _class(name: str, methods: dict[str, Any]) -> type:
    members = {m: property(lambda self: None) if p is None else _method(p) for m, p in methods.items()}
    return type(name, (), members)


def _dataclass(name: str, fields: list[str], bases: tuple[type, ...] = ()) -> type:
    return dataclasses.make_dataclass(name, [(field, Any, None) for field in fields], bases=bases)


def modules_of(description: dict[str, Any]) -> dict[str, ModuleType]:
    """vLLM's modules, as far as the adapter imports them."""
    modules = {
        name: ModuleType(name)
        for name in (
            "vllm",
            "vllm.v1.core.kv_cache_coordinator",
            "vllm.v1.core.kv_cache_manager",
            "vllm.v1.core.kv_cache_utils",
            "vllm.v1.core.sched.scheduler",
            "vllm.v1.core.single_type_kv_cache_manager",
            "vllm.v1.kv_cache_interface",
            "vllm.v1.metrics.stats",
            "vllm.v1.request",
            "vllm.distributed.kv_events",
        )
    }
    modules["vllm"].__version__ = description["version"]  # type: ignore[attr-defined]
    for name, methods in description["methods"].items():
        setattr(modules["vllm.v1.core.kv_cache_manager"], name, _class(name, methods))
    own = modules["vllm.v1.core.kv_cache_manager"].KVCacheManager
    modules["vllm.v1.core.sched.scheduler"].KVCacheManager = own  # type: ignore[attr-defined]
    for name in ("Unitary{}", "Hybrid{}", "{}NoPrefixCache"):
        name = name.format("KVCacheCoordinator")
        setattr(modules["vllm.v1.core.kv_cache_coordinator"], name, ABCMeta(name, (), {}))
    for name in ("FullAttentionManager", "SlidingWindowManager", "CrossAttentionManager", "MambaManager"):
        setattr(modules["vllm.v1.core.single_type_kv_cache_manager"], name, ABCMeta(name, (), {}))
    modules["vllm.v1.core.kv_cache_utils"].maybe_convert_block_hash = lambda value: value  # type: ignore[attr-defined]
    modules["vllm.v1.core.kv_cache_utils"].KVCacheBlockCopy = BlockCopy  # type: ignore[attr-defined]
    interface = modules["vllm.v1.kv_cache_interface"]
    interface.KVCacheSpec = base = type("KVCacheSpec", (), {})  # type: ignore[attr-defined]
    for name, fields in description["fields"].items():
        is_spec = name not in ("KVCacheGroupSpec", "KVCacheConfig")
        setattr(interface, name, _dataclass(name, fields, (base,) if is_spec else ()))
    for name, fields in description["events"].items():
        setattr(modules["vllm.distributed.kv_events"], name, _dataclass(name, fields))
    modules["vllm.distributed.kv_events"].AllBlocksCleared = _dataclass("AllBlocksCleared", [])  # type: ignore[attr-defined]
    modules["vllm.v1.request"].Request = Request  # type: ignore[attr-defined]
    modules["vllm.v1.metrics.stats"].PrefixCacheStats = PrefixCacheStats  # type: ignore[attr-defined]
    return modules


@contextmanager
def installed(description: dict[str, Any]) -> Iterator[SimpleNamespace]:
    """While it lasts, `import vllm` finds the described one."""
    modules = modules_of(description)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    release_module.installed_release.cache_clear()
    try:
        interface = modules["vllm.v1.kv_cache_interface"]
        yield SimpleNamespace(modules=modules, **{k: v for k, v in vars(interface).items() if not k.startswith("__")})
    finally:
        release_module.installed_release.cache_clear()
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def make(cls: type, **fields: Any) -> Any:
    """An object of a recorded dataclass; fields that the release lacks are left out."""
    known = {field.name for field in dataclasses.fields(cls)}
    return cls(**{name: value for name, value in fields.items() if name in known})
