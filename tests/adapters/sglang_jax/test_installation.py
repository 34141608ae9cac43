"""`install` puts kvjax's classes where sglang-jax makes its own; stand-ins have the recorded names."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kvjax.adapters.sglang_jax import SlotAllocator, install, prefix_cache_of, uninstall
from kvjax.errors import MissingStackError, UnknownStackError
from tests.adapters.stand_ins import stack_with


def context(made: dict[str, Any], allocator: Any, **settings: Any) -> Any:
    """A `TreeCacheBuildContext` of a model with full attention."""
    params = made["CacheInitParams"](
        token_to_kv_pool_allocator=allocator, page_size=allocator.page_size, is_eagle=False, sliding_window_size=8
    )
    server_args = SimpleNamespace(hicache_storage=settings.pop("hicache_storage", "disable"), kv_events_config="{}")
    return made["TreeCacheBuildContext"](params=params, server_args=server_args, **settings)


def test_what_the_stack_makes_is_kvjax_s_and_the_stack_s() -> None:
    with stack_with("sglang_jax") as made:
        modules = sys.modules["sgl_jax.srt.mem_cache.allocator"], sys.modules["sgl_jax.srt.mem_cache.registry"]
        own = [vars(module).copy() for module in modules]
        install()
        install()
        paged = modules[0].PagedTokenToKVPoolAllocator(size=40, page_size=4, kvcache=None, debug_mode=False, dp_size=1)
        single = modules[0].TokenToKVPoolAllocator(size=40, kvcache=None, dp_size=2)
        windows = modules[0].SWATokenToKVPoolAllocator(40, 24, kvcache=None, page_size=4, dp_size=1)
        assert isinstance(paged, made["BaseTokenToKVPoolAllocator"])
        assert isinstance(windows, made["SWATokenToKVPoolAllocator"])
        assert (paged.page_size, single.page_size, single.size_per_rank, windows.size_swa) == (4, 1, 20, 24)
        cache = modules[1].default_radix_cache_factory(context(made, paged))
        assert isinstance(cache, made["BasePrefixCache"])
        assert cache.enable_kv_cache_events
        cache = modules[1].default_radix_cache_factory(context(made, windows, is_hybrid_swa=True))
        assert isinstance(cache, made["SWARadixCache"])
        assert cache.supports_swa()
        uninstall()
        assert [vars(module) for module in modules] == own


def test_the_policy_is_asked_for_and_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVJAX_POLICY", raising=False)

    def policies() -> tuple[str, str]:
        """Of window pages, and of states."""
        windows = module.SWATokenToKVPoolAllocator(40, 24, kvcache=None, page_size=4, dp_size=1)
        cache = registry.default_radix_cache_factory(context(made, windows, is_hybrid_swa=True))
        policy = windows.swa_attn_allocator.pools[0].eviction_policy
        return type(policy).__name__, cache.eviction_policy

    with stack_with("sglang_jax") as made:
        module: Any = sys.modules["sgl_jax.srt.mem_cache.allocator"]
        registry: Any = sys.modules["sgl_jax.srt.mem_cache.registry"]
        own = vars(module).copy()
        install()
        assert policies() == ("LRUPolicy", "lru")
        install(policy="kvjax")
        assert policies() == ("ProbationLRUPolicy", "probation")
        with pytest.raises(ValueError, match=r"expected policy of 'stack' .*, got 'radix'"):
            install(policy="radix")
        assert policies() == ("ProbationLRUPolicy", "probation")
        monkeypatch.setenv("KVJAX_POLICY", "kvjax")
        install(policy="stack")
        assert policies() == ("LRUPolicy", "lru")
        install()
        assert policies() == ("ProbationLRUPolicy", "probation")
        uninstall()
        assert vars(module) == own


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"disable_radix_cache": True}, "disable_radix_cache"),
        ({"hicache_storage": "file"}, "hicache_storage file"),
    ],
)
def test_what_kvjax_does_not_serve_is_refused_by_its_setting(settings: dict[str, Any], named: str) -> None:
    with stack_with("sglang_jax") as made, pytest.raises(NotImplementedError, match=f"got {named}"):
        prefix_cache_of(context(made, SlotAllocator(40, 4), **settings))


def test_a_new_method_of_an_allocator_is_refused_and_nothing_is_replaced() -> None:
    def with_a_new_method(objects: dict[str, Any]) -> None:
        objects["PagedTokenToKVPoolAllocator"]["methods"]["alloc_verify"] = ["seq_lens"]

    with stack_with("sglang_jax", change=with_a_new_method) as made:
        with pytest.raises(UnknownStackError, match="PagedTokenToKVPoolAllocator has a new method 'alloc_verify'"):
            install()
        module = sys.modules["sgl_jax.srt.mem_cache.allocator"]
        assert module.PagedTokenToKVPoolAllocator is made["PagedTokenToKVPoolAllocator"]


def test_without_the_stack_install_says_so() -> None:
    with pytest.raises(MissingStackError, match="needs sglang-jax main-cddbf6f"):
        install()
