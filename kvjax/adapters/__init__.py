"""Translations to serving stacks: each takes and returns a stack's own objects, over the managers of kvjax.core.

An adapter has no behaviour of its own. It imports without its stack; what it is used for imports the stack.
"""

__all__ = ["easydel", "sglang_jax", "tpu_inference", "vllm"]
