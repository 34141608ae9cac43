"""Paged KV-cache management for JAX serving stacks.

`kvjax.core` is the host side (numpy, no jax), `kvjax.device` the jax side, `kvjax.engine` and `kvjax.models` a small
reference stack on top, `kvjax.cli` the command line. Importing `kvjax` itself loads none of them.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
