"""The encoder's program and cross attention: what a request's decoder reads is what its own features make."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.core import BlockHasher, KVCacheManager, MultiModalFeature, Request
from kvjax.core.spec import KVCacheConfig
from kvjax.core.step.step_builder import build_step_plan
from kvjax.core.step.step_plan import StepPlan
from kvjax.device import (
    AttentionOptions,
    Bucket,
    Buckets,
    DeviceBatch,
    EncoderCache,
    Placement,
    StepCache,
    UpdateStep,
    create_pages,
    make_update_step,
)
from kvjax.models import LoadedModel
from kvjax.planning import plan_kv_cache
from tests.device.aliases import assert_in_place
from tests.device.serving import nan_pages
from tests.device.toy import HEAD_DIM, Q_HEADS, VOCAB, ToyModel, toy_config
from tests.device.toy_inputs import CROSS_HEADS, ENCODER_SHAPES, dense_logits, toy_model
from tests.device.traces import at_most_traced

BUCKETS = Buckets((Bucket(16, 3, 8),))
CROSS = "layers.0.cross"
CLOSE = {"atol": 3e-5, "rtol": 1e-4}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return toy_model("encoder")


def config_of(model: LoadedModel, platform: str = "cpu", tensor_parallel: int = 1) -> KVCacheConfig:
    sizes = {"num_blocks": 400, "max_model_len": 40, "max_in_flight_tokens": 16}
    specs = model.config.kv_cache_specs(4)
    return plan_kv_cache(specs, **sizes, platform=platform, tensor_parallel=tensor_parallel).config


@pytest.fixture(scope="module")
def step(model: LoadedModel) -> UpdateStep:
    return make_update_step(model.module, config_of(model), BUCKETS, encoder_shapes=ENCODER_SHAPES)


def features_of(seed: int, rows: int = 14) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, 5)).astype(np.float32)


def tokens_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


class Server:
    """A manager, pages that hold NaN, and requests with features."""

    def __init__(self, step: UpdateStep, config: KVCacheConfig) -> None:
        self.step, self.config = step, config
        self.manager = KVCacheManager(config, 40, hash_block_size=4)
        self.pages = nan_pages(config, step)
        self.hasher = BlockHasher(4, seed="0")
        self.requests: dict[str, Request] = {}

    def add(self, name: str, tokens: list[int], features: np.ndarray, num_new: int) -> int:
        """Admits a request with slots for `num_new` tokens; how many of its tokens were cached."""
        item = MultiModalFeature(f"{features.tobytes().hex()}", 0, 1)
        request = self.requests[name] = Request(name, tokens, mm_features=[item], block_hasher=self.hasher)
        blocks, hit = self.manager.get_computed_blocks(request)
        num_encoder_tokens = ENCODER_SHAPES[features.shape]
        assert self.manager.allocate_slots(request, num_new, hit, blocks, num_encoder_tokens=num_encoder_tokens)
        request.num_computed_tokens = hit
        return hit

    def plan(self, counts: dict[str, int], encoding: set[str]) -> StepPlan:
        requests = [self.requests[name] for name in counts]
        rows = np.array([request.row for request in requests])
        writes = np.array([name in encoding for name in counts])
        return build_step_plan(self.manager, rows, np.array(list(counts.values())), writes_encoder=writes)

    def run(self, counts: dict[str, int], features: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One step; logits by request. `features` are those of the requests that start in it."""
        plan = self.plan(counts, set(features))
        given = [features[name] for name in plan.request_ids if name in features]
        output = self.step(self.pages, plan, features=given)
        self.pages = output.pages
        for name, count in counts.items():
            self.requests[name].num_computed_tokens += count
        lines = np.searchsorted(plan.query_start_loc, plan.logits_indices, side="right") - 1
        return {plan.request_ids[line]: np.asarray(output.logits)[i] for i, line in enumerate(lines)}


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_logits_are_those_of_the_whole_sequence_and_its_own_input(model: LoadedModel, platform: str) -> None:
    """Two requests with encoder inputs of two lengths, in chunks and then token by token."""
    config = config_of(model, platform)
    server = Server(make_update_step(model.module, config, BUCKETS, encoder_shapes=ENCODER_SHAPES), config)
    a, b, long, short = tokens_of(0, 13), tokens_of(1, 12), features_of(0), features_of(1, rows=6)
    server.add("a", a, long, 10)
    server.run({"a": 10}, {"a": long})
    server.add("b", b, short, 9)
    for counts, features in (({"b": 9, "a": 1}, {"b": short}), ({"a": 1, "b": 1}, {}), ({"b": 2, "a": 1}, {})):
        for name, count in counts.items():
            assert features or server.manager.allocate_slots(server.requests[name], count) is not None
            if features and name == "a":
                assert server.manager.allocate_slots(server.requests[name], count) is not None
        logits = server.run(counts, features)
    np.testing.assert_allclose(logits["a"], dense_logits(model.module, a, features=long)[-1], **CLOSE)
    np.testing.assert_allclose(logits["b"], dense_logits(model.module, b, features=short)[-1], **CLOSE)
    assert not np.allclose(logits["a"], dense_logits(model.module, a, features=features_of(2))[-1], atol=1e-2)


