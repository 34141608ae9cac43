"""Whose rules an adapter follows: the argument says, else the environment, else they are the stack's."""

from __future__ import annotations

import inspect

import pytest

from kvjax.adapters.policy import policy_options
from kvjax.core import KVCacheManager


def test_without_a_word_the_rules_are_the_stack_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVJAX_POLICY", raising=False)
    assert policy_options(None) == policy_options("stack") == {}
    monkeypatch.setenv("KVJAX_POLICY", "")
    assert policy_options(None) == {}


def test_kvjax_s_rules_are_the_defaults_of_its_manager() -> None:
    defaults = {name: p.default for name, p in inspect.signature(KVCacheManager).parameters.items()}
    options = policy_options("kvjax")
    assert set(options) == {"eviction_policy", "free_order", "retention_interval", "retention_ends"}
    assert options == {name: defaults[name] for name in options}


def test_an_argument_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_POLICY", "kvjax")
    assert policy_options(None) == policy_options("kvjax")
    assert policy_options("stack") == {}


def test_another_policy_is_refused_by_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected policy of 'stack' .* or 'kvjax' .*, got 'lru'; correct it"):
        policy_options("lru")
    with pytest.raises(ValueError, match=r"expected policy of 'stack' .*, got ''"):
        policy_options("")
    monkeypatch.setenv("KVJAX_POLICY", "ours")
    with pytest.raises(ValueError, match=r"expected environment variable KVJAX_POLICY of 'stack' .*, got 'ours'"):
        policy_options(None)
