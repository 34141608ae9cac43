"""The process that compiles one case of GPUs without kernels: python -m scripts.gpu_aot.fallback NAME -> JSON.

Flow:    case -> op in Triton or XLA, lengths of its step -> compiled for a card -> launches, bytes, temporaries

How often loops run that end where the step does, and what kernels in Triton read and write, is computed from its
lengths, by the code that the op itself runs.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from scripts.gpu_aot.fallback_cases import CASES, Case
from scripts.gpu_aot.module_cost import Loop, ModuleCost
from scripts.gpu_aot.resources import Usage, parse_ptxas
from scripts.gpu_aot.target import A100, CARDS, prepare_environment

_PAGE = {"attention": 16, "mla": 64, "indexer": 64}


class Built(NamedTuple):
    """A case ready to be compiled."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    trips: dict[str, float]  # runs of the bodies of loops, by a part of their scope
    named_bytes: int  # of pages that the step's tables name, or of states that it reads and writes
    flops: float
    donated: tuple[int, ...] = ()
    kernels: Mapping[str, float] = MappingProxyType({})  # bytes that kernels in Triton move, by parts of their scope


def paged(case: Case) -> Built:
    """Attention over pages of keys and values: 8 KV heads of 128 numbers, as Llama 3 8B's."""
    import jax.numpy as jnp

    from pallas_kernels.paged_tiles import PagedTiles
    from pallas_kernels.ragged_paged_attention import ragged_paged_attention
    from pallas_kernels.xla.tiles import TileQueries
    from scripts.aot.arguments import argument

    kv_heads, dim, page = 8, 128, _PAGE["attention"]
    step, num_pages = _step(case, page)
    num_tokens = sum(q_len for q_len, _ in case.lengths)
    q = argument((num_tokens, case.heads, dim), case.dtype)
    pages = (argument((num_pages, page, kv_heads, dim), case.stored),) * 2
    by_head = argument((num_tokens, kv_heads, case.heads // kv_heads, dim), case.dtype)
    walked = _walked(case, TileQueries(by_head, None, None), PagedTiles(pages, step[0], kv_heads, dim))

    def call(q: Any, pages: Any, step: Any) -> Any:
        return ragged_paged_attention(q, pages, *step, sm_scale=dim**-0.5, return_lse=True, backend=case.backend)[:2]

    key_bytes = 2 * kv_heads * dim * jnp.dtype(case.stored).itemsize
    flops = 4 * case.heads * dim * _num_pairs(case)
    return Built(call, (q, pages, step), _trips(*walked), key_bytes * _num_keys(case), flops, kernels=_moved(*walked))


def latent(case: Case) -> Built:
    """Attention over latents of 512 and 64 numbers, as DeepSeek V3's."""
    import jax.numpy as jnp

    from pallas_kernels.latent_pages import LatentPages, LatentTiles
    from pallas_kernels.mla_paged_attention import mla_paged_attention
    from pallas_kernels.xla.tiles import TileQueries
    from scripts.aot.arguments import argument

    latent_dim, rope_dim, page = 512, 64, _PAGE["mla"]
    dim = latent_dim + rope_dim
    step, num_pages = _step(case, page)
    num_tokens = sum(q_len for q_len, _ in case.lengths)
    queries = [argument((num_tokens, case.heads, n), case.dtype) for n in (latent_dim, rope_dim)]
    pages = argument((num_pages, page, dim), case.stored)
    by_head = argument((num_tokens, 1, case.heads, dim), case.dtype)
    cache = LatentTiles(LatentPages(pages, page, dim), step[0], latent_dim)
    walked = _walked(case, TileQueries(by_head, None, None), cache)

    def call(q_nope: Any, q_pe: Any, page: Any, step: Any) -> Any:
        sizes: dict[str, Any] = {"sm_scale": 0.1, "return_lse": True, "backend": case.backend}
        return mla_paged_attention(q_nope, q_pe, (page,), *step, **sizes)[:2]

    key_bytes = dim * jnp.dtype(case.stored).itemsize
    flops = 2 * case.heads * (dim + latent_dim) * _num_pairs(case)
    named_bytes = key_bytes * _num_keys(case)
    return Built(call, (*queries, pages, step), _trips(*walked), named_bytes, flops, kernels=_moved(*walked))


def scan(case: Case) -> Built:
    """Selective scan of Mamba 2 2.7B: 80 heads of 64 x 128 numbers in float32. What it reads, and writes, is named."""
    import math

    import jax.numpy as jnp

    from pallas_kernels.ssm_update import xla_scan
    from scripts.aot import ssm_case

    num_seqs, num_tokens = len(case.lengths), sum(q_len for q_len, _ in case.lengths)
    call, arguments = ssm_case.scan(ssm_case.SsmCase(tokens=num_tokens, seqs=num_seqs, dtype=case.dtype), case.backend)
    x, states, (_, b, _) = arguments[:3]
    single = sum(q_len == 1 for q_len, _ in case.lengths)
    many = [q_len for q_len, _ in case.lengths if q_len > 1]
    trips = xla_scan.num_trips(states.shape, num_seqs, num_tokens, single, many)
    state_numbers = math.prod(states.shape[1:])
    named = 2 * num_seqs * state_numbers * states.dtype.itemsize + 2 * x.size * jnp.dtype(case.dtype).itemsize
    num_many, num_heads = sum(many), states.shape[1]
    per_token = 2 * math.prod(x.shape[1:]) * x.dtype.itemsize + num_heads * (4 + 2 * b.shape[-1] * b.dtype.itemsize)
    kernels = {"scan_sequences": num_many * per_token + 2 * len(many) * state_numbers * states.dtype.itemsize}
    return Built(call, arguments, trips, named, 4 * num_tokens * state_numbers, donated=(1,), kernels=kernels)


def delta(case: Case) -> Built:
    """Gated delta rule of Qwen3-Next: 32 heads of 128 x 128 numbers in float32, of sequences of one token each."""
    import math

    from pallas_kernels.gated_delta_rule import xla_rule
    from scripts.aot import delta_case

    num_seqs = len(case.lengths)
    call, arguments = delta_case.rule(delta_case.DeltaCase(tokens=num_seqs, seqs=num_seqs, dtype=case.dtype), "xla")
    states = arguments[1]
    trips = xla_rule.num_trips(states.shape, num_seqs, num_seqs)
    state_numbers = math.prod(states.shape[1:])
    named = 2 * num_seqs * state_numbers * states.dtype.itemsize
    return Built(call, arguments, trips, named, 6 * num_seqs * state_numbers, donated=(1,))


def indexer(case: Case) -> Built:
    """Picks of DeepSeek V4 Flash's indexer: 64 heads of 128 numbers, keys in fp8, 512 of them."""
    import jax.numpy as jnp

    from pallas_kernels.indexer_topk import indexer_topk, xla_topk
    from pallas_kernels.latent_entries import IndexFp8
    from pallas_kernels.latent_pages import LatentPages
    from pallas_kernels.schedule import Batch
    from pallas_kernels.sparse_mla_attention.shapes import SHAPES
    from scripts.aot.arguments import argument

    (model,) = (shape for shape in SHAPES if shape.name == "deepseek-v4-flash")
    entries, dim, ratio, page = IndexFp8(), model.index_dim, model.ratios[0], _PAGE["indexer"]
    step, num_pages = _step(case, page * ratio)
    num_tokens = sum(q_len for q_len, _ in case.lengths)
    q = argument((num_tokens, model.num_index_heads, dim), case.dtype)
    pages = argument((num_pages, page, entries.width(dim)), "int8")
    keys = xla_topk.Keys(LatentPages(pages, page, entries.width(dim)), step[0], entries, dim)
    q_lens, seq_lens = (jnp.asarray(x, jnp.int32) for x in zip(*case.lengths, strict=True))
    batch = Batch(seq_lens, jnp.cumsum(q_lens) - q_lens, q_lens)
    trips: dict[str, float] = {}
    kernels: dict[str, float] = {}
    for walk in xla_topk.plan_walks(q, keys, batch, ratio, xla_topk.Limits(), case.backend == "triton"):
        trips[f"{walk.name}/chunks"], trips[f"{walk.name}/trips"] = xla_topk.num_trips(walk, ratio)
        kernels[f"{walk.name}/score_tiles"] = _scored(walk, model.num_index_heads, dim, entries.width(dim), ratio)
    sizes = {"topk": model.topk, "tokens_per_state": ratio, "entries": entries, "page_size": page}

    def call(q: Any, weights: Any, pages: Any, step: Any) -> Any:
        return indexer_topk(q, weights, (pages,), *step, **sizes, backend=case.backend)

    arguments = (q, argument(q.shape[:2], "float32"), pages, step)
    named = entries.width(dim) * _num_keys(case) // ratio
    flops = 2 * model.num_index_heads * dim * _num_pairs(case) / ratio
    return Built(call, arguments, trips, named, flops, kernels=kernels)


def compressor(case: Case) -> Built:
    """States of DeepSeek V4 Flash's compressor, 1,024 numbers of KV and of scores a token, and entries of four."""
    from pallas_kernels.compressor_update import compressor_update, max_new_entries
    from pallas_kernels.sparse_mla_attention.shapes import SHAPES
    from scripts.aot.arguments import argument
    from scripts.kernel_bench.case import Sizes
    from scripts.kernel_bench.ops.compressor_update import Compressor, work

    (model,) = (shape for shape in SHAPES if shape.name == "deepseek-v4-flash")
    own = Compressor(model.ratios[0], model.dim)
    step, num_pages = _step(case, own.page)
    num_tokens, num_seqs = sum(q_len for q_len, _ in case.lengths), len(case.lengths)
    new = argument((num_tokens, own.width), case.dtype)
    pages = argument((num_pages, own.page, 2 * own.width), "float32")
    bias, slots = argument((own.ratio, own.width), "float32"), argument((num_tokens,), "int32")
    numbers = [n for q_len, length in case.lengths for n in range((length - q_len) // own.ratio, length // own.ratio)]
    pooled = sum(own.ratio * (1 + (own.overlap and number > 0)) for number in numbers)
    room = max_new_entries(num_tokens, num_seqs, own.ratio)
    options = {"overlap": own.overlap, "page_size": own.page, "backend": case.backend}

    def call(kv: Any, pages: Any, scores: Any, step: Any, slots: Any, bias: Any) -> Any:
        return compressor_update(kv, scores, (pages,), *step, slots, position_bias=bias, **options)

    arguments = (new, pages, new, step, slots, bias)
    of_step = work(tuple(case.lengths), own, Sizes("gpu", dtype=case.dtype))
    kernels = {"pool_entries": 4.0 * own.dim * (2 * pooled + room)}
    return Built(call, arguments, {}, of_step.num_bytes, of_step.flops, donated=(1,), kernels=kernels)


def _scored(walk: Any, num_heads: int, dim: int, key_bytes: int, ratio: int) -> float:
    """Bytes that a launch of the kernel of scores moves, on average."""
    import numpy as np

    from pallas_kernels.indexer_topk.triton_scores import BLOCK

    last_pos = np.asarray(walk.tiles.last_pos, np.int64)
    most = (last_pos + 1) // ratio
    num_queries = np.where(last_pos >= 0, last_pos - np.asarray(walk.tiles.first_pos, np.int64) + 1, 0)
    q_bytes = num_heads * (2 * dim + 4)
    num_chunks = max(1, -(-int(walk.num_tiles) // walk.sizes.num_tiles))
    scores = num_chunks * walk.sizes.num_tiles * walk.sizes.queries * -(-walk.sizes.num_entries // BLOCK) * BLOCK
    read = (most * (key_bytes + 4)).sum() + (num_queries * -(-most // BLOCK)).sum() * q_bytes
    return float(read + 4 * scores) / num_chunks


def _step(case: Case, page: int) -> tuple[tuple[Any, ...], int]:
    """(shapes of block tables, lengths, first tokens and distribution; pages that the pool has)."""
    from scripts.aot.arguments import argument

    num_seqs, longest = len(case.lengths), max(seq_len for _, seq_len in case.lengths)
    shapes = ((num_seqs, -(-longest // page)), (num_seqs,), (num_seqs + 1,), (3,))
    num_pages = 4099 + sum(-(-seq_len // page) for _, seq_len in case.lengths)
    return tuple(argument(shape, "int32") for shape in shapes), num_pages


def _num_keys(case: Case) -> int:
    return sum(seq_len for _, seq_len in case.lengths)


def _num_pairs(case: Case) -> int:
    """Queries times keys that they see."""
    return sum(q_len * (2 * seq_len - q_len + 1) // 2 for q_len, seq_len in case.lengths)


def _walked(case: Case, queries: Any, cache: Any) -> tuple[Any, Any]:
    """(what the walks of attention share, its sequences)."""
    import jax.numpy as jnp

    from pallas_kernels.mask import MaskRule
    from pallas_kernels.schedule import Batch
    from pallas_kernels.xla.tiles import Limits
    from pallas_kernels.xla.walks import Step

    q_lens, seq_lens = (jnp.asarray(x, jnp.int32) for x in zip(*case.lengths, strict=True))
    batch = Batch(seq_lens, jnp.cumsum(q_lens) - q_lens, q_lens)
    return Step(queries, cache, MaskRule(), None, jnp.ones(1), jnp.dtype(case.dtype), Limits()), batch


def _trips(step: Any, batch: Any) -> dict[str, float]:
    """Runs of the loops of attention in XLA."""
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.schedule import QueryTile
    from pallas_kernels.xla.walks import plan_walks

    found: dict[str, float] = {}
    for walk in plan_walks(step, batch):
        size = walk.sizes.num_tiles
        num_chunks = -(-int(walk.num_tiles) // size)
        shares, spans = [], []
        for first in range(0, num_chunks * size, size):
            lanes = walk.sizes.lanes(QueryTile(*(x[first : first + size] for x in walk.tiles)))
            begin, end = lanes.pieces_of_tiles()
            shares.append(int(lanes.share))
            spans.append(int(np.ceil(np.log2(1 + int(jnp.max(end - begin))))))
        found |= {
            f"{walk.name}/chunks": num_chunks,
            f"{walk.name}/trips": sum(shares),
            f"{walk.name}/merge": sum(spans),
        }
    return found


def _moved(step: Any, batch: Any) -> dict[str, float]:
    """Bytes that the kernels of attention in Triton move: what programs read again counts again."""
    import numpy as np

    from pallas_kernels.triton.walks import plan_walks

    num_kv_heads, group, dim = step.queries.q.shape[1:]
    cache, itemsize, dim_v = step.cache, step.queries.q.dtype.itemsize, step.cache.head_dim_v
    dims = dim if cache.values_are_keys else dim + dim_v
    found: dict[str, float] = {}
    for walk in plan_walks(step, batch):
        sizes, tiles = walk.sizes, walk.tiles
        parts = -(-group // sizes.heads)
        keys = np.asarray(tiles.num_pages, np.int64) * cache.page_size
        per_key = parts * num_kv_heads * (dims * cache.pages[0].dtype.itemsize + 4)  # 4: the page's number
        num_queries = np.maximum(np.asarray(tiles.last_pos - tiles.first_pos, np.int64) + 1, 0) * (keys > 0)
        q_bytes = num_kv_heads * group * dim * itemsize
        result_bytes = num_kv_heads * group * (dim_v * itemsize + 4)
        read = float((keys * per_key).sum())
        if sizes.num_lanes is None:
            found[f"{walk.name}/attend_whole"] = read + float(num_queries.sum()) * (q_bytes + result_bytes)
            continue
        ends = np.cumsum(-(-keys // sizes.keys))
        share, starts = max(1, -(-int(ends[-1]) // sizes.num_lanes)), ends - -(-keys // sizes.keys)
        num_pieces = np.where(ends > starts, (ends - 1) // share + 1 - starts // share, 0)
        piece_bytes = float(num_pieces.sum()) * parts * num_kv_heads * sizes.rows * 4 * (dim_v + 2)
        found[f"{walk.name}/attend_lanes"] = read + float((num_pieces * num_queries).sum()) * q_bytes + piece_bytes
        found[f"{walk.name}/merge_pieces"] = piece_bytes + float(num_queries.sum()) * result_bytes
    return found


def moved_by(scope: str, kernels: Mapping[str, float]) -> float:
    """Bytes that the kernel in Triton of a scope moves.

    Raises:
        ValueError: `kernels` has none whose parts are all in the scope.
    """
    parts = scope.split("/")
    for name, num_bytes in kernels.items():
        if all(part in parts for part in name.split("/")):
            return num_bytes
    raise ValueError(f"expected a kernel of one of {sorted(kernels)}, got {scope}")


def runs_of(loop: Loop, trips: dict[str, float]) -> float:
    """How often a loop's body runs: that of the innermost part of its scope that `trips` names.

    Raises:
        ValueError: `trips` names none.
    """
    parts = loop.scope.replace("while/body/", "").split("/")
    names = {name: tuple(name.split("/")) for name in trips}
    for end in range(len(parts), 0, -1):
        for name, wanted in names.items():
            if parts[end - 1] == wanted[-1] and all(part in parts for part in wanted):
                return trips[name]
    raise ValueError(f"expected a loop of one of {sorted(trips)}, got {loop.scope}")


BUILDERS: dict[str, Callable[[Case], Built]] = {
    "attention": paged,
    "mla": latent,
    "scan": scan,
    "delta": delta,
    "indexer": indexer,
    "compressor": compressor,
}


def usages(dump: Path, names: Iterable[str]) -> dict[str, Usage]:
    """What ptxas says of the kernels in Triton called `names`, by the names that XLA gives them, of a dump of XLA's."""
    packages = importlib.util.find_spec("nvidia")
    roots = (packages and packages.submodule_search_locations) or []
    ptxas = next(path for root in roots for path in Path(root).glob("*/bin/ptxas"))
    found: dict[str, Usage] = {}
    for path in sorted(dump.glob("*.ptx")):
        ptx = path.read_text()
        entry, target = re.search(r"\.entry (\w+?)(__\d+)?\(", ptx), re.search(r"^\.target (\w+)", ptx, re.MULTILINE)
        if entry and target and entry[1] in names:
            command = [ptxas, "-v", f"-arch={target[1]}", path, "-o", os.devnull]
            log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            found |= {usage.kernel: usage for usage in parse_ptxas(log)}
    return found


def record_of(case: Case, dump: Path) -> dict[str, Any]:
    """Compiles a case; what it costs on its card, and what it may."""
    import jax
    from jax.experimental import topologies

    built, card = BUILDERS[case.op](case), (CARDS | {A100.name: A100})[case.card]
    topology = topologies.get_topology_desc(platform="cuda", target_config=card.config, topology="1x1x1")
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    on_card = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    arguments = jax.tree.map(lambda a: on_card(a.shape, a.dtype), built.arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(built.call, donate_argnums=built.donated).lower(*arguments)
        # PTX alone: dumps of every emitter take six times as long, and now and then XLA breaks its heap in them
        compiled = lowered.compile(compiler_options={"xla_dump_to": str(dump), "xla_dump_emitter_re": "ptx"})
    counts = functools.partial(runs_of, trips=built.trips), functools.partial(moved_by, kernels=built.kernels)
    cost = ModuleCost(compiled.as_text(), *counts).total()
    in_triton = usages(dump, {name.split("/")[-1] for name in built.kernels})
    peak = card.matrix_flops if case.dtype == "bfloat16" else card.vector_flops
    least_s = max(built.named_bytes / card.bytes_per_s, built.flops / peak)
    return {
        "case": case.name,
        "card": case.card,
        "launches": round(cost.launches),
        "kernels": {name: (usage.registers, usage.spill_load_bytes) for name, usage in in_triton.items()},
        "spill_bytes": max((usage.spill_load_bytes for usage in in_triton.values()), default=0),
        "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes,
        "bytes": round(cost.num_bytes),
        "named_bytes": built.named_bytes,
        "paper_ms": 1e3 * max(cost.num_bytes / card.bytes_per_s, built.flops / peak),
        "least_ms": 1e3 * least_s,
        "times": max(cost.num_bytes / card.bytes_per_s, built.flops / peak) / least_s,
    }


if __name__ == "__main__":
    prepare_environment(sys.argv[2])
    (asked,) = (case for case in CASES if case.name == sys.argv[1])
    print(json.dumps(record_of(asked, Path(sys.argv[2]))))