def test_a_hit_of_the_same_input_runs_its_encoder_for_blocks_of_its_own(model: LoadedModel, step: UpdateStep) -> None:
    """Requests of equal features share self-attention blocks only; other features hit nothing."""
    server, tokens, features = Server(step, config_of(model)), tokens_of(0, 13), features_of(0)
    assert server.add("a", tokens, features, 13) == 0
    server.run({"a": 13}, {"a": features})
    assert server.add("b", tokens, features, 1) == 12
    assert server.add("c", tokens, features_of(1), 13) == 0
    logits = server.run({"b": 1, "c": 13}, {"b": features, "c": features_of(1)})
    np.testing.assert_allclose(logits["b"], dense_logits(model.module, tokens, features=features)[-1], **CLOSE)
    np.testing.assert_allclose(logits["c"], dense_logits(model.module, tokens, features=features_of(1))[-1], **CLOSE)


def test_encoders_write_in_place_and_warm_up_with_the_steps(model: LoadedModel) -> None:
    config = config_of(model)
    step = make_update_step(model.module, config, BUCKETS, encoder_shapes=ENCODER_SHAPES)
    pages = create_pages(config)
    for shape in ENCODER_SHAPES:
        assert_in_place(step.compiled_encoder(pages, shape), pages)
    assert_in_place(step.compiled(pages, BUCKETS.steps[0]), pages)
    pages = step.warmup(pages)
    assert not any(leaf.any() for leaf in jax.tree.leaves(pages)), "an encoder without slots writes nothing"
    num_compiled = step.num_compiled
    assert num_compiled == len(BUCKETS.steps) + len(ENCODER_SHAPES)
    server = Server(step, config)
    with at_most_traced(type(model.module), 0):
        server.add("a", tokens_of(0, 9), features_of(0), 9)
        server.run({"a": 9}, {"a": features_of(0)})
    assert step.num_compiled == num_compiled


def bad_features() -> dict[str, tuple[list[np.ndarray], str]]:
    return {
        "none": ([], "expected encoder features of 1 requests whose encoder runs in this step, got 0"),
        "two": ([features_of(0)] * 2, "expected encoder features of 1 requests .* got 2"),
        "shape": ([features_of(0, rows=8)], r"of shape \[6, 5\] or \[14, 5\], got \[8, 5\]"),
        "tokens": ([features_of(0, rows=6)], r"expected slots of \[3\] encoder tokens in groups \(\d,\), got \[7\]"),
    }


@pytest.mark.parametrize("name", bad_features())
def test_refused_features_leave_the_pages_alone(model: LoadedModel, step: UpdateStep, name: str) -> None:
    features, message = bad_features()[name]
    server = Server(step, config_of(model))
    server.add("a", tokens_of(0, 9), features_of(0), 9)
    with pytest.raises(ValueError, match=message):
        step(server.pages, server.plan({"a": 9}, {"a"}), features=features)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(server.pages))


def test_slots_outside_the_pool_are_refused(model: LoadedModel, step: UpdateStep) -> None:
    pages = create_pages(config_of(model))
    end = pages.num_pages(step.kv_cache_config.kv_cache_groups[step.encoder.group_ids[0]].pool_id) * 4
    with pytest.raises(ValueError, match=rf"expected slots in \[-1, {end}\), got 5 to {end}"):
        step.encode(pages, features_of(0), [np.array([*range(5, 11), end])])


