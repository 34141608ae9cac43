"""vLLM's plugin: kvjax's manager in each process that vLLM starts, where the environment asks for it.

Flow:    entry point "kvjax" of group vllm.general_plugins, $KVJAX_VLLM -> [register] -> install(), one line in the log

    KVJAX_VLLM=1 vllm serve MODEL
"""

from __future__ import annotations

import logging
import os

from kvjax import __version__
from kvjax.adapters.policy import chosen_policy
from kvjax.adapters.vllm.description import vllm_module
from kvjax.adapters.vllm.installation import install

VARIABLE = "KVJAX_VLLM"


def register() -> None:
    """Installs kvjax's manager if the environment variable KVJAX_VLLM is 1; vLLM calls it once in every process.

    Raises:
        MissingStackError, UnknownStackError: as `install`.
        ValueError: the variable is neither 0 nor 1, or KVJAX_POLICY names no policy.
    """
    value = os.environ.get(VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"expected environment variable {VARIABLE} of 0 or 1, got {value!r}; correct it or unset it")
    if value == "0":
        return
    install()
    logging.getLogger("vllm.kvjax").info(  # below vLLM's own logger, so that its handler prints it
        "kvjax %s manages the KV cache of vllm %s in process %d (policy %r)",
        __version__,
        vllm_module("vllm").__version__,
        os.getpid(),
        chosen_policy(None),
    )
