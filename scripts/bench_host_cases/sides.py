"""The sides that there are here; vLLM's only where it is installed and asked for (`bench_host.py --vllm`)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from bench_host_cases.kvjax_side import KvjaxSide
from bench_host_cases.plain_side import PlainSide

if TYPE_CHECKING:
    from bench_host_cases.case import Side

KVJAX, PLAIN = KvjaxSide(), PlainSide()
VLLM: Side | None = None
if find_spec("vllm") is not None:
    from bench_host_cases.vllm_side import VllmSide

    VLLM = VllmSide()
