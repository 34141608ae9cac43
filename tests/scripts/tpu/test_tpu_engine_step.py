"""A step of the engine, compiled for four TPU chips that are not here, works on the pages in place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.lab.engine_step import is_in_place, num_page_copies
from scripts.lab.tpu.chips import ENVIRONMENT
from tests.scripts.needs_libtpu import needs_libtpu

ROOT = Path(__file__).parents[3]
PAGES = (512, 64, 2, 2, 128)
MODULE = """
  %pages = bf16[512,64,2,2,128]{4,3,2,1,0:T(2,128)(2,1)} parameter(0)
  %other = bf16[512,64,2,128]{3,2,1,0:T(8,128)(2,1)} copy(%x)
  %write = (bf16[512,64,2,2,128]{4,3,2,1,0:T(2,128)(2,1)}, u32[]) custom-call(%pages), custom_call_target="tpu_custom_call"
  %written = bf16[512,64,2,2,128]{4,3,2,1,0:T(2,128)(2,1)} get-tuple-element(%write), index=0
"""  # noqa: E501
COPIES = (
    "%c = bf16[512,64,2,2,128]{4,3,2,1,0:T(2,128)(2,1)} copy(%pages)",
    "%c = (bf16[512,64,2,2,128]{4,3,2,1,0}, bf16[512,64,2,2,128]{4,3,2,1,0}, u32[]) copy-start(%pages)",
    "%c = bf16[512,64,2,2,128]{4,3,2,1,0} fusion(%pages), kind=kLoop, calls=%f",
    "%c = f32[512,64,2,2,128]{4,3,2,1,0} convert(%pages)",
)


SCATTER = """
%fused (p0: bf16[512,64,2,2,128], p1: bf16[8,64,2,2,128]) -> bf16[512,64,2,2,128] {
  %p0 = bf16[512,64,2,2,128]{4,3,2,1,0} parameter(0)
  ROOT %s = bf16[512,64,2,2,128]{4,3,2,1,0} scatter(%p0, %ids, %p1), to_apply=%second
}

ENTRY %main {
  %c = bf16[512,64,2,2,128]{4,3,2,1,0} fusion(%pages, %rows), kind=kCustom, calls=%fused
}
"""


def test_kernels_and_writes_into_pages_are_no_copies() -> None:
    assert num_page_copies(MODULE, [PAGES]) == 0
    for write in ("scatter", "dynamic-update-slice"):
        assert num_page_copies(MODULE + SCATTER.replace("scatter", write), [PAGES]) == 0
    in_vmem = "%c = bf16[512,64,2,2,128]{4,3,2,1,0:T(2,128)(2,1)S(1)} copy-done(%start)"
    assert num_page_copies(MODULE + in_vmem, [PAGES]) == 0
    assert num_page_copies(MODULE + SCATTER.replace("ROOT %s", "ROOT %s = x[1] add(%a)\n  %s"), [PAGES]) == 1


@pytest.mark.parametrize("line", COPIES)
def test_copies_are_found(line: str) -> None:
    assert num_page_copies(MODULE + line, [PAGES]) == 1


def test_pages_that_are_copied_or_not_aliased_are_told() -> None:
    report = {"page_copies": 0, "page_arrays": 2, "aliased_arrays": 2, "page_bytes": 10, "aliased_bytes": 11}
    assert is_in_place(report)
    assert not is_in_place(report | {"page_copies": 1})
    assert not is_in_place(report | {"aliased_arrays": 1})
    assert not is_in_place(report | {"aliased_bytes": 9})


@pytest.mark.sweep
@needs_libtpu
def test_a_step_of_four_chips_is_in_place() -> None:
    """Two layers of Llama 3 8B over a v6e 2x2, tensor parallel, in the pages.

    Decoding with the write, and tiles, in the first layer; the write and decoding of wanted tokens in the last.
    """
    command = [sys.executable, "-m", "scripts.lab.engine_step", "v6e", "llama-3-8b", "--layers", "2"]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=280, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr[-2000:]
    report = json.loads(result.stdout.splitlines()[-1])
    assert is_in_place(report)
    assert report["page_arrays"] == report["aliased_arrays"] == 2
    assert report["edit_aliased_bytes"] == report["page_bytes"]
    assert report["kernel_calls"] == 4
    assert report["temp_bytes"] < report["page_bytes"] // 8
