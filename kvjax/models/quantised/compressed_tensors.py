"""Checkpoints of compressed-tensors: integers and floats of 4 to 8 bits, each module as its group of the config says.

Flow:    quantization_config -> [compressed_tensors] -> CompressedTensors -> a layout for each module
Source:  the package compressed-tensors 0.20, compressors/ and quantization/quant_args.py

    stored beside                     what                                      formats
    weight int8, weight_scale         a number each                             int-quantized, naive-quantized
    weight float8, weight_scale       a number each                             float-quantized, mxfp8-quantized
    weight_packed int32, weight_shape 32 // bits numbers a word, lowest first   pack-quantized
    weight_packed uint8               two four-bit floats a byte                mxfp4-, nvfp4-pack-quantized

A packed number of b bits is the number plus 2 ** (b - 1); zero points are packed as numbers are, but along rows. What
is quantised is what has a scale; `ignore` says which modules have none. How activations are quantised is not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.errors import ConfigError
from kvjax.models.quantised.grid import check_blocks
from kvjax.models.quantised.scaled import FLOAT8, ScaledFloats, ScaledIntegers, floats_of
from kvjax.models.quantised.scheme import Layout, Misfit, Parts, Scheme, Shape, part_of
from kvjax.models.tensor_files import StoredTensor

FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "nvfp4-pack-quantized",
    "mixed-precision",  # each group has its own
)
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")
FLOAT_SCALES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class WeightArgs:
    """How the weights of one group of modules are quantised."""

    targets: tuple[str, ...]
    num_bits: int
    strategy: str
    group_size: int  # of columns, where the strategy has groups
    block: tuple[int, int]  # where it has blocks
    is_symmetric: bool

    def covers(self, module: str) -> int:
        """How closely a target names a module: 3 by its name, 2 by a pattern, 1 by its class, 0 not at all."""
        if module in self.targets:
            return 3
        if any(one.startswith("re:") and re.match(one.removeprefix("re:"), module) for one in self.targets):
            return 2
        return int("Linear" in self.targets)

    def block_in(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns that have one scale."""
        match self.strategy:
            case "tensor":
                return shape[-2], shape[-1]
            case "channel":
                return 1, shape[-1]
            case "block":
                return self.block
            case _:
                return 1, self.group_size


@dataclass(frozen=True)
class CompressedTensors(Scheme):
    """`quant_method` "compressed-tensors"."""

    groups: tuple[WeightArgs, ...]

    companions: ClassVar[Mapping[str, tuple[str, str]]] = {
        f".weight_{role}": (role, ".weight")
        for role in ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
    }
    carriers: ClassVar[frozenset[str]] = frozenset({"packed", "scale"})
    unused: ClassVar[tuple[str, ...]] = (
        *Scheme.unused,
        ".input_zero_point",
        ".output_zero_point",
        ".input_global_scale",
        ".q_scale",
        ".k_zero_point",
        ".v_zero_point",
    )

    def layout(self, name: str, parts: Parts) -> Layout:
        """By the dtype that numbers are stored in."""
        role = "packed" if "packed" in parts else "weight"
        stored = part_of(parts, role, "scale", ("I32", "U8") if role == "packed" else ("I8", *FLOAT8))
        args = self._args_of(stored.name.rpartition(".")[0])
        if stored.dtype in (*FLOAT8, "U8"):
            return _floats(parts, role, args)
        return _integers(parts, stored, args)

    def _args_of(self, module: str) -> WeightArgs:
        best = max(self.groups, key=lambda group: group.covers(module), default=None)
        if best is None or not best.covers(module):
            raise Misfit(f"expected {module} among the targets of a group of config_groups, got none that names it")
        return best


def _floats(parts: Parts, role: str, args: WeightArgs) -> ScaledFloats:
    weight, shape = floats_of(parts, role, "scale", (*FLOAT8, "U8"))
    scale = part_of(parts, "scale", role, (*FLOAT_SCALES, "F8_E4M3", "U8"))
    divisor = part_of(parts, "global_scale", "scale", ("F32",)) if "global_scale" in parts else None
    if divisor is not None and divisor.shape not in ((), (1,)):
        raise Misfit(f"expected {divisor.name} of one number, got shape {divisor.shape}")
    block = args.block_in(shape)
    check_blocks(scale, shape, block)
    return ScaledFloats(weight, scale, block, shape, divisor, is_in_dtype_of_scale=scale.dtype in FLOAT_SCALES)


