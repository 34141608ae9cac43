"""Tiny checkpoints of each way to store quantised weights.

Flow:    families_*.py -> [cases] -> scripts/make_quantised_goldens.py -> tests/models/quantised/goldens/*

A case rounds the weights of a tiny model itself, as the library that writes such checkpoints does; reading them again
is left to transformers, whose numbers the goldens are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

from scripts.goldens.families_deepseek_v4 import families as families_of_v4
from scripts.goldens.families_experts import families as families_of_experts
from scripts.goldens.family import TINY, Family, rope

Tensors = dict[str, torch.Tensor]
FLOAT4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])  # by code
GROUP = 32  # inputs with one scale
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "router", "bias")  # parts of names of what stays as it is


@dataclass(frozen=True, kw_only=True)
class Case:
    """One quantised checkpoint."""

    family: Family
    quantization: dict[str, Any]  # `quantization_config`
    store: Callable[[str, torch.Tensor], Tensors]  # a weight's name and float32 values -> what is stored of it
    read: dict[str, Any]  # options of from_pretrained
    kept: tuple[str, ...] = KEPT

    def load(self, folder: Path) -> torch.nn.Module:
        """The checkpoint as transformers dequantises it, in float32."""
        options = {"attn_implementation": "eager", "dtype": torch.float32}
        return self.family.model_class.from_pretrained(folder, **options, **self.read).eval()

    def stored(self, tensors: Tensors) -> Tensors:
        """The checkpoint of a model's tensors in bfloat16."""
        result: Tensors = {}
        for name, tensor in tensors.items():
            is_kept = tensor.ndim < 2 or any(part in name for part in self.kept)
            result |= {name: tensor} if is_kept else self.store(name, tensor.float())
        return result


def llama(**changes: Any) -> Family:
    """Grouped heads, and an output head of its own."""
    config = transformers.LlamaConfig(**TINY | changes, num_hidden_layers=2, rope_parameters=rope())
    return Family(config=config, prompt_lengths=(45,), logits_stride=16)


def qwen3_moe() -> Family:
    """A dense layer, then a tensor for each expert and projection."""
    family = families_of_experts()["qwen3_moe"]
    return Family(config=family.config, prompt_lengths=(45,), logits_stride=16)


def gpt_oss() -> Family:
    """Experts, in one tensor each projection."""
    family = families_of_experts()["gpt_oss"]
    config = family.config.__class__(**family.config.to_dict() | {"hidden_size": 64, "intermediate_size": 64})
    config.num_hidden_layers = 2
    config.layer_types = config.layer_types[:2]
    return Family(config=config, prompt_lengths=(45,), logits_stride=16, transposed=family.transposed)


V4_BLOCK = 8


def small_deepseek_v4() -> Family:
    """A layer of each kind, and inputs of experts that 32 divides."""
    family = families_of_v4()["deepseek_v4"]
    sizes = {"num_hidden_layers": 3, "moe_intermediate_size": 32, "n_routed_experts": 4}
    layers = {name: getattr(family.config, name)[:3] for name in ("layer_types", "mlp_layer_types")}
    config = family.config.__class__(**family.config.to_dict() | sizes | layers)
    return replace(family, config=config, prompt_lengths=(140,), logits_stride=16)


