"""Dense decoders: full attention, windows, soft caps, every kind of rotary embedding, token sinks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from scripts.goldens.family import TINY, Arrays, Family, TokenInputs, rope

HEAD_DIM: dict[str, Any] = {"head_dim": 16}
SHORT_FACTORS = [1.0, 1.05, 1.1, 1.3, 1.7, 2.2]  # one per rotated pair of phi3_longrope
LONG_FACTORS = [1.0, 1.5, 2.5, 4.0, 6.0, 8.0]
SINK_TOKENS = 4
WINDOW = 16
DYNAMIC_FACTOR = 4.0


class SinkWindowInputs(TokenInputs):
    """Every query sees the last WINDOW tokens, itself included, and the first SINK_TOKENS; positions stay absolute."""

    def arguments(self, model: torch.nn.Module, token_ids: np.ndarray, extras: Arrays, start: int) -> dict[str, Any]:
        keys, queries = torch.arange(len(token_ids)), torch.arange(start, len(token_ids))[:, None]
        seen = (keys <= queries) & ((keys > queries - WINDOW) | (keys < SINK_TOKENS))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        return super().arguments(model, token_ids, extras, start) | {"attention_mask": mask[None, None]}


def stretch_to_longest(model: torch.nn.Module) -> None:
    """Dynamic NTK with the frequencies of the longest sequence, `factor * max_position_embeddings` tokens, always.

    transformers takes those of the present sequence, so that keys change with every token and no cache can hold them.
    """
    rotary, config = model.model.rotary_emb, model.config
    compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["dynamic"]
    longest = int(DYNAMIC_FACTOR * config.max_position_embeddings)
    rotary.inv_freq, rotary.attention_scaling = compute(config, None, seq_len=longest)
    rotary.rope_type = "default"  # else transformers computes them again


def llama3_rope() -> dict[str, Any]:
    return rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)


def llama(rope_parameters: dict[str, Any], **changes: Any) -> transformers.PreTrainedConfig:
    sizes = TINY | HEAD_DIM | {"num_hidden_layers": 2} | changes
    return transformers.LlamaConfig(**sizes, rope_parameters=rope_parameters)


def families() -> dict[str, Family]:
    return {
        "llama": Family(config=llama(llama3_rope(), num_hidden_layers=3), logits_stride=4),
        "qwen3": Family(
            config=transformers.Qwen3Config(
                **TINY | HEAD_DIM | {"num_attention_heads": 4, "num_key_value_heads": 2},
                num_hidden_layers=3,
                tie_word_embeddings=True,
                rope_parameters=rope(rope_theta=100000.0),
            ),
            logits_stride=4,
        ),
        "gemma3": Family(
            config=transformers.Gemma3TextConfig(
                **TINY | HEAD_DIM,
                num_hidden_layers=7,
                sliding_window=16,
                query_pre_attn_scalar=24,
                final_logit_softcapping=30.0,
                rope_parameters={
                    "full_attention": rope("linear", factor=4.0, rope_theta=1000000.0),
                    "sliding_attention": rope(),
                },
            ),
            logits_stride=4,
        ),
        "qwen2": Family(
            config=transformers.Qwen2Config(
                **TINY,
                num_hidden_layers=4,
                tie_word_embeddings=True,
                use_sliding_window=True,
                sliding_window=16,
                max_window_layers=2,
                rope_parameters=rope(),
            ),
            flips_final_norm=True,
        ),
        "mistral": Family(
            config=transformers.MistralConfig(
                **TINY | HEAD_DIM, num_hidden_layers=3, sliding_window=16, rope_parameters=rope()
            )
        ),
        "phi3": Family(
            config=transformers.Phi3Config(**TINY, num_hidden_layers=3, sliding_window=16, rope_parameters=rope())
        ),
        "phi3_longrope": Family(
            config=transformers.Phi3Config(
                **TINY | {"num_attention_heads": 4, "num_key_value_heads": 2},
                num_hidden_layers=2,
                tie_word_embeddings=True,
                original_max_position_embeddings=32,
                rope_parameters=rope(
                    "longrope",
                    partial_rotary_factor=0.75,
                    short_factor=SHORT_FACTORS,
                    long_factor=LONG_FACTORS,
                    original_max_position_embeddings=32,
                ),
            )
        ),
        "gemma2": Family(
            config=transformers.Gemma2Config(
                **TINY | HEAD_DIM,
                num_hidden_layers=4,
                sliding_window=16,
                query_pre_attn_scalar=24,
                attn_logit_softcapping=3.0,
                final_logit_softcapping=10.0,
                rope_parameters=rope(),
            ),
            flips_final_norm=True,
        ),
        "llama_linear": Family(config=llama(rope("linear", factor=4.0))),
        "llama_dynamic": Family(
            config=llama(rope("dynamic", factor=DYNAMIC_FACTOR), max_position_embeddings=48),
            prepare=stretch_to_longest,
        ),
        "llama_yarn": Family(
            config=llama(rope("yarn", factor=8.0, beta_fast=8.0, beta_slow=1.0, original_max_position_embeddings=64))
        ),
        "streaming_llm": Family(
            config=llama(rope()),
            inputs=SinkWindowInputs(),
            constants={"num_sink_tokens": np.int32(SINK_TOKENS), "window": np.int32(WINDOW)},
        ),
    }