def test_shapes_and_layers_that_read_an_encoder_come_together(model: LoadedModel) -> None:
    with pytest.raises(ValueError, match=r"expected shapes of encoder inputs where layers read an .* 0 shapes"):
        make_update_step(model.module, config_of(model), BUCKETS)
    with pytest.raises(ValueError, match=r"and nowhere else, got 2 shapes and groups \(\)"):
        make_update_step(ToyModel(num_layers=2), toy_config(), BUCKETS, encoder_shapes=ENCODER_SHAPES)


def test_an_encoder_writes_every_layer_once_in_the_layers_shape(model: LoadedModel) -> None:
    config = config_of(model)
    (group_id,) = [i for i, group in enumerate(config.kv_cache_groups) if CROSS in group.layer_names]
    slots = {group_id: np.arange(4, 7, dtype=np.int32)}
    cache = EncoderCache(create_pages(config), slots, config, Placement.create())
    kv = np.zeros((3, CROSS_HEADS, HEAD_DIM), np.float32)
    with pytest.raises(ValueError, match=r"expected a layer out of \('layers.0.cross', .*, got 'layers.0'"):
        cache.write_cross("layers.0", kv, kv)
    with pytest.raises(ValueError, match=r"expected K and V of \(\(3, 2, 8\), \(3, 2, 8\)\), got \(2, 2, 8\)"):
        cache.write_cross(CROSS, kv[:2], kv)
    with pytest.raises(ValueError, match=r"got \(3, 1, 8\) and \(3, 1, 8\)"):
        cache.write_cross(CROSS, kv[:, :1], kv[:, :1])
    cache.write_cross(CROSS, kv, kv)
    assert cache.unwritten_layers == ("layers.1.cross",)
    with pytest.raises(ValueError, match=r"layer 'layers.0.cross' is written twice for one encoder input"):
        cache.write_cross(CROSS, kv, kv)


def test_refuses_what_is_no_cross_attention(model: LoadedModel) -> None:
    config = config_of(model)
    group_ids = [i for i, group in enumerate(config.kv_cache_groups) if group.kv_cache_spec.reads_encoder]
    batch = DeviceBatch.empty(Bucket(4, 2, 2), len(config.kv_cache_groups), encoder=group_ids)
    cache = StepCache(create_pages(config), batch, config)
    q, options = np.zeros((4, Q_HEADS, HEAD_DIM), np.float32), AttentionOptions(sm_scale=1.0)
    with pytest.raises(NotImplementedError, match=r"layer 'layers.1': expected a cache of encoder tokens, got full"):
        cache.attend_cross("layers.1", q, options)
    with pytest.raises(ValueError, match=r"expected queries of 2 \* n heads of 8, got \(3, 8\)"):
        cache.attend_cross(CROSS, q[:, :3], options)
    for masked in ({"sliding_window": 4}, {"attention_chunk_size": 4}, {"num_sink_tokens": 1}):
        with pytest.raises(ValueError, match="expected options without a mask"):
            cache.attend_cross(CROSS, q, AttentionOptions(sm_scale=1.0, **masked))
    assert cache.attend_cross(CROSS, q, options).shape == q.shape
    with pytest.raises(ValueError, match=r"layer 'layers.0.cross' attends twice in one step"):
        cache.attend_cross(CROSS, q, options)


def test_an_encoder_that_skips_a_layer_is_refused(model: LoadedModel) -> None:
    class Lazy(type(model.module)):  # type: ignore[misc]
        def encode(self, features: jax.Array, cache: EncoderCache) -> None:
            cross = self.crosses[0]
            cache.write_cross(cross.name, *cross.keys_and_values(self.frontend(features.reshape(-1, 10))))

    step = make_update_step(Lazy(model.config), config_of(model), BUCKETS, encoder_shapes=ENCODER_SHAPES)
    with pytest.raises(ValueError, match=r"the encoder did not write layers \('layers.1.cross',\)"):
        step.encode(create_pages(config_of(model)), features_of(0), [np.arange(4, 11)])
