"""`install(policy=...)`: vLLM's rules unless kvjax's are asked for, and what kvjax's hit that vLLM's do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kvjax.adapters.vllm import KVCacheManager, install, uninstall
from kvjax.core.options.manager_options import ManagerOptions
from tests.adapters.vllm.fake_vllm import NEW, RELEASES, installed, recorded
from tests.adapters.vllm.test_manager import BLOCK, config_of, mamba_of, request_of, spec_of

PROMPT_TOKENS, STEP_TOKENS = 41, 8


@pytest.fixture(params=RELEASES)
def vllm(request: pytest.FixtureRequest) -> Iterator[SimpleNamespace]:
    with installed(recorded(request.param)) as found:
        found.name = request.param
        yield found
        uninstall()


def made(vllm: Any, cls: type[KVCacheManager], *specs: Any, num_blocks: int = 56) -> Any:
    """A manager of full attention and other groups, with the newest release's default of checkpoints."""
    config = config_of(vllm, spec_of(vllm, "FullAttentionSpec"), *specs, num_blocks=num_blocks)
    options = {}
    if vllm.name in NEW:
        config.prefix_cache_retention_interval, options = 0, {"scheduler_block_size": BLOCK}
    return cls(config, max_model_len=64, hash_block_size=BLOCK, **options)


def free(manager: Any, request: Any) -> None:
    """Frees a request's blocks as it ends."""
    manager.free(request)


def free_later(manager: Any, request: Any) -> None:
    """Frees them when the step in flight is done, as the newest scheduler does."""
    manager.block_pool.free_blocks(reversed(manager.pop_blocks_for_free(request)))


End = Callable[[Any, Any], None]


def serve(manager: Any, name: str, tokens: list[int], step_tokens: int = STEP_TOKENS, end: End = free) -> int:
    """Computes a prompt in steps, ends it, and says what it hit."""
    request = request_of(name, tokens)
    blocks, hit, *shared = manager.get_computed_blocks(request)
    request.shared_prefix_boundary = (shared or [0])[0]
    given: tuple[Any, ...] = (hit, blocks)
    done = int(hit)
    while done < len(tokens):
        step = min(step_tokens, len(tokens) - done)
        manager.new_step_starts()
        assert manager.allocate_slots(request, step, *given) is not None
        given, done = (), done + step
        request.num_computed_tokens = done
    end(manager, request)
    manager._core.check_invariants()
    return int(hit)


def rules_of(manager: Any) -> ManagerOptions:
    """What is cached and evicted, all else as by default."""
    options = manager._core.options
    return ManagerOptions(
        eviction_policy=options.eviction_policy, retention_interval=options.retention_interval, rules=options.rules
    )


def test_unless_asked_the_rules_are_those_of_the_release(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVJAX_POLICY", raising=False)
    preset = ManagerOptions.vllm({"0.16": "0.16.0", "0.22": "0.22.1", "0.32": "0.32.0", "0.33": "0.33.0"}[vllm.name])
    for cls in (KVCacheManager, install(), install(policy="stack")):
        assert rules_of(made(vllm, cls)) == preset
    monkeypatch.setenv("KVJAX_POLICY", "kvjax")
    assert rules_of(made(vllm, install(policy="stack"))) == preset


def test_asked_for_the_rules_are_kvjax_s_and_hashes_the_release_s(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVJAX_POLICY", "kvjax")
    for cls in (install(), install(policy="kvjax")):
        stack = rules_of(made(vllm, KVCacheManager)).rules
        rules = replace(stack, free_order="uncached_first", retention_ends="all", inner_hits=False, rswa_as_vllm=False)
        found = rules_of(made(vllm, cls))
        assert found == ManagerOptions(eviction_policy="learned", retention_interval="auto", rules=rules)
    assert rules_of(made(vllm, install(eviction_policy="lru"))).eviction_policy == "lru"


def test_another_policy_is_refused_and_nothing_is_replaced(vllm: Any) -> None:
    scheduler = vllm.modules["vllm.v1.core.sched.scheduler"]
    own = scheduler.KVCacheManager
    with pytest.raises(ValueError, match=r"expected policy of 'stack' .*, got 'mine'"):
        install(policy="mine")
    assert scheduler.KVCacheManager is own


@pytest.mark.parametrize(("step_tokens", "num_blocks"), [(STEP_TOKENS, 56), (PROMPT_TOKENS, 66)])
@pytest.mark.parametrize("end", [free, free_later])
@pytest.mark.parametrize("kind", ["SlidingWindowSpec", "ChunkedLocalAttentionSpec"])
def test_prompts_that_come_in_turns_are_hit_where_all_ends_fit(
    vllm: Any, kind: str, end: End, step_tokens: int, num_blocks: int
) -> None:
    """Four prompts whose tokens and last windows fit, and not the windows of all lengths.

    The newest release keeps windows where prompts end, but chunks whole.
    """
    hits = {}
    for policy in ("stack", "kvjax"):
        manager = made(vllm, install(policy=policy), spec_of(vllm, kind), num_blocks=num_blocks)
        names = [(turn, n) for turn in range(3) for n in range(4)]
        hits[policy] = [
            serve(manager, f"{turn} {n}", [1000 * n + i for i in range(PROMPT_TOKENS)], step_tokens, end)
            for turn, n in names
        ]
    assert hits["kvjax"] == [0] * 4 + [PROMPT_TOKENS - 1] * 8
    keeps_ends = vllm.name in NEW and kind == "SlidingWindowSpec"
    assert hits["stack"] == hits["kvjax"] if keeps_ends else sum(hits["stack"]) < sum(hits["kvjax"])


def test_states_are_hit_where_the_steps_of_the_scheduler_ended(vllm: Any) -> None:
    """An edited prompt: releases that keep states at ends alone have none before the edit."""
    prompt = list(range(PROMPT_TOKENS))
    edited = [*prompt[:30], *range(900, 911)]
    hits = {}
    for policy in ("stack", "kvjax"):
        manager = made(vllm, install(policy=policy), mamba_of(vllm), num_blocks=80)
        hits[policy] = [serve(manager, f"{n}", tokens) for n, tokens in enumerate((prompt, edited, edited))]
    last_step = 30 // STEP_TOKENS * STEP_TOKENS
    assert hits["kvjax"][:2] == [0, last_step]
    assert hits["stack"][:2] == [0, 0 if vllm.name in NEW else last_step]
    assert hits["kvjax"][2] == hits["stack"][2] > 0


@pytest.mark.parametrize(
    ("extra_args", "lengths"),
    [
        ({"kvjax_checkpoints": [8, 21]}, {8, 20}),
        ({"kvjax_checkpoints": [8, 0, 99, "x", True]}, {8}),
        ({"kvjax_checkpoints": 8}, set()),
        ({"kvjax_checkpoints": None}, set()),
        ({}, set()),
        (None, set()),
    ],
)
def test_checkpoints_that_the_application_names_are_kept(vllm: Any, extra_args: Any, lengths: set[int]) -> None:
    """What no prompt has does no harm: a request that raises in the scheduler would end the engine."""
    manager = made(vllm, install(policy="kvjax"), spec_of(vllm, "SlidingWindowSpec"))
    request = request_of("r", list(range(40)))
    request.sampling_params = SimpleNamespace(extra_args=extra_args)
    assert manager.allocate_slots(request, 40) is not None
    retention = manager._core.groups.retention
    assert set(retention.lengths_of(0)) - {0, 36, 40} == lengths
