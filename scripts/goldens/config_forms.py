"""Forms of config.json: keys that are missing, null or otherwise, rotary embeddings in every spelling. No torch.

Flow:    small_configs.py -> [forms] -> scripts/make_config_forms.py, tests/models/config_files/test_config_forms.py

A change is [outer keys, keys of the language model], a key that is removed as "...".
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import TypeAlias

from scripts.goldens.small_configs import Data

Change: TypeAlias = list[Data]

REMOVED = "..."
UNCHANGED = frozenset(  # keys whose forms are not tried: of no decoder, or of its size
    [
        "_name_or_path",
        "architectures",
        "audio_config",
        "chunk_size_feed_forward",
        "hidden_size",
        "id2label",
        "initializer_range",
        "is_encoder_decoder",
        "label2id",
        "model_type",
        "num_hidden_layers",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "text_config",
        "transformers_version",
        "use_cache",
        "vision_config",
        "vocab_size",
    ]
)
YARN: Data = {"factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3: Data = YARN | {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: tuple[Data, ...] = (
    {"type": "default"},
    {"type": "linear", "factor": 4.0},
    {"type": "dynamic", "factor": 4.0},
    {"type": "yarn", "factor": 4.0},
    {"type": "yarn", **YARN},
    {"type": "yarn", **YARN, "mscale": 1.0, "mscale_all_dim": 0.7, "beta_fast": 16, "truncate": False},
    {"type": "yarn", **YARN, "attention_factor": 1.5},
    {"type": "llama3", **LLAMA3},
    {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **YARN},
    {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32},
    {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
)


def text_of(data: Data) -> Data:
    """The language model's keys."""
    text: Data = data.get("text_config", data)
    return text


def rope_forms() -> Iterator[Data]:
    """Rotary embeddings in every spelling."""
    for rope in ROPES:
        kind = {"rope_type": rope["type"]} | {key: value for key, value in rope.items() if key != "type"}
        yield from ({"rope_scaling": rope}, {"rope_scaling": kind, "rope_theta": 5e5})
        yield from ({"rope_parameters": kind | {"rope_theta": 5e5}}, {"rope_parameters": rope, "rope_theta": 5e5})
        yield {"rope_parameters": kind | {"rope_theta": 5e5}, "rope_scaling": kind, "rope_theta": 5e5}
        yield {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": kind}
        yield {"rope_scaling": kind, "partial_rotary_factor": 0.5}
        yield {"rope_parameters": {"full_attention": kind, "sliding_attention": {"rope_theta": 7e3}}}
        yield {"rope_parameters": {"full_attention": kind}, "rope_scaling": kind}
        yield {"rope_scaling": kind, "rope_local_base_freq": 7e3, "rope_theta": 5e5}
        yield {"rope_scaling": kind, "compress_rope_theta": 7e3}


def key_forms(data: Data) -> Iterator[Data]:
    """Each key missing, null, the other flag or in reverse order."""
    for key, value in data.items():
        if key not in UNCHANGED:
            yield {key: REMOVED}
            yield {key: None}
            if isinstance(value, bool):
                yield {key: not value}
            if isinstance(value, list) and value[::-1] != value:
                yield {key: value[::-1]}


def changed(data: Data, change: Change) -> Data:
    """`data` with a change."""
    data = copy.deepcopy(data)
    for part, keys in zip((data, text_of(data)), change, strict=True):
        part.update(copy.deepcopy(keys))
        for key in [key for key, value in keys.items() if value == REMOVED]:
            del part[key]
    return data


def forms(raw: Data, normal: Data) -> Iterator[Data]:
    """Changes of `raw`, which has little more than sizes, and of `normal`, which has every key."""
    for data in (raw, normal):
        changes: list[Change] = [[{}, change] for change in key_forms(text_of(data))]
        if "text_config" in data:
            changes += [[change, {}] for change in key_forms(data)]
        yield from (changed(data, change) for change in changes)
    yield from (changed(raw, [{}, change]) for change in rope_forms())


def tied_forms(raw: Data) -> Iterator[Data]:
    """`tie_word_embeddings` outside and inside of `text_config`: missing, null, true, false."""
    for outer, inner in itertools.product((REMOVED, None, True, False), repeat=2):
        given = changed(raw, [{"tie_word_embeddings": 0}, {"tie_word_embeddings": 0}])
        yield changed(given, [{"tie_word_embeddings": outer}, {"tie_word_embeddings": inner}])