def block_fp8(block: tuple[int, int]) -> Callable[[str, torch.Tensor], Tensors]:
    """Blocks scaled to the largest finite number of E4M3."""

    def store(name: str, weight: torch.Tensor) -> Tensors:
        rows, columns = (size // one for size, one in zip(weight.shape, block, strict=True))
        blocks = weight.reshape(rows, block[0], columns, block[1])
        scale = blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(weight.shape)
        return {name: values, f"{name}_scale_inv": scale}

    return store


def float4_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers a byte [..., in / 32, 16] and exponents [..., in / 32] of weights [..., in].

    Each block of 32 inputs is scaled so that its largest number is between 3 and 6.
    """
    groups = weight.unflatten(-1, (-1, GROUP))
    exponents = torch.floor(torch.log2(groups.abs().amax(-1) / 6)) + 1
    scaled = groups / torch.exp2(exponents)[..., None]
    codes = (scaled[..., None] - FLOAT4).abs().argmin(-1).to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def mxfp4(name: str, weight: torch.Tensor) -> Tensors:
    """Experts [E, in, out] in blocks of 32 inputs."""
    if "experts" not in name:
        return {name: weight.to(torch.bfloat16)}
    blocks, exponents = float4_blocks(weight.transpose(1, 2))
    return {f"{name}_blocks": blocks, f"{name}_scales": exponents}


def deepseek_v4(name: str, weight: torch.Tensor) -> Tensors:
    """Experts of four bits, all else in blocks of E4M3; every scale is a power of two, named `scale`."""
    stem = name.removesuffix("weight")
    if ".experts." in name:
        values, exponents = float4_blocks(weight)
        return {name: values.flatten(-2).view(torch.int8), f"{stem}scale": exponents.view(torch.float8_e8m0fnu)}
    rows, columns = (size // V4_BLOCK for size in weight.shape)
    blocks = weight.reshape(rows, V4_BLOCK, columns, V4_BLOCK)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max)))
    values = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(weight.shape)
    return {name: values, f"{stem}scale": scale.to(torch.float8_e8m0fnu)}


def compressed(
    args: dict[str, Any], form: str, scale_dtype: torch.dtype = torch.bfloat16
) -> Callable[[str, torch.Tensor], Tensors]:
    """As compressed-tensors itself compresses a module."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args), format=form)
    compressor = BaseCompressor.get_value_from_registry(form)

    def store(name: str, weight: torch.Tensor) -> Tensors:
        scale, zero_point = calculate_qparams(*extremes(weight, args), scheme.weights)
        state = {"weight": weight, "weight_scale": scale.to(scale_dtype), "weight_zero_point": zero_point}
        stem = name.removesuffix("weight")
        return {stem + key: value.contiguous() for key, value in compressor.compress(state, scheme).items()}

    return store


def extremes(weight: torch.Tensor, args: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The least and the largest number of each part that has one scale."""
    match args["strategy"]:
        case "tensor":
            return weight.min().reshape(1), weight.max().reshape(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case _:
            groups = weight.unflatten(1, (-1, args["group_size"]))
            return groups.amin(-1), groups.amax(-1)


def compressed_case(args: dict[str, Any], form: str, activations: dict[str, Any] | None = None) -> Case:
    """One group of modules, all but the output head."""
    group = {"targets": ["Linear"], "weights": args, "input_activations": activations, "output_activations": None}
    return Case(
        family=llama(),
        quantization={
            "config_groups": {"group_0": group},
            "format": form,
            "global_compression_ratio": None,
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quant_method": "compressed-tensors",
            "quantization_status": "compressed",
        },
        store=compressed(args, form),
        read={"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)},
    )


DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed_cases() -> dict[str, Case]:
    """Formats of compressed-tensors, by what is rounded how."""
    int4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": False}
    int8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    fp8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    return {
        "ct_int4_asymmetric": compressed_case(int4, "pack-quantized"),
        "ct_int8": compressed_case(int8, "int-quantized", DYNAMIC),
        "ct_int8_packed": compressed_case(int8, "pack-quantized"),
        "ct_fp8": compressed_case(fp8, "float-quantized", DYNAMIC | {"type": "float"}),
        "ct_fp8_tensor": compressed_case(fp8 | {"strategy": "tensor"}, "naive-quantized"),
    }


def shifted_words(values: torch.Tensor, num_bits: int) -> torch.Tensor:
    """int32[..., n * num_bits / 32] words of values [..., n], the lowest bits first."""
    apart = values.to(torch.int64).unflatten(-1, (-1, 32 // num_bits))
    words = (apart << torch.arange(0, 32, num_bits)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


GPTQ_BITS = 4


def gptq(name: str, weight: torch.Tensor) -> Tensors:
    """Groups of 32 inputs in an order of their own (desc_act); zero points are 1 to 15, stored less one."""
    num_inputs, most = weight.shape[1], 2**GPTQ_BITS - 1
    order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(len(name)))
    groups = torch.empty(num_inputs, dtype=torch.int64)
    groups[order] = torch.arange(num_inputs) // GROUP
    members = weight[:, order].unflatten(1, (-1, GROUP))  # [out, groups, 32]
    low, high = members.amin(-1).clamp(max=0), members.amax(-1).clamp(min=0)
    scales = ((high - low) / most).T.to(torch.float16)  # [groups, out]
    zeros = (-low.T / scales.float()).round().clamp(1, most)
    numbers = ((weight.T / scales.float()[groups]).round() + zeros[groups]).clamp(0, most)
    stem = name.removesuffix("weight")
    return {
        f"{stem}qweight": shifted_words(numbers.T, GPTQ_BITS).T.contiguous(),
        f"{stem}qzeros": shifted_words(zeros - 1, GPTQ_BITS).contiguous(),
        f"{stem}scales": scales.contiguous(),
        f"{stem}g_idx": groups.to(torch.int32),
    }


@dataclass(frozen=True, kw_only=True)
class GptqCase(Case):
    """transformers reads GPTQ with other packages only; Intel's auto-round has linear layers that run on CPU."""

    def load(self, folder: Path) -> torch.nn.Module:
        """The plain model with auto-round's layers in place of what is quantised; they dequantise in each call."""
        from auto_round_extension.torch.qlinear_torch_zp import QuantLinear

        tensors = load_file(folder / "model.safetensors")
        model = self.family.model_class.from_config(
            self.family.config, dtype=torch.float32, attn_implementation="eager"
        )
        for stem in (name.removesuffix(".qweight") for name in tensors if name.endswith(".qweight")):
            plain = model.get_submodule(stem)
            layer = QuantLinear(GPTQ_BITS, GROUP, plain.in_features, plain.out_features, bias=False, g_idx=True)
            model.set_submodule(stem, layer)
        model.load_state_dict(tensors)
        return model.eval()


AWQ_PLACES = [0, 2, 4, 6, 1, 3, 5, 7]  # the output in each four bits of a word


def awq(name: str, weight: torch.Tensor) -> Tensors:
    """Groups of 32 inputs, from their least to their largest number in 16 steps, eight outputs a word."""
    groups = weight.T.reshape(-1, 32, weight.shape[0])
    scales = ((groups.amax(1) - groups.amin(1)) / 15).to(torch.float16)
    zeros = (-groups.amin(1) / scales.float()).round().clamp(0, 15)
    numbers = ((groups / scales.float()[:, None]).round() + zeros[:, None]).clamp(0, 15)

    def words(values: torch.Tensor) -> torch.Tensor:
        return shifted_words(values.unflatten(-1, (-1, 8))[..., AWQ_PLACES].flatten(-2), 4)

    stem = name.removesuffix("weight")
    flat = numbers.reshape(-1, weight.shape[0])
    return {f"{stem}qweight": words(flat), f"{stem}qzeros": words(zeros), f"{stem}scales": scales}


@dataclass(frozen=True, kw_only=True)
class AwqCase(Case):
    """transformers reads AWQ with another package only; compressed-tensors converts it to a form that it reads."""

    def load(self, folder: Path) -> torch.nn.Module:
        """The checkpoint, converted by compressed-tensors and dequantised by transformers."""
        converter = AutoAWQConverter.from_autoawq_config(self.quantization)
        tensors = converter.process(load_file(folder / "model.safetensors"))
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"] = converter.update_config(None).model_dump(mode="json")
        with tempfile.TemporaryDirectory() as home:
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()},
                Path(home) / "model.safetensors",
                metadata={"format": "pt"},
            )
            (Path(home) / "config.json").write_text(json.dumps(config))
            return super().load(Path(home))


