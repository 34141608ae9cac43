"""The guide's listing brings KV over as it stands, also where managers have new pages zeroed."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax.core
import kvjax.device
from kvjax.core import KVCacheManager, build_step_plan
from kvjax.device import KVPages, Placement, create_pages
from kvjax.device.pages.page_edits import edit_pages
from kvjax.transfer import PageReader, SentRequest

GUIDE = Path(__file__).parents[2] / "docs" / "guide" / "transfer.md"
NUM_TOKENS = 99  # that the listing sends


def numbered_pages(*args: Any, **options: Any) -> KVPages:
    """As `create_pages`, every number in a page another one."""
    return jax.tree.map(lambda x: jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), create_pages(*args, **options))


def entries_of(sent: SentRequest) -> Any:
    """The entries of the tokens that are sent, padding left out."""
    return jax.tree.map(lambda array: np.asarray(array).reshape(-1, *array.shape[2:])[:NUM_TOKENS], sent.arrays)


def test_what_the_listing_loads_outlives_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvjax.core, "KVCacheManager", partial(KVCacheManager, zero_new_pages=True))
    monkeypatch.setattr(kvjax.device, "create_pages", numbered_pages)
    code = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)[0]
    guide: dict[str, Any] = {}
    exec(compile(code, "guide", "exec"), guide)

    request, manager = guide["there"], guide["decode_manager"]
    request.num_computed_tokens = NUM_TOKENS
    plan = build_step_plan(manager, np.array([request.row]), np.array([1]))
    pages = edit_pages(guide["decode_pages"], plan, (8,))
    reader = PageReader(guide["decode"], Placement.create())
    chex.assert_trees_all_equal(entries_of(reader.read(pages, guide["pages"])), entries_of(guide["sent"]))