def _integers(parts: Parts, weight: StoredTensor, args: WeightArgs) -> ScaledIntegers:
    scale = part_of(parts, "scale", "packed" if "packed" in parts else "weight", FLOAT_SCALES)
    shape = _shape_of(parts, weight, args)
    block = args.block_in(shape)
    check_blocks(scale, shape, block)
    num_scales = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    is_packed = weight.dtype == "I32"
    zero = None
    if not args.is_symmetric:
        rows = -(-num_scales[0] // (32 // args.num_bits)) if is_packed else num_scales[0]
        zero = part_of(parts, "zero_point", "scale", ("I32",) if is_packed else ("I8", "I32"))
        if zero.shape not in ((rows, num_scales[1]), *([(1,), ()] if num_scales == (1, 1) else [])):
            raise Misfit(f"expected {zero.name} of shape {(rows, num_scales[1])} beside {scale.name}, got {zero.shape}")
    groups = part_of(parts, "g_idx", "scale", ("I32", "I64"), (shape[1],)) if "g_idx" in parts else None
    return ScaledIntegers(
        weight,
        scale,
        zero,
        groups,
        block,
        shape,
        num_bits=args.num_bits if is_packed else 0,
        packed_axis=1,
        zero_axis=0,
        middle=1 << (args.num_bits - 1) if is_packed else 0,
    )


def _shape_of(parts: Parts, weight: StoredTensor, args: WeightArgs) -> Shape:
    """The shape of a module's weight; that of a packed one is a small tensor beside it."""
    if len(weight.shape) != 2:
        raise Misfit(f"expected {weight.name} of two dimensions, got shape {weight.shape}")
    if weight.dtype != "I32":
        return weight.shape
    per_word = 32 // args.num_bits
    if "shape" not in parts:
        return weight.shape[0], weight.shape[1] * per_word
    stored = part_of(parts, "shape", "packed", ("I64", "I32"), (2,))
    shape = tuple(stored.read().tolist())
    if shape[0] != weight.shape[0] or -(-shape[1] // per_word) != weight.shape[1]:
        raise Misfit(
            f"expected {stored.name} of a matrix that {weight.shape} words of {per_word} numbers hold, got {shape}"
        )
    return shape


def compressed_tensors(config: Mapping[str, Any], where: str) -> CompressedTensors:
    """The scheme of a `quantization_config`.

    Raises:
        ConfigError: groups that cannot be.
        NotImplementedError: weights are sparse or rotated, or in a format that is not read.
    """
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise ConfigError(f"{where}: expected 'config_groups' as an object of objects, got {groups!r:.80}")
    for name in (config.get("format"), *(group.get("format") for group in groups.values())):
        if name is not None and name not in FORMATS:
            raise NotImplementedError(
                f"{where}: expected weights in one of the formats {', '.join(FORMATS)} of compressed-tensors, got "
                f"{name!r}: save the model in one of those, or dequantised"
            )
    sparsity, rotations = config.get("sparsity_config") or {}, config.get("transform_config") or {}
    if not isinstance(sparsity, Mapping) or not isinstance(rotations, Mapping):
        raise ConfigError(f"{where}: expected 'sparsity_config' and 'transform_config' as objects")
    if sparsity.get("format", "dense") != "dense" or rotations.get("config_groups"):
        raise NotImplementedError(
            f"{where}: expected weights that are quantised only, got a sparsity_config or transform_config of "
            "compressed-tensors: save the model without, or dequantised"
        )
    args = (_weight_args(group, where) for group in groups.values() if group.get("weights") is not None)
    return CompressedTensors(tuple(args))


def _weight_args(group: Mapping[str, Any], where: str) -> WeightArgs:
    weights, targets = group["weights"], group.get("targets")
    if (
        not isinstance(weights, Mapping)
        or not isinstance(targets, list)
        or not all(isinstance(x, str) for x in targets)
    ):
        raise ConfigError(f"{where}: expected a group with an object 'weights' and a list 'targets', got {group!r:.80}")
    bits = weights.get("num_bits", 8)
    if type(bits) is not int or not 1 <= bits <= 8:
        raise ConfigError(f"{where}: expected 'num_bits' in [1, 8], got {bits!r}")
    size, block = weights.get("group_size"), weights.get("block_structure") or (1, 1)
    strategy = weights.get("strategy") or ("tensor" if size is None else "channel" if size == -1 else "group")
    if strategy not in STRATEGIES:
        raise ConfigError(f"{where}: expected 'strategy' among {', '.join(STRATEGIES)}, got {strategy!r}")
    needs_size = strategy in ("group", "tensor_group")
    if needs_size and (type(size) is not int or size < 1):
        raise ConfigError(f"{where}: expected 'group_size' as a positive integer, got {size!r}")
    if not isinstance(block, list | tuple) or len(block) != 2 or any(type(one) is not int or one < 1 for one in block):
        raise ConfigError(f"{where}: expected 'block_structure' as two positive integers, got {block!r}")
    for target in targets:
        _check_pattern(target, where)
    return WeightArgs(
        targets=tuple(targets),
        num_bits=bits,
        strategy=strategy,
        group_size=int(size or 1) if needs_size else 1,
        block=(block[0], block[1]),
        is_symmetric=weights.get("symmetric", True) is not False,
    )


def _check_pattern(target: str, where: str) -> None:
    try:
        re.compile(target.removeprefix("re:") if target.startswith("re:") else "")
    except re.error as error:
        raise ConfigError(f"{where}: expected 'targets' of patterns that can be, got {target!r}: {error}") from error


__all__ = ["FORMATS", "CompressedTensors", "compressed_tensors"]