def cases() -> dict[str, Case]:
    """Every case by its name."""
    return {
        "fp8_block": Case(
            family=qwen3_moe(),
            quantization={
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [8, 8],
            },
            store=block_fp8((8, 8)),
            read={"quantization_config": transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(8, 8))},
        ),
        "mxfp4": Case(
            family=gpt_oss(),
            quantization={
                "modules_to_not_convert": [
                    "model.layers.*.self_attn",
                    "model.layers.*.mlp.router",
                    "model.embed_tokens",
                    "lm_head",
                ],
                "quant_method": "mxfp4",
            },
            store=mxfp4,
            read={"quantization_config": transformers.Mxfp4Config(dequantize=True)},
        ),
        **compressed_cases(),
        "deepseek_v4": Case(
            family=small_deepseek_v4(),
            quantization={
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "scale_fmt": "ue8m0",
                "weight_block_size": [V4_BLOCK, V4_BLOCK],
            },
            store=deepseek_v4,
            read={
                "quantization_config": transformers.FineGrainedFP8Config(
                    dequantize=True, weight_block_size=(V4_BLOCK, V4_BLOCK)
                )
            },
            kept=("embed", "head", "norm", "gate", "hc_", "compressor", "weights_proj", "tid2eid"),
        ),
        "gptq": GptqCase(
            family=llama(intermediate_size=64),  # auto-round wants no more outputs than inputs where these are ordered
            quantization={
                "bits": GPTQ_BITS,
                "checkpoint_format": "gptq",
                "desc_act": True,
                "group_size": GROUP,
                "quant_method": "gptq",
                "sym": False,
            },
            store=gptq,
            read={},
        ),
        "awq": AwqCase(
            family=llama(),
            quantization={
                "bits": 4,
                "group_size": 32,
                "modules_to_not_convert": None,
                "quant_method": "awq",
                "version": "gemm",
                "zero_point": True,
            },
            store=awq,
            read={"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)},
        ),
    }


__all__ = ["Case", "Tensors", "cases"]
