"""Model folders that vLLM's tests find in place of the Hugging Face hub: published shapes, a tokenizer of few words.

Usage:   python stand_in_models.py FOLDER; then run pytest in FOLDER
Flow:    published config.json fields -> [folders named as on the hub] -> vLLM's ModelConfig, which takes a folder first

The tests read shapes, the vocabulary's size and special tokens; no weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "word_embed_proj_dim": 768,
    "max_position_embeddings": 2048,
    "vocab_size": 50272,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "pad_token_id": 1,
    "torch_dtype": "float16",
}
LLAMA_7B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
    "vocab_size": 32064,
    "torch_dtype": "float16",
}
QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
}
MODELS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": OPT,
    "facebook/opt-350m": OPT
    | {
        "hidden_size": 1024,
        "ffn_dim": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "word_embed_proj_dim": 512,
    },
    "Qwen/Qwen1.5-7B": QWEN2,
    "Qwen/Qwen3-0.6B": QWEN2
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "llava-hf/llava-1.5-7b-hf": {
        "model_type": "llava",
        "architectures": ["LlavaForConditionalGeneration"],
        "image_token_index": 32000,
        "image_seq_length": 576,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": LLAMA_7B,
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_attention_heads": 16,
            "num_hidden_layers": 24,
            "image_size": 336,
            "patch_size": 14,
            "projection_dim": 768,
            "vocab_size": 32000,
        },
        "torch_dtype": "float16",
    },
}
MODELS["Qwen/Qwen2.5-VL-3B-Instruct"] = QWEN2 | {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128000,
    "vision_start_token_id": 5,
    "vision_end_token_id": 6,
    "image_token_id": 7,
    "video_token_id": 8,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
        "fullatt_block_indexes": [7, 15, 23, 31],
    },
}

IMAGE_PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "size": {"shortest_edge": 336},
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "rescale_factor": 1 / 255,
}
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}
QWEN_IMAGE_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": IMAGE_PROCESSOR["image_mean"],
    "image_std": IMAGE_PROCESSOR["image_std"],
}
PROCESSORS = {  # by model type: the processor's own config, and its image processor's
    "llava": (PROCESSOR, IMAGE_PROCESSOR),
    "qwen2_5_vl": ({"processor_class": "Qwen2_5_VLProcessor"}, QWEN_IMAGE_PROCESSOR),
}
PLACEHOLDERS = {  # words that stand for inputs, at the ids of the configs above
    "llava": {"<image>": 32000},
    "qwen2_5_vl": {"<|vision_start|>": 5, "<|vision_end|>": 6, "<|image_pad|>": 7, "<|video_pad|>": 8},
}


def write_tokenizer(folder: Path, model_type: str) -> None:
    """A tokenizer of whole words, and the words that stand for inputs."""
    placeholders = PLACEHOLDERS.get(model_type, {})
    size = max([64, *placeholders.values()])
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "hello": 4} | placeholders
    taken = set(words.values())
    words |= {f"w{i}": i for i in range(size) if i not in taken}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    special = ["<pad>", "<s>", "</s>", "<unk>", *placeholders]
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "Qwen2Tokenizer" if model_type == "qwen2_5_vl" else "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 4096,
    }
    if model_type in PROCESSORS:
        config["processor_class"] = PROCESSORS[model_type][0]["processor_class"]
        config["chat_template"] = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def main() -> None:
    """Writes every model."""
    for name, config in MODELS.items():
        folder = Path(sys.argv[1]) / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        model_type = config["model_type"]
        write_tokenizer(folder, model_type)
        if model_type in PROCESSORS:
            processor, image_processor = PROCESSORS[model_type]
            (folder / "processor_config.json").write_text(json.dumps(processor))
            (folder / "preprocessor_config.json").write_text(json.dumps(image_processor))


if __name__ == "__main__":
    main()
