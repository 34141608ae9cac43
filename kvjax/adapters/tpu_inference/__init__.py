"""tpu-inference: attention metadata from a step plan, and how its kernels' pages lie."""

from kvjax.adapters.tpu_inference.layouts import (
    MLAv2Layout,
    RPAv3Hd64Layout,
    RPAv3Layout,
    SequenceOnLanesLayout,
)
from kvjax.adapters.tpu_inference.metadata import (
    TPU_INFERENCE,
    attention_metadata_fields,
    to_attention_metadata,
    to_grouped_attention_metadata,
)

__all__ = [
    "TPU_INFERENCE",
    "MLAv2Layout",
    "RPAv3Hd64Layout",
    "RPAv3Layout",
    "SequenceOnLanesLayout",
    "attention_metadata_fields",
    "to_attention_metadata",
    "to_grouped_attention_metadata",
]
