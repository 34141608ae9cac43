"""Every case that `tpu_compile_all.py` compiles: the ops over the model shapes that their packages list.

Flow:    case types of the ops + shards -> [shape_cases] -> ShapeCase -> compile_one
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from scripts.lab.compiled import compiled_types, shape_settings

MAX_SHARDS = 8
# Pages in slabs that they do not fill; states behind those of a convolution.
IN_SLABS = {
    "causal_conv1d": "slabs=1 rest=4097 tokens=64 seqs=64",
    "compressor_update": "slabs=8 rest=8",
    "gated_delta_rule": "slabs=1 before=96 tokens=64",
    "indexer_topk": "slabs=8 rest=8",
    "kv_write": "slabs=8 rest=8",
    "latent_write": "slabs=8 rest=8",
    "mla_paged_attention": "slabs=8 rest=8",
    "page_ops": "slabs=8 before=12",
    "ragged_paged_attention": "slabs=65 rest=32 page=16 heads=16 kv_heads=2 head_dim=256 write=1",
    "ring_delta_rule": "slabs=1 before=96",
    "ring_scan": "slabs=1 before=96",
    "selective_scan": "slabs=1 before=96 model=jamba-1.5-mini",
    "sparse_mla_attention": "slabs=8 rest=8",
}


@dataclass(frozen=True)
class ShapeCase:
    """One compilation, whatever the chip."""

    op: str
    label: str  # the first shape that asks for it, and its shards
    settings: tuple[str, ...]


def shape_cases(ops: Iterable[str] | None = None, extra: tuple[str, ...] = ()) -> list[ShapeCase]:
    """The cases of `ops` (None: all) in order, those of equal settings once; `extra` settings go to every case."""
    found: dict[tuple[str, tuple[str, ...]], ShapeCase] = {}
    for op in compiled_types("tpu") if ops is None else ops:
        for label, settings in _of_op(op):
            case = ShapeCase(op, label, (*settings, *extra))
            found.setdefault((op, case.settings), case)
    return list(found.values())


def subset(cases: list[ShapeCase], chips: tuple[str, ...], per_op: int = 4) -> list[tuple[str, ShapeCase]]:
    """(chip, case): of each op one in slabs, and up to `per_op` of the cases, spread over its shapes and shards.

    Both are spread over the chips in turn.
    """
    picked = []
    for n, op in enumerate(dict.fromkeys(case.op for case in cases)):
        picked.append((chips[n % len(chips)], ShapeCase(op, "in slabs", tuple(IN_SLABS[op].split()))))
        own = [case for case in cases if case.op == op]
        places = [i * (len(own) - 1) // max(per_op - 1, 1) for i in range(per_op)]
        picked += [(chips[i % len(chips)], own[place]) for i, place in enumerate(places)]
    return picked


def _of_op(op: str) -> Iterator[tuple[str, list[str]]]:
    case_type = compiled_types("tpu")[op]
    for num_shards in range(1, MAX_SHARDS + 1):
        for label, settings in shape_settings(case_type, num_shards):
            yield f"{label} / {num_shards}", settings
