"""Every form of config.json that transformers reads means the same here, or is refused; its own files are all read.

config_forms.json, made by scripts/make_config_forms.py, says what transformers makes of each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvjax.errors import ConfigError
from kvjax.models import ModelConfig
from kvjax.models.registry import ARCHITECTURES as OURS
from scripts.goldens.config_forms import changed, forms, tied_forms
from scripts.goldens.small_configs import ARCHITECTURES, AROUND, small_config

FORMS = json.loads((Path(__file__).parents[1] / "config_forms.json").read_text(encoding="utf-8"))
REFUSALS = re.compile(
    "expected the key '(intermediate_size|layers_block_type|max_position_embeddings|num_attention_heads)', got none"
    "|expected one (value of )?'|rope_scaling and rope_parameters to say the same"  # two values
    "|'partial_rotary_factor' to be 1|expected 'rope_type' in rope_scaling|rope_parameters: unknown keys"  # not heeded
)
# transformers ties where nobody says so, unless a checkpoint has a head; those of released files without the key have.
SAYS_WHETHER_TIED = ("Mistral3ForConditionalGeneration",)
NO_MODEL = re.compile("'num_key_value_heads' to be")  # what transformers makes of the form, it cannot run


def parsed(data: dict[str, Any]) -> ModelConfig | str:
    """The config, or why it is refused."""
    try:
        return ModelConfig.from_dict(data)
    except ConfigError as error:
        return str(error)


def read_by_transformers(architecture: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """A form of its config, and what transformers writes of it."""
    normal, differences = FORMS[architecture]["normal"], FORMS[architecture]["differences"]
    yield small_config(architecture), normal
    for form, difference in zip(forms(small_config(architecture), normal), differences, strict=True):
        if difference is not None:
            yield form, changed(normal, difference)


def test_all_architectures_have_forms() -> None:
    assert set(ARCHITECTURES) == set(OURS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_config_that_transformers_writes_is_read(architecture: str) -> None:
    assert isinstance(parsed(FORMS[architecture]["normal"]), ModelConfig)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_config_without_an_architecture_is_of_its_model_type(architecture: str) -> None:
    """transformers writes such files of configs that no model was made of."""
    normal = FORMS[architecture]["normal"]
    assert parsed(normal | {"architectures": None}) == parsed(normal)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_form_means_what_transformers_makes_of_it_or_is_refused(architecture: str) -> None:
    """Keys that are missing, null, or otherwise, in short and in whole files; rotary embeddings in every spelling."""
    num_equal = 0
    for form, written in read_by_transformers(architecture):
        if architecture in SAYS_WHETHER_TIED and "tie_word_embeddings" not in form:
            written = written | {"tie_word_embeddings": False}
        ours, theirs = parsed(form), parsed(written)
        if isinstance(ours, str):
            assert isinstance(theirs, str) or REFUSALS.search(ours), (form, ours)
        elif not (isinstance(theirs, str) and NO_MODEL.search(theirs)):
            assert ours == theirs, form
            num_equal += 1
    assert num_equal > 30


@pytest.mark.parametrize("architecture", AROUND)
def test_output_heads_are_tied_where_those_of_transformers_are(architecture: str) -> None:
    """`tie_word_embeddings` outside and inside: missing, null, true, false."""
    expected = FORMS[architecture]["tied"]
    found = [
        vars(ModelConfig.from_dict(form))["tie_word_embeddings"] for form in tied_forms(small_config(architecture))
    ]
    known = [(ours, tied) for ours, tied in zip(found, expected, strict=True) if tied is not None]
    assert len(known) >= 9
    if architecture in SAYS_WHETHER_TIED:
        known = known[-6:]  # those with the outer key
    assert [ours for ours, _ in known] == [tied for _, tied in known]


def test_a_flag_that_is_null_is_false_and_a_scale_that_is_null_goes_by_the_heads() -> None:
    """As transformers computes, whatever it takes a missing key for."""
    deepseek = small_config("DeepseekV3ForCausalLM") | {"norm_topk_prob": None, "rope_interleave": None}
    config: Any = ModelConfig.from_dict(deepseek)
    assert (config.experts.norm_topk, config.attention.rope_interleaved) == (False, False)
    granite = small_config("GraniteMoeHybridForCausalLM") | {"mamba_conv_bias": None, "attention_multiplier": None}
    config = ModelConfig.from_dict(granite)
    assert (config.mamba.conv_bias, config.sm_scale) == (False, config.head_dim**-0.5)
