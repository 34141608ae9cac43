"""Weights that a checkpoint has in a few bits beside scales: a file for each way to store them.

Flow:    quantization_config -> [scheme_of] -> Scheme -> [dequantised] -> tensors of floats, made when they are read
"""

from __future__ import annotations

from kvjax.models.quantised.scheme import Scheme, dequantised
from kvjax.models.quantised.schemes import QUANT_METHODS, scheme_of

__all__ = ["QUANT_METHODS", "Scheme", "dequantised", "scheme_of"]
