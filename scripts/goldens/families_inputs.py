"""Models given more than tokens: audio features (Whisper), image embeddings and M-RoPE positions (Qwen3-VL)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from scripts.goldens.family import TINY, Arrays, Family, TokenInputs, rope
from scripts.goldens.oracle import NUM_GREEDY_TOKENS

SPECIALS: dict[str, Any] = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
EMBEDDING_SCALE = 4.0
SHARPNESS = 4.0
NUM_MEL_BINS = 8
NUM_FRAMES = 80
RECORDINGS = (0, 0, 1, 1, 2, 3)  # of prompts; two that share a prefix and a recording share a cache, others do not

IMAGE_TOKEN, VIDEO_TOKEN, VISION_START, VISION_END = 250, 251, 252, 253
HIDDEN_SIZE = 32
NUM_DEEPSTACK = 2
MERGE = 2  # patches to a side of what one placeholder stands for
# Of prompts: (image, first placeholder, patches high, patches wide)
IMAGES: tuple[tuple[tuple[int, int, int, int], ...], ...] = (
    ((0, 10, 6, 8),),
    ((0, 10, 6, 8),),
    ((1, 10, 6, 8),),
    ((1, 10, 6, 8),),
    ((2, 5, 4, 4), (3, 30, 8, 6)),
    (),
)


class AudioInputs(TokenInputs):
    """A recording's features for the encoder, tokens for the decoder."""

    def extras(self, model: torch.nn.Module, prompt: np.ndarray, number: int) -> Arrays:
        """features: float32[NUM_MEL_BINS, NUM_FRAMES]"""
        random = np.random.default_rng(RECORDINGS[number])
        return {"features": random.normal(size=(NUM_MEL_BINS, NUM_FRAMES)).astype(np.float32)}

    def arguments(self, model: torch.nn.Module, token_ids: np.ndarray, extras: Arrays, start: int) -> dict[str, Any]:
        tokens = super().arguments(model, token_ids, extras, start)["input_ids"]
        return {"decoder_input_ids": tokens, "input_features": torch.from_numpy(extras["features"])[None]}


