"""A step is planned once for each group and kind of layer, and a bucket of decoding alone compiles to no prefill."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mla import MLAAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.device import AttentionOptions, Bucket, DeviceBatch, StepCache, create_pages
from kvjax.planning import plan_kv_cache
from pallas_kernels.mla_paged_attention import kernel_gpu as latent_kernel
from pallas_kernels.ragged_paged_attention import kernel_gpu as kv_kernel

PLAIN, WINDOW = AttentionOptions(sm_scale=0.1), AttentionOptions(sm_scale=0.1, sliding_window=32)
KV: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": "bfloat16"}
DECODE, MIXED = Bucket(4, 4, 2, is_mixed=False), Bucket(4, 4, 2)
DRAFTS = Bucket(4, 2, 2, 1, is_mixed=False)  # of two tokens a request, one a draft


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[bool]:
    """Each plan that the kernels of a module make: whether it is one of decoding alone."""
    plans: list[bool] = []
    plan = module.plan

    def counted(*arguments: Any, **options: Any) -> Any:
        plans.append(options["is_decode"])
        return plan(*arguments, **options)

    monkeypatch.setattr(module, "plan", counted)
    return plans


def jaxpr_of(specs: dict[str, Any], bucket: Bucket, run: Callable[[StepCache], Any]) -> str:
    """A step for a GPU, traced."""
    config = plan_kv_cache(specs, num_blocks=8, max_model_len=32).config

    def step(pages: Any, batch: DeviceBatch) -> Any:
        cache = StepCache(pages, batch, config, backend="gpu")
        return run(cache), cache.pages

    return str(jax.make_jaxpr(step)(create_pages(config), DeviceBatch.empty(bucket, len(config.kv_cache_groups))))


def run_layers(cache: StepCache, layers: dict[str, AttentionOptions]) -> list[jax.Array]:
    q, kv = jnp.zeros((4, 4, 64), jnp.bfloat16), jnp.zeros((4, 2, 64), jnp.bfloat16)
    return [cache(name, q, kv, kv, options) for name, options in layers.items()]


@pytest.mark.parametrize(("bucket", "prefills"), [(DECODE, 0), (DRAFTS, 0), (MIXED, 4)])
def test_layers_of_a_group_share_a_plan(monkeypatch: pytest.MonkeyPatch, bucket: Bucket, prefills: int) -> None:
    """Two layers with all tokens, two with a window, in groups of their own: two plans, for twice as many layers."""
    plans = count_calls(monkeypatch, kv_kernel)
    full, window = FullAttentionSpec(**KV), SlidingWindowSpec(**KV, sliding_window=32)
    specs = {"layers.0": full, "layers.1": window, "layers.2": full, "layers.3": window}
    layers = {name: PLAIN if spec is full else WINDOW for name, spec in specs.items()}
    text = jaxpr_of(specs, bucket, functools.partial(run_layers, layers=layers))
    assert plans == [not bucket.is_mixed] * 2
    assert text.count("name=rpa_decode") == 4
    assert text.count("name=rpa_prefill") == prefills


def test_layers_of_one_group_with_other_masks_have_plans_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """And with other soft caps or sinks the same."""
    plans = count_calls(monkeypatch, kv_kernel)
    specs = {f"layers.{i}": FullAttentionSpec(**KV) for i in range(4)}
    options = [PLAIN, WINDOW, replace(PLAIN, soft_cap=5.0), replace(PLAIN, sinks=jnp.zeros(4))]
    jaxpr_of(specs, DECODE, functools.partial(run_layers, layers=dict(zip(specs, options, strict=True))))
    assert len(plans) == 2


@pytest.mark.parametrize("bucket", [DECODE, DRAFTS])
def test_latent_layers_share_a_plan(monkeypatch: pytest.MonkeyPatch, bucket: Bucket) -> None:
    plans = count_calls(monkeypatch, latent_kernel)
    spec = MLAAttentionSpec(block_size=16, head_size=192, dtype="bfloat16")

    def run(cache: StepCache) -> list[jax.Array]:
        latent, key_pe = jnp.zeros((4, 128), jnp.bfloat16), jnp.zeros((4, 64), jnp.bfloat16)
        queries = [jnp.zeros((4, 4, dim), jnp.bfloat16) for dim in (128, 64)]
        return [cache.attend_latent(f"layers.{i}", *queries, latent, key_pe, PLAIN) for i in range(3)]

    text = jaxpr_of({f"layers.{i}": spec for i in range(3)}, bucket, run)
    assert plans == [True]
    assert text.count("name=rpa_merge_pieces") == 3
    assert "rpa_merge_into" not in text
