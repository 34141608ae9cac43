"""Ranks of context parallelism hold each token once, as the host counts them, and refuse pages that do not split."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec, MLAAttentionSpec, slots_of_rank
from kvjax.device.mesh.context_ranks import ContextRanks
from kvjax.device.mesh.placement import Placement
from kvjax.planning import Parallelism, plan_kv_cache
from tests.planning.test_plan import full

SIZES: dict[str, Any] = {"num_blocks": 9, "max_model_len": 64}


class FakeMesh:
    """As much of a mesh of one context axis as a placement asks for."""

    axis_names = ("context",)
    axis_types = (jax.sharding.AxisType.Auto,)

    def __init__(self, size: int) -> None:
        self.shape = {"context": size}
        self.size = size


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_rank_writes_what_the_host_says(num_ranks: int) -> None:
    slots = np.array([-1, *np.random.default_rng(0).permutation(24), -1], np.int32)
    ranks = ContextRanks("context", num_ranks)
    write = jax.vmap(lambda slots, _: ranks.own_slots(slots), in_axes=(None, 0), axis_name="context")
    found = write(jnp.asarray(slots), jnp.arange(num_ranks))
    np.testing.assert_array_equal(found, [slots_of_rank(slots, rank, num_ranks) for rank in range(num_ranks)])


def test_an_op_alone_is_called_as_it_is() -> None:
    assert Placement.create().context_ranks is None


@pytest.mark.parametrize(
    ("spec", "platform", "message"),
    [
        (full(2), "cpu", "pages of 16 tokens in 16 rows do not split over 3 context ranks; use a multiple of 3"),
        (
            MLAAttentionSpec(block_size=6, head_size=24, dtype="bfloat16"),
            "tpu",
            "pages of 6 tokens in 3 rows do not split over 2 context ranks; use a multiple of 4",
        ),
    ],
)
def test_pages_that_do_not_split_are_refused(spec: KVCacheSpec, platform: str, message: str) -> None:
    placement = Placement(FakeMesh(2 if platform == "tpu" else 3), token_axis="context")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        placement.check_tokens(spec, spec.page_layout(platform))


def test_entries_of_several_tokens_are_refused() -> None:
    spec = MLAAttentionSpec(block_size=16, head_size=24, dtype="bfloat16", tokens_per_state=4)
    placement = Placement(FakeMesh(2), token_axis="context")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match="entries of 4 tokens do not split over 2 context ranks"):
        placement.check_tokens(spec, spec.page_layout("cpu"))


@pytest.mark.parametrize(
    "spec",
    [
        MLAAttentionSpec(block_size=16, head_size=24, dtype="bfloat16", tokens_per_state=4),
        CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32", max_num_encoder_tokens=32),
    ],
)
def test_layers_that_data_ranks_cannot_have_are_refused(spec: KVCacheSpec) -> None:
    placement = Placement(FakeMesh(2), data_axis="context")  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=f"{spec.kind} layers do not work over 2 data ranks"):
        placement.check_ranks(spec)


def test_one_mesh_axis_is_not_both() -> None:
    with pytest.raises(ValueError, match="expected different mesh axes of KV heads, tokens and requests"):
        Placement(FakeMesh(2), "context", "context")  # type: ignore[arg-type]


def test_a_device_is_planned_to_hold_its_tokens() -> None:
    """A page that two ranks share takes half of its bytes on each, and is a page for the host."""
    make = partial(plan_kv_cache, {"a": FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype="float32")})
    one, two = (make(**SIZES, parallel=Parallelism(page_context=ranks)) for ranks in (1, 2))
    assert two.config == one.config
    assert 2 * two.used_bytes == one.used_bytes
    assert two.concurrency == one.concurrency
    assert two.parallel.num_devices == 2
    share = two.parallel.share_of(full(4), 1)
    assert (share.first_token, share.token_stride, share.replica) == (1, 2, 0)


def test_heads_of_fewer_than_devices_are_planned_on_each_that_has_them() -> None:
    """Two heads over four devices: pages of four, a head each, twice the bytes of two heads together."""
    specs = {"a": FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")}
    one, four = (plan_kv_cache(specs, **SIZES, tensor_parallel=n) for n in (1, 4))
    assert four.config.pools[0].columns[0].arrays[0].page_shape == (16, 4, 8)
    assert 4 * four.used_bytes == 2 * one.used_bytes


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"page_context": 3}, "expected a block_size that splits over 3 context ranks, got 16"),
        ({"page_context": 2, "prefill_context": 2}, "got 2 of the first and 2 of the others"),
    ],
)
def test_ranks_that_cannot_share_are_refused(parallel: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_kv_cache({"a": full(4)}, **SIZES, parallel=Parallelism(**parallel))
