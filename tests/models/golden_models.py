"""The committed goldens: models, prompts, Hugging Face's float32 logits and greedy continuations.

    for golden in goldens_of("gemma3"):          # any of FAMILIES, or "demo"
        golden.prompt, golden.logits, golden.greedy, golden.decode_logits
    load_model(model_folder("gemma3"))

The tiny models have no end token, so greedy continuations are 32 tokens long; the demo's end with its end token where
the model wrote one. At every greedy step the two best logits differ by more than 1e-3 (`golden.least_gap`), and at
every token the last chosen and the first refused score of every top-k (experts, groups of experts, entries of an
indexer) by more than 1e-4 (`golden.choice_gap`), so any correct float32 implementation must give the same tokens.
Prompts are 37 to 98 tokens long, where a family needs it 200 (the demo's 77 to 255); the longest crosses what
FAMILIES says; the first four of a tiny model share their first 37 tokens.

`golden.extras` is what a family's prompts have beside tokens; `constants_of(name)` what holds for all its prompts:

    streaming_llm   constants num_sink_tokens, window: a query sees the last `window` tokens, itself included, and the
                    first `num_sink_tokens`; positions are those of the whole text. The folder is a plain Llama.
    llama_dynamic   rotary frequencies of the longest sequence (factor * max_position_embeddings) at every length
    phi3_longrope   every pass is longer than original_max_position_embeddings, so that all use the long factors
    deepseek_v4_sparse  of a pass over the prompt, per layer with an indexer: extras index_scores float32[layers,
                    num_tokens, num_entries], -inf where an entry is not complete at a token; indices int32[layers,
                    num_tokens, index_topk] of the entries chosen, ascending, -1 where there are fewer
    whisper         extras features float32[num_mel_bins, num_frames]; prompts 0 and 1 have the same, as have 2 and 3
    qwen3_vl        extras embeds float32[num_rows, hidden] in the place of the tokens embed_tokens int32[num_rows];
                    deepstack float32[2, num_rows, hidden] added to what layers 0 and 1 return for them; rope_positions
                    int32[3, num_tokens + 32]. Prompts 0 and 1 show one image in the shared prefix, 2 and 3 another,
                    4 two images, 5 none. The folder's vision tower (model.visual) is not used.
    qwen2_5_vl      as qwen3_vl, with deepstack float32[0, num_rows, hidden]; and qwen2_5_vl_odd
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvjax.demo import demo_model_path

GOLDENS = Path(__file__).parent / "goldens"
# Tokens of the widest window, chunk, choice of an indexer, compressed entry or block of states that a family has; 0: it
# has none.
FAMILIES = {
    "llama": 0,
    "llama_linear": 0,
    "llama_dynamic": 0,
    "llama_yarn": 0,
    "streaming_llm": 16,
    "qwen2": 16,
    "qwen3": 0,
    "mistral": 16,
    "phi3": 16,
    "phi3_longrope": 0,
    "gemma2": 16,
    "gemma3": 16,
    "mixtral": 0,
    "qwen3_moe": 0,
    "gpt_oss": 16,
    "llama4": 32,
    "deepseek_v2": 0,
    "deepseek_v3": 0,
    "deepseek_v32": 16,
    "deepseek_v32_odd": 13,
    "glm_moe_dsa": 16,
    "glm_moe_dsa_odd": 13,
    "mistral_large4": 16,
    "mistral_large4_odd": 13,
    "deepseek_v4": 128,
    "deepseek_v4_sparse": 128,
    "gemma3n": 16,
    "gemma4": 16,
    "jamba": 16,
    "granite_moe_hybrid": 32,
    "nemotron_h": 32,
    "qwen3_next": 64,
    "qwen3_5": 64,
    "kimi_linear": 64,
    "lfm2": 8,
    "lfm2_moe": 8,
    "lfm3": 11,
    "lfm3_odd": 13,
    "mamba2": 16,
    "mamba2_odd": 16,
    "falcon_h1": 32,
    "falcon_h1_odd": 32,
    "olmo_hybrid": 32,
    "olmo_hybrid_odd": 32,
    "whisper": 0,
    "qwen3_vl": 0,
    "olmo2": 0,
    "olmo2_odd": 0,
    "olmo3": 16,
    "olmo3_odd": 13,
    "smollm3": 0,
    "smollm3_odd": 13,
    "gemma": 0,
    "gemma_odd": 0,
    "glm4": 0,
    "glm4_odd": 0,
    "glm4_moe": 0,
    "glm4_moe_odd": 0,
    "cohere": 0,
    "cohere_odd": 0,
    "cohere2": 16,
    "cohere2_odd": 13,
    "granite": 0,
    "granite_odd": 0,
    "ministral3": 0,
    "ministral3_odd": 13,
    "mistral3": 0,
    "mistral3_odd": 0,
    "minimax_m2": 0,
    "minimax_m2_odd": 0,
    "qwen2_5_vl": 0,
    "qwen2_5_vl_odd": 13,
}
TINY_MODELS = ("llama", "qwen3", "gemma3")
GOLDEN_MODELS = (*TINY_MODELS, "demo")


@dataclass(frozen=True)
class Golden:
    """One prompt of one model."""

    prompt: np.ndarray  # int32[num_tokens]
    positions: np.ndarray  # int32[num_positions] where logits were kept; the last is the prompt's last token
    logits: np.ndarray  # float32[num_positions, vocab] of a full forward pass
    greedy: np.ndarray  # int32[num_generated]
    decode_logits: np.ndarray  # float32[num_generated, vocab]; row k chose greedy[k]; the demo has none
    least_gap: float  # between the two best logits, over the steps that made `greedy`
    choice_gap: float  # between the last chosen and the first refused score of a top-k; infinite without one
    extras: dict[str, np.ndarray] = field(default_factory=dict)


def model_folder(name: str) -> Path:
    """The Hugging Face folder of a golden model."""
    return demo_model_path() if name == "demo" else GOLDENS / name


def goldens_of(name: str) -> list[Golden]:
    """All prompts of a model."""
    with np.load(GOLDENS / name / "goldens.npz") as data:
        goldens = []
        for i, (least_gap, choice_gap) in enumerate(zip(data["least_gap"], data["choice_gap"], strict=True)):
            arrays = {key.removesuffix(f"_{i}"): data[key] for key in data.files if key.endswith(f"_{i}")}
            goldens.append(
                Golden(
                    **{key: arrays.pop(key) for key in ("prompt", "positions", "logits", "greedy", "decode_logits")},
                    least_gap=float(least_gap),
                    choice_gap=float(choice_gap),
                    extras=arrays,
                )
            )
        return goldens


def constants_of(name: str) -> dict[str, np.ndarray]:
    """What holds for all prompts of a model beside its config."""
    with np.load(GOLDENS / name / "goldens.npz") as data:
        return {
            key: data[key]
            for key in data.files
            if not key.rpartition("_")[2].isdigit() and key not in ("least_gap", "choice_gap")
        }