class ImageInputs(TokenInputs):
    """Embeddings of images in the places of placeholder tokens, and more of them for the first layers' outputs."""

    num_deepstack = NUM_DEEPSTACK
    hidden_size = HIDDEN_SIZE

    def mark(self, prompt: np.ndarray, number: int) -> np.ndarray:
        prompt = np.where(prompt < IMAGE_TOKEN, prompt, prompt - 10)
        for _, first, high, wide in IMAGES[number]:
            end = first + high * wide // MERGE**2
            prompt[first - 1], prompt[first:end], prompt[end] = VISION_START, IMAGE_TOKEN, VISION_END
        return prompt

    def extras(self, model: torch.nn.Module, prompt: np.ndarray, number: int) -> Arrays:
        """
        embeds          float32[num_rows, hidden_size] of the rows of all images of the prompt
        deepstack       float32[num_deepstack, num_rows, hidden_size] added to what layer k returns
        embed_tokens    int32[num_rows] tokens of the prompt that the rows stand for
        rope_positions  int32[3, num_tokens + NUM_GREEDY_TOKENS] time, height, width, of the continuation too
        """
        rows = [np.zeros((0, 1 + self.num_deepstack, self.hidden_size))]
        for image, _, high, wide in IMAGES[number]:
            shape = (high * wide // MERGE**2, 1 + self.num_deepstack, self.hidden_size)
            rows.append(np.random.default_rng(image).normal(scale=0.5, size=shape))
        embeds = np.ascontiguousarray(np.concatenate(rows).astype(np.float32).swapaxes(0, 1))
        token_ids = torch.from_numpy(np.append(prompt, np.zeros(NUM_GREEDY_TOKENS, np.int64)))[None]
        grids = [[1, high, wide] for _, _, high, wide in IMAGES[number]]
        positions, _ = model.model.get_rope_index(
            token_ids, (token_ids == IMAGE_TOKEN).int(), torch.tensor(grids) if grids else None
        )
        return {
            "embeds": embeds[0],
            "deepstack": embeds[1:],
            "embed_tokens": np.flatnonzero(prompt == IMAGE_TOKEN).astype(np.int32),
            "rope_positions": positions[:, 0].numpy().astype(np.int32),
        }

    def arguments(self, model: torch.nn.Module, token_ids: np.ndarray, extras: Arrays, start: int) -> dict[str, Any]:
        arguments = super().arguments(model, token_ids, extras, start)
        positions = torch.from_numpy(extras["rope_positions"][:, None, start : len(token_ids)].astype(np.int64))
        if len(extras["embeds"]) and start == 0:
            arguments["mm_encoder_outputs"] = {"image": self.image(extras)}
        return arguments | {"position_ids": positions}

    def image(self, extras: Arrays) -> Any:
        """What the vision tower would give."""
        return BaseModelOutputWithDeepstackFeatures(
            pooler_output=[torch.from_numpy(extras["embeds"])],
            deepstack_features=[[torch.from_numpy(layer)] for layer in extras["deepstack"]],
        )


def hear_tokens(model: torch.nn.Module) -> None:
    """Continuations that vary: embeddings as large as what the layers add to them, sharp attention, small biases."""
    decoder = model.model.decoder
    for scale, param in (
        (EMBEDDING_SCALE, decoder.embed_tokens.weight),
        (EMBEDDING_SCALE, decoder.embed_positions.weight),
        (1.0 / EMBEDDING_SCALE, decoder.layer_norm.weight),  # logits of the spread that others have
    ):
        param.mul_(scale)
    for name, param in decoder.named_parameters():
        if name.endswith("q_proj.weight"):
            param.mul_(SHARPNESS)
        elif name.endswith("bias"):
            param.mul_(0.25)


def never_write_placeholders(model: torch.nn.Module) -> None:
    """No continuation has a token that stands for an image."""
    model.lm_head.weight[IMAGE_TOKEN:].zero_()


def families() -> dict[str, Family]:
    return {
        "whisper": Family(
            config=transformers.WhisperConfig(
                **SPECIALS,
                vocab_size=TINY["vocab_size"],
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
                num_mel_bins=NUM_MEL_BINS,
                max_source_positions=NUM_FRAMES // 2,
                max_target_positions=160,
                decoder_start_token_id=0,
                begin_suppress_tokens=None,
            ),
            model_class=transformers.AutoModelForSpeechSeq2Seq,
            inputs=AudioInputs(),
            final_norm="model.decoder.layer_norm",
            flips_final_norm=True,
            settle=hear_tokens,
        ),
        "qwen3_vl": Family(
            config=transformers.Qwen3VLConfig(
                text_config=TINY
                | {
                    "hidden_size": HIDDEN_SIZE,
                    "intermediate_size": 64,
                    "head_dim": 16,
                    "num_hidden_layers": 3,
                    "rope_parameters": rope(mrope_section=[4, 2, 2], mrope_interleaved=True),
                },
                vision_config={
                    "depth": 2,
                    "hidden_size": 16,
                    "intermediate_size": 16,
                    "num_heads": 2,
                    "in_channels": 1,
                    "patch_size": 2,
                    "temporal_patch_size": 1,
                    "spatial_merge_size": MERGE,
                    "out_hidden_size": HIDDEN_SIZE,
                    "num_position_embeddings": 16,
                    "deepstack_visual_indexes": [0, 1],
                },
                image_token_id=IMAGE_TOKEN,
                video_token_id=VIDEO_TOKEN,
                vision_start_token_id=VISION_START,
                vision_end_token_id=VISION_END,
            ),
            model_class=transformers.AutoModelForImageTextToText,
            inputs=ImageInputs(),
            final_norm="model.language_model.norm",
            settle=never_write_placeholders,
        ),
    }
