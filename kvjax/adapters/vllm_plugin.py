"""vLLM's plugin: kvjax's manager in each process that vLLM starts, where the environment asks for it.

Flow:    entry point "kvjax" of group vllm.general_plugins, $KVJAX_VLLM -> [register] -> install(), one line in the log

    KVJAX_VLLM=1 vllm serve MODEL

vLLM imports this module in every process, asked for or not, so it stands outside the adapter and imports that on use.
"""

from __future__ import annotations

import logging
import os

from kvjax import __version__
from kvjax.adapters.switches import is_on

VARIABLE = "KVJAX_VLLM"


def register() -> None:
    """Installs kvjax's manager if the environment variable KVJAX_VLLM is 1; vLLM calls it once in every process.

    Raises:
        MissingStackError, UnknownStackError: as `install`.
        ValueError: the variable is neither 0 nor 1, or KVJAX_POLICY names no policy.
    """
    if not is_on(VARIABLE):
        return
    from kvjax.adapters.policy import chosen_policy
    from kvjax.adapters.vllm.description import vllm_module
    from kvjax.adapters.vllm.installation import install

    install()
    logging.getLogger("vllm.kvjax").info(  # below vLLM's own logger, so that its handler prints it
        "kvjax %s manages the KV cache of vllm %s in process %d (policy %r)",
        __version__,
        vllm_module("vllm").__version__,
        os.getpid(),
        chosen_policy(None),
    )
