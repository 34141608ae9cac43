"""Which scheme a checkpoint's `quantization_config` asks for.

Flow:    config.json -> [scheme_of] -> Scheme; None: weights are not quantised
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvjax.errors import ConfigError
from kvjax.models.quantised.block_fp8 import block_fp8
from kvjax.models.quantised.compressed_tensors import compressed_tensors
from kvjax.models.quantised.mxfp4 import mxfp4
from kvjax.models.quantised.packed_rows import awq, gptq
from kvjax.models.quantised.scheme import Scheme

_SCHEMES: dict[str, Callable[[Mapping[str, Any], str], Scheme]] = {
    "awq": awq,
    "compressed-tensors": compressed_tensors,
    "fp8": block_fp8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}
QUANT_METHODS = tuple(_SCHEMES)  # that are read
UNNAMED = "an unnamed method"


def scheme_of(data: Mapping[str, Any], where: str) -> Scheme | None:
    """The scheme of a parsed config.json.

    Raises:
        ConfigError: the scheme's settings cannot be; `where` and the key are in the message.
        NotImplementedError: weights are quantised by something that is not read, or in a form that is not.
    """
    config = quantization_config(data, where)
    if not config:
        return None
    method = str(config.get("quant_method", UNNAMED))
    if method not in _SCHEMES:
        raise NotImplementedError(
            f"{where}: expected weights as they are, or quantised by {', '.join(_SCHEMES)}, got weights quantised by "
            f"{method}: take a release of the model in bfloat16 or in one of those, or load it with the library that "
            "quantised it, dequantise it and save it in bfloat16"
        )
    return _SCHEMES[method](config, where)


def quantization_config(data: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """The object of that name: the outer one, else that of `text_config`, as transformers looks for it."""
    text = data.get("text_config")
    config = data.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)
    if config is not None and not isinstance(config, Mapping):
        raise ConfigError(f"{where}: expected 'quantization_config' to be an object, got {config!r:.80}")
    return config


__all__ = ["QUANT_METHODS", "UNNAMED", "quantization_config", "scheme_of"]
