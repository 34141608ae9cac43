"""Integers of AWQ and GPTQ: weights stored [in, out], with a scale and a zero point for each group of inputs.

Flow:    quantization_config -> [awq, gptq] -> Awq, Gptq -> a layout for each module
Source:  AutoAWQ's awq/utils/packing_utils.py; AutoGPTQ's qlinear modules and GPTQModel's format "gptq_v2"

    AWQ    qweight int32[in, out / 8], qzeros int32[in / group, out / 8], scales float16[in / group, out]; a word has
           outputs 0, 2, 4, 6, 1, 3, 5, 7 of eight, lowest bits first
    GPTQ   qweight int32[in * bits / 32, out], qzeros int32[in / group, out * bits / 32], scales as above, lowest bits
           first; g_idx int32[in] is the group of each input, which need not be in order (desc_act). A zero point is
           stored less one, modulo 2 ** bits; in the format gptq_v2 as it is
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvjax.errors import ConfigError
from kvjax.models.quantised.scaled import ScaledIntegers
from kvjax.models.quantised.scheme import Layout, Misfit, Parts, Scheme, part_of

SCALES = ("F16", "BF16", "F32")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight outputs
_COMPANIONS = {".qweight": ("packed", ".weight"), ".qzeros": ("zeros", ".weight"), ".scales": ("scales", ".weight")}


@dataclass(frozen=True)
class Awq(Scheme):
    """`quant_method` "awq", four bits."""

    group_size: int  # inputs; -1: all
    has_zero: bool  # else the zero point is 8

    companions: ClassVar[Mapping[str, tuple[str, str]]] = _COMPANIONS
    carriers: ClassVar[frozenset[str]] = frozenset({"packed", "scales"})

    def layout(self, name: str, parts: Parts) -> Layout:
        """Eight outputs a word."""
        packed = part_of(parts, "packed", "scales", ("I32",))
        if len(packed.shape) != 2:
            raise Misfit(f"expected {packed.name} of two dimensions, got shape {packed.shape}")
        inputs, outputs = packed.shape[0], packed.shape[1] * 8
        size = inputs if self.group_size == -1 else self.group_size
        num_groups = -(-inputs // size)
        return ScaledIntegers(
            packed,
            part_of(parts, "scales", "packed", SCALES, (num_groups, outputs)),
            part_of(parts, "zeros", "packed", ("I32",), (num_groups, packed.shape[1])) if self.has_zero else None,
            None,
            (size, 1),
            (outputs, inputs),
            num_bits=4,
            packed_axis=1,
            zero_axis=1,
            middle=8,
            order=AWQ_ORDER,
            is_transposed=True,
        )


@dataclass(frozen=True)
class Gptq(Scheme):
    """`quant_method` "gptq", of 2, 4 or 8 bits."""

    num_bits: int
    group_size: int  # inputs; -1: all
    zero_shift: int  # added to zero points as they are stored

    companions: ClassVar[Mapping[str, tuple[str, str]]] = {**_COMPANIONS, ".g_idx": ("g_idx", ".weight")}
    carriers: ClassVar[frozenset[str]] = frozenset({"packed", "scales"})

    def layout(self, name: str, parts: Parts) -> Layout:
        """Several inputs a word, and several zero points."""
        per_word = 32 // self.num_bits
        packed = part_of(parts, "packed", "scales", ("I32",))
        if len(packed.shape) != 2:
            raise Misfit(f"expected {packed.name} of two dimensions, got shape {packed.shape}")
        inputs, outputs = packed.shape[0] * per_word, packed.shape[1]
        size = inputs if self.group_size == -1 else self.group_size
        num_groups = -(-inputs // size)
        return ScaledIntegers(
            packed,
            part_of(parts, "scales", "packed", SCALES, (num_groups, outputs)),
            part_of(parts, "zeros", "packed", ("I32",), (num_groups, -(-outputs // per_word))),
            part_of(parts, "g_idx", "packed", ("I32", "I64"), (inputs,)) if "g_idx" in parts else None,
            (size, 1),
            (outputs, inputs),
            num_bits=self.num_bits,
            packed_axis=0,
            zero_axis=1,
            middle=0,
            zero_shift=self.zero_shift,
            group_axis=0,
            is_transposed=True,
        )


def awq(config: Mapping[str, Any], where: str) -> Awq:
    """The scheme of a `quantization_config`.

    Raises:
        ConfigError: a group size that cannot be.
        NotImplementedError: another number of bits, or another packing than that of "gemm".
    """
    version = str(config.get("version") or config.get("format") or "gemm").lower()
    if config.get("bits", 4) != 4 or version != "gemm" or config.get("backend") == "llm-awq":
        raise NotImplementedError(
            f"{where}: expected AWQ of 4 bits, packed as 'gemm', got {config.get('bits', 4)!r} bits and {version!r}: "
            "take a release in that form, or the model's own in bfloat16"
        )
    return Awq(_group_size(config, where), config.get("zero_point", True) is not False)


def gptq(config: Mapping[str, Any], where: str) -> Gptq:
    """The scheme of a `quantization_config`.

    Raises:
        ConfigError: a group size that cannot be.
        NotImplementedError: another number of bits, modules with settings of their own, or another format.
    """
    form = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
    bits = config.get("bits")
    own = [one for one in config.get("dynamic") or {} if not str(one).startswith("-:")]
    if bits not in (2, 4, 8) or form not in ("gptq", "gptq_v2") or config.get("is_marlin_format") or own:
        raise NotImplementedError(
            f"{where}: expected GPTQ of 2, 4 or 8 bits in the format gptq or gptq_v2, the same for all modules, got "
            f"{bits!r} bits, {form!r} and {len(own)} modules of their own: take a release in that form, or the model's "
            "own in bfloat16"
        )
    return Gptq(bits, _group_size(config, where), 1 if form == "gptq" else 0)


def _group_size(config: Mapping[str, Any], where: str) -> int:
    size = config.get("group_size", config.get("q_group_size", 128))
    if type(size) is not int or (size < 1 and size != -1):
        raise ConfigError(f"{where}: expected 'group_size' as a positive integer or -1, got {size!r}")
    return size


__all__ = ["AWQ_ORDER", "Awq", "Gptq", "awq", "gptq"]
