"""What is peculiar to DeepSeek V2 and V3: how experts are chosen, which tensors a checkpoint has, which configs run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from kvjax.configs import load_model_config
from kvjax.errors import CheckpointError, ConfigError
from kvjax.models import ModelConfig, load_model
from kvjax.models.configs.deepseek import DeepseekConfig
from kvjax.models.configs.experts import ExpertsConfig
from kvjax.models.layers.experts import choose_experts
from tests.models.golden_models import model_folder


def chosen_by_hand(scores: np.ndarray, bias: np.ndarray, config: ExpertsConfig) -> list[int]:
    """Experts of one token: of the best groups the best ones, group by group and expert by expert."""
    ranked = scores + bias
    groups = np.split(np.arange(config.num_experts), config.num_groups)
    ranks = [sum(sorted(ranked[group])[-config.group_best :]) for group in groups]
    best = sorted(range(config.num_groups), key=lambda group: -ranks[group])[: config.top_groups]
    allowed = [expert for group in best for expert in groups[group]]
    return sorted(allowed, key=lambda expert: -ranked[expert])[: config.top_k]


@pytest.mark.parametrize(("score", "group_best"), [("sigmoid", 2), ("softmax", 1), ("sqrtsoftplus", 2)])
@pytest.mark.parametrize("shift", [0.0, -2.0])
def test_experts_come_from_the_best_groups(score: str, group_best: int, shift: float) -> None:
    """Whatever the sign of scores plus bias: experts of other groups never count."""
    config = ExpertsConfig(
        num_experts=12, top_k=5, intermediate_size=1, norm_topk=True, score=score, scale=2.5, num_groups=4,
        top_groups=2, group_best=group_best,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((40, 12)).astype(np.float32)
    bias = (rng.standard_normal(12) + shift).astype(np.float32)
    exp = np.exp(logits.astype(np.float64))
    scores = {
        "softmax": exp / exp.sum(-1, keepdims=True),
        "sigmoid": exp / (1 + exp),
        "sqrtsoftplus": np.sqrt(np.log1p(exp)),
    }[score]
    weights, experts = choose_experts(jnp.asarray(logits), config, jnp.asarray(bias))
    for row, row_weights, row_scores in zip(np.asarray(experts), np.asarray(weights), scores, strict=True):
        expected = chosen_by_hand(row_scores, bias, config)
        assert row.tolist() == expected
        np.testing.assert_allclose(row_weights, 2.5 * row_scores[expected] / row_scores[expected].sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score": "cosine"}, "expected a score among softmax, sigmoid, sqrtsoftplus, got 'cosine'"),
        ({"num_groups": 5}, r"expected n_group to divide 12 experts and topk_group in \[1, n_group\], got 5 and 2"),
        ({"top_groups": 5}, r"got 4 and 5"),
        (
            {"top_k": 7},
            r"expected groups of at least 2 experts and 7 \(num_experts_per_tok\) in 2 groups \(topk_group\), got",
        ),
        ({"num_groups": 12, "top_groups": 12}, "got groups of 1"),
    ],
)
def test_choices_that_cannot_be_are_refused(changes: dict[str, Any], message: str) -> None:
    fields = {"num_experts": 12, "top_k": 5, "num_groups": 4, "top_groups": 2} | changes
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**fields, intermediate_size=1, norm_topk=True)


def test_the_published_config_is_read() -> None:
    """Sizes of arXiv 2412.19437, section 4.2; the softmax scale as of YaRN by 40: (0.1 ln 40 + 1)^2 / sqrt(192)."""
    config: Any = load_model_config("deepseek-v3")
    assert isinstance(config, DeepseekConfig)
    attention, experts = config.attention, config.experts
    assert (attention.num_heads, attention.latent_dim, attention.query_rank, attention.value_dim) == (
        128,
        512,
        1536,
        128,
    )
    assert (attention.nope_dim, attention.rope_dim) == (128, 64)
    assert attention.sm_scale == pytest.approx((0.1 * np.log(40) + 1) ** 2 / 192**0.5)
    assert (experts.num_experts, experts.top_k, experts.num_groups, experts.top_groups) == (256, 8, 8, 4)
    assert (config.first_expert_layer, config.shared_intermediate_size, experts.scale) == (3, 2048, 2.5)
    assert config.cache_words == "a latent of 576"
    config.check_split(8)
    with pytest.raises(ValueError, match="expected query heads to divide over 3 devices, got 128"):
        config.check_split(3)


def golden_config(name: str, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((model_folder(name) / "config.json").read_text())
    return config | changes


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "deepseek_v2",
            {"norm_topk_prob": True},
            "'norm_topk_prob' to be null or false, got True: transformers does not",
        ),
        (
            "deepseek_v2",
            {"topk_method": "noaux_tc"},
            "'topk_method' among greedy, group_limited_greedy, got 'noaux_tc'",
        ),
        ("deepseek_v3", {"topk_method": "greedy"}, "'topk_method' among noaux_tc, got 'greedy'"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "'scoring_func' among sigmoid, got 'softmax'"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "expected 'moe_layer_freq' to be 1, got 2"),
        ("deepseek_v3", {"n_group": 3}, "here: expected n_group to divide 16 experts"),
    ],
)
def test_configs_that_mean_something_else_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_dict(golden_config(name, **changes), where="here")


def test_greedy_choice_has_no_groups() -> None:
    config: Any = ModelConfig.from_dict(golden_config("deepseek_v2", topk_method="greedy"))
    assert config.experts.num_groups == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A writable copy of the tiny DeepSeek V3, with a layer that predicts further tokens."""
    folder = tmp_path / "deepseek_v3"
    shutil.copytree(model_folder("deepseek_v3"), folder)
    (folder / "config.json").write_text(json.dumps(golden_config("deepseek_v3", num_nextn_predict_layers=1)))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_layers_that_predict_further_tokens_are_ignored_and_no_others(folder: Path) -> None:
    load_model(folder, "float32")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"model.layers.4.norm.weight": np.zeros(2, np.float32)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.norm\.weight: expected no such tensor"):
        load_model(folder, "float32")


def test_scales_of_which_the_config_says_nothing_are_refused(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    scale = {"model.layers.0.self_attn.o_proj.weight_scale_inv": np.ones((1, 1), np.float32)}
    save_file(tensors | scale, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"got none beside 1 weights .*o_proj\.weight_scale_inv\): take the config"
    ):
        load_model(folder, "float32")


def test_the_bias_of_the_choice_stays_in_float32() -> None:
    """Differences of scores that decide are smaller than what bfloat16 keeps of a score near 1."""
    module: Any = load_model(model_folder("deepseek_v3"), "bfloat16").module
    assert module.layers[1].mlp.gate.e_score_correction_bias[...].dtype == jnp.float32
    assert module.layers[1].mlp.gate.kernel[...].dtype == jnp.bfloat16
