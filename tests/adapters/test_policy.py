"""Whose rules an adapter follows: the argument says, else the environment, else they are the stack's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvjax.adapters.policy import chosen_policy, with_policy
from kvjax.core import ManagerOptions


def test_without_a_word_the_rules_are_the_stack_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVJAX_POLICY", raising=False)
    assert chosen_policy(None) == chosen_policy("stack") == "stack"
    monkeypatch.setenv("KVJAX_POLICY", "")
    assert chosen_policy(None) == "stack"


def test_kvjax_s_rules_are_the_defaults_of_its_manager() -> None:
    """How blocks are hashed and when a fresh state may be hit stays the stack's."""
    stack, ours = ManagerOptions.vllm("0.33.0"), ManagerOptions()
    assert with_policy("stack", stack) == stack
    rules = replace(ours.rules, coarse_hash_mode="last", defer_fresh_hits=True)
    assert with_policy("kvjax", stack) == replace(ours, rules=rules)


def test_an_argument_counts_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_POLICY", "kvjax")
    assert chosen_policy(None) == chosen_policy("kvjax") == "kvjax"
    assert chosen_policy("stack") == "stack"


def test_another_policy_is_refused_by_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"expected policy of 'stack' .* or 'kvjax' .*, got 'lru'; correct it"):
        chosen_policy("lru")
    with pytest.raises(ValueError, match=r"expected policy of 'stack' .*, got ''"):
        chosen_policy("")
    monkeypatch.setenv("KVJAX_POLICY", "ours")
    with pytest.raises(ValueError, match=r"expected environment variable KVJAX_POLICY of 'stack' .*, got 'ours'"):
        chosen_policy(None)
