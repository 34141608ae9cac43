"""Layers whose states are cached in fewer bits: what they become, and how much more an idle cache keeps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvjax.configs import load_model_config
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.unshared import RunningStateSpec
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec
from kvjax.planning import Load, plan_kv_cache, with_idle_states

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="bfloat16")
STATE = MambaSpec(
    block_size=32,
    shapes=((64, 3), (8, 16, 16)),
    dtypes=("bfloat16", "float32"),
    mamba_cache_mode="align",
    num_speculative_blocks=2,
)


def test_a_layer_becomes_two() -> None:
    split = with_idle_states({"a": FULL, "s": STATE}, "int8")
    assert list(split) == ["a", "s", "s.idle"]
    assert split["a"] is FULL
    assert split["s"] == RunningStateSpec.of(STATE)
    shapes = (*STATE.shapes, (8,))
    assert split["s.idle"] == replace(STATE, shapes=shapes, dtypes=("bfloat16", "int8", "float32"))


def test_states_that_nobody_hits_stay_one_layer() -> None:
    specs = {"a": FULL, "s": replace(STATE, mamba_cache_mode="none")}
    assert with_idle_states(specs, "int16") == specs


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="expected idle states of int8 or int16, got 'float16'"):
        with_idle_states({"s": STATE}, "float16")


@pytest.mark.parametrize("one_memory", [False, True])
def test_groups_stand_in_pairs(one_memory: bool) -> None:
    specs = with_idle_states({**{f"s.{i}": STATE for i in range(6)}, "a.0": FULL, "a.1": FULL}, "int8")
    plan = plan_kv_cache(specs, max_model_len=256, memory_bytes=1 << 24, one_memory=one_memory)
    groups = plan.config.kv_cache_groups
    assert len(plan.config.idle_groups) == (3 if one_memory else 1)
    for running, idle in plan.config.idle_groups:
        assert groups[idle].layer_names == tuple(f"{name}.idle" for name in groups[running].layer_names)
        assert groups[idle].pool_id != groups[running].pool_id
    assert set(plan.config.layer_index) == {f"s.{i}" for i in range(6)} | {"a.0", "a.1"}


def test_states_alone_have_a_part_of_the_memory_each() -> None:
    """Nothing says then whether a TPU packs what lies in slabs."""
    specs = with_idle_states({"s.0": STATE, "s.1": STATE}, "int8")
    plan = plan_kv_cache(specs, max_model_len=256, memory_bytes=1 << 24, one_memory=True)
    assert plan.config.slabs is None
    assert len(plan.config.pools) == 2


@pytest.mark.parametrize("one_memory", [False, True])
@pytest.mark.parametrize(("dtype", "least"), [("int8", 2.2), ("int16", 1.5)])
def test_an_idle_cache_keeps_more_checkpoints(one_memory: bool, dtype: str, least: float) -> None:
    """Nemotron 3's states of float32, where 2,048 tokens of attention go with each."""
    specs = load_model_config("nemotron-3-nano-30b-a3b").kv_cache_specs()
    options = {"memory_bytes": 40 << 30, "load": Load(2_048, 64), "platform": "gpu", "one_memory": one_memory}
    plans = [plan_kv_cache(each, max_model_len=32_768, **options) for each in (specs, with_idle_states(specs, dtype))]
    plain, idle = (plan.kept.checkpoints for plan in plans)
    assert idle > least * plain


def test_pairs_that_do_not_fit_are_refused() -> None:
    running = RunningStateSpec.of(STATE)
    pools = tuple(KVCachePoolSpec(10) for _ in range(3))

    def config(pair: tuple[int, int], idle: MambaSpec = STATE) -> KVCacheConfig:
        groups = [KVCacheGroupSpec((f"{i}",), spec, i) for i, spec in enumerate((running, idle, FULL))]
        return KVCacheConfig(pools, tuple(groups), idle_groups=(pair,))

    assert config((0, 1)).idle_groups == ((0, 1),)
    for pair, idle, message in (
        ((0, 3), STATE, r"expected idle_groups in \[0, 3\), got \(0, 3\)"),
        ((0, 2), STATE, r"expected groups of recurrent states as idle_groups, got \(0, 2\)"),
        ((0, 1), replace(STATE, block_size=16), "expected equal numbers of layers and block sizes"),
    ):
        with pytest.raises(ValueError, match=message):
            config(pair, idle)
    with pytest.raises(ValueError, match="expected mamba_cache_mode none of running states, got align"):
        replace(RunningStateSpec.of(STATE), mamba_cache_mode="align")
    with pytest.raises(NotImplementedError, match="for their idle states, got none"):
        plan_kv_cache({"s.idle": STATE, "a": FULL}, max_model_len=64, num_blocks=20)
