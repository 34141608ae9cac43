"""Several layers of attention, planned once a step, as a model on a GPU has them: what a layer launches is counted.

Flow:    LayersCase -> [layers] -> a call with a step in which all decode and a mixed one, their scopes named

    decode/plan  decode/attend  decode/write      mixed/plan  mixed/attend  mixed/write

Between two layers stands a matrix product, so that none of it belongs to a layer's neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write import kv_write
from pallas_kernels.latent_entries import EntryFormat, LatentFp8, Plain
from pallas_kernels.latent_write import latent_write
from pallas_kernels.mla_paged_attention import mla_paged_attention
from pallas_kernels.mla_paged_attention import plan as plan_latents
from pallas_kernels.ragged_paged_attention import MaskRule, plan, ragged_paged_attention
from pallas_kernels.sparse_mla_attention import plan as plan_windows
from pallas_kernels.sparse_mla_attention import plan_work, sparse_mla_attention

STEPS = ("decode", "mixed")
LATENT_DIM, ROPE_DIM = 512, 64
WINDOW, TOPK, ENTRY_TOKENS = 128, 512, 256  # of sparse attention: DeepSeek V4 Flash's, and pages of 256 tokens


@dataclass(frozen=True)
class LayersCase:
    """Sizes of one compilation."""

    op: str = "attention"  # or mla, or sparse
    layers: int = 4
    scan: int = 1  # the layers are a scan; else one after another
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    window: int = 0
    sinks: int = 0
    scales: int = 0  # pages of 8 bits, with scales
    seqs: int = 64
    queries: int = 1  # of each sequence in the step in which all decode
    tokens: int = 512  # of the mixed step
    context: int = 4096
    num_pages: int = 4099
    ratio: int = 4  # of sparse attention: 0 the window only, 4 with an indexer, 128 all entries
    fp8: int = 0  # entries of sparse attention in fp8


def parse(settings: list[str]) -> LayersCase:
    """A case with some fields set by name=value.

    Raises:
        ValueError: a name is none of the case's, or a value is not of its type.
    """
    known = {field.name: field.default for field in dataclasses.fields(LayersCase)}
    given = dict(setting.partition("=")[::2] for setting in settings)
    if unknown := sorted(given.keys() - known.keys()):
        raise ValueError(f"expected settings out of {sorted(known)}, got {unknown}")
    return LayersCase(**{name: type(known[name])(text) for name, text in given.items()})


def argument(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An argument of this shape and dtype."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


class _Dense:
    """Layers with K and V."""

    def __init__(self, case: LayersCase) -> None:
        self.case, self.mask = case, MaskRule(sliding_window=case.window or None)
        dtype = "float8_e4m3fn" if case.scales else "bfloat16"
        self.width = case.heads * case.head_dim
        self.pages = (argument((case.num_pages, case.page, case.kv_heads, case.head_dim), dtype),) * 2

    def plan(self, num_tokens: int, step: Any, *, is_decode: bool) -> Any:
        q = argument((num_tokens, self.case.heads, self.case.head_dim), "bfloat16")
        return plan(q, self.pages, *step, self.mask, is_decode=is_decode, backend="gpu")

    def write(self, hidden: Any, pages: Any, slots: Any, scale: Any) -> Any:
        new = hidden.reshape(hidden.shape[0], -1, self.case.head_dim)[:, : self.case.kv_heads]
        return kv_write(new, new, pages, slots, k_scale=scale, v_scale=scale, backend="gpu")

    def attend(self, hidden: Any, pages: Any, step: Any, schedule: Any, sinks: Any, scale: Any) -> Any:
        q = hidden.reshape(hidden.shape[0], self.case.heads, self.case.head_dim)
        options: dict[str, Any] = {"sm_scale": 0.1, "sliding_window": self.case.window or None, "sinks": sinks}
        scales = {"k_scale": scale, "v_scale": scale}
        return ragged_paged_attention(q, pages, *step, **options, **scales, schedule=schedule, backend="gpu").out


class _Latent:
    """Layers with latents."""

    def __init__(self, case: LayersCase) -> None:
        self.case, self.mask = case, MaskRule(sliding_window=case.window or None)
        self.width = case.heads * LATENT_DIM
        self.pages = (argument((case.num_pages, case.page, LATENT_DIM + ROPE_DIM), "bfloat16"),)

    def _queries(self, hidden: Any) -> tuple[Any, Any]:
        q = hidden.reshape(hidden.shape[0], self.case.heads, LATENT_DIM)
        return q, q[..., :ROPE_DIM]

    def plan(self, num_tokens: int, step: Any, *, is_decode: bool) -> Any:
        shapes = [argument((num_tokens, self.case.heads, dim), "bfloat16") for dim in (LATENT_DIM, ROPE_DIM)]
        pages = tuple(jnp.zeros(array.shape, array.dtype) for array in self.pages)
        return plan_latents(*shapes, pages, *step, self.mask, is_decode=is_decode, backend="gpu")

    def write(self, hidden: Any, pages: Any, slots: Any, scale: Any) -> Any:
        return latent_write(hidden[:, : LATENT_DIM + ROPE_DIM], pages, slots, scale=scale, backend="gpu")

    def attend(self, hidden: Any, pages: Any, step: Any, schedule: Any, sinks: Any, scale: Any) -> Any:
        options: dict[str, Any] = {"sm_scale": 0.1, "sliding_window": self.case.window or None, "sinks": sinks}
        options |= {"k_scale": scale, "schedule": schedule, "backend": "gpu"}
        return mla_paged_attention(*self._queries(hidden), pages, *step, **options).out


class _Sparse:
    """Layers with a window of latents and entries, of which an indexer picks some."""

    def __init__(self, case: LayersCase) -> None:
        self.case, self.width = case, case.heads * LATENT_DIM
        self.entries: EntryFormat = LatentFp8(ROPE_DIM) if case.fp8 else Plain()
        width, dtype = self.entries.width(LATENT_DIM), "int8" if case.fp8 else "bfloat16"
        self.entry_page = ENTRY_TOKENS // (case.ratio or ENTRY_TOKENS)
        sizes = [case.page] + [self.entry_page] * bool(case.ratio)
        self.pages = tuple(argument((case.num_pages, size, width), dtype) for size in sizes)

    def _compressed(self, tables: Any, pages: Any) -> dict[str, Any]:
        if not self.case.ratio:
            return {}
        entries = {"compressed_pages": pages, "compressed_page_size": self.entry_page}
        columns = -(-self.case.context // ENTRY_TOKENS)
        return {**entries, "compressed_tables": tables[:, :columns], "tokens_per_state": self.case.ratio}

    def plan(self, num_tokens: int, step: Any, *, is_decode: bool) -> Any:
        del is_decode  # tokens attend alone, whether they decode or not
        schedule = plan_windows(*step, num_tokens=num_tokens, sliding_window=WINDOW, page_size=self.case.page)
        q = argument((num_tokens, self.case.heads, LATENT_DIM), "bfloat16")
        pages = tuple(jnp.zeros(array.shape, array.dtype) for array in self.pages)
        picks = TOPK if self.case.ratio == 4 else None
        compressed = self._compressed(step[0], pages[1:])
        work = plan_work(q, pages[:1], schedule, **compressed, num_picks=picks, entries=self.entries, backend="gpu")
        return schedule, work

    def write(self, hidden: Any, pages: Any, slots: Any, scale: Any) -> Any:
        del scale
        sizes: dict[str, Any] = {"entries": self.entries, "page_size": self.case.page}
        return (*latent_write(hidden[:, :LATENT_DIM], pages[:1], slots, **sizes, backend="gpu"), *pages[1:])

    def attend(self, hidden: Any, pages: Any, step: Any, schedule: Any, sinks: Any, scale: Any) -> Any:
        """Over the entries that `hidden` happens to name."""
        del scale
        q = hidden.reshape(hidden.shape[0], self.case.heads, LATENT_DIM)
        picks = hidden[:, :TOPK].astype(jnp.int32) if self.case.ratio == 4 else None
        options: dict[str, Any] = {"sm_scale": 0.1, "sliding_window": WINDOW, "sinks": sinks, "backend": "gpu"}
        options |= {"entries": self.entries, "page_size": self.case.page, "topk_indices": picks}
        options |= self._compressed(step[0], pages[1:])
        return sparse_mla_attention(q, pages[:1], *step, **options, schedule=schedule[0], work=schedule[1]).out


def layers(case: LayersCase) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Both steps one after the other, and their arguments.

    Raises:
        ValueError: `op` is none.
    """
    kinds: dict[str, Callable[[LayersCase], _Dense | _Latent | _Sparse]]
    kinds = {"attention": _Dense, "mla": _Latent, "sparse": _Sparse}
    if case.op not in kinds:
        raise ValueError(f"expected op out of {sorted(kinds)}, got {case.op!r}")
    kind = kinds[case.op](case)
    num_tokens = {"decode": case.seqs * case.queries, "mixed": case.tokens}

    def layer(hidden: Any, pages: Any, step: Any, schedule: Any, weights: Any) -> tuple[Any, Any]:
        slots, *tables = step
        matrix, sinks, scale = weights
        sinks, scale = sinks if case.sinks else None, scale if case.scales else None
        with jax.named_scope("write"):
            pages = kind.write(hidden, pages, slots, scale)
        with jax.named_scope("attend"):
            out = kind.attend(hidden, pages, tables, schedule, sinks, scale)
        with jax.named_scope("model"):
            return jnp.dot(out.reshape(hidden.shape), matrix), pages

    def run(name: str, hidden: Any, pages: Any, step: Any, weights: Any) -> tuple[Any, Any]:
        with jax.named_scope("plan"):
            schedule = kind.plan(num_tokens[name], step[1:], is_decode=name == "decode")
        if case.scan:

            def body(carry: Any, weights: Any) -> tuple[Any, None]:
                return layer(*carry, step, schedule, weights), None

            return jax.lax.scan(body, (hidden, pages), weights)[0]
        for i in range(case.layers):
            hidden, pages = layer(hidden, pages, step, schedule, [x[i] for x in weights])
        return hidden, pages

    def call(hidden: Any, pages: Any, steps: Any, weights: Any) -> Any:
        outs = {}
        for name in STEPS:
            with jax.named_scope(name):
                outs[name], pages = run(name, hidden[name], pages, steps[name], weights)
        return outs, pages

    def step_of(name: str) -> list[Any]:
        shapes = ((num_tokens[name],), (case.seqs, -(-case.context // case.page)), (case.seqs,), (case.seqs + 1,), (3,))
        return [argument(shape, "int32") for shape in shapes]

    weights = [
        argument((case.layers, *shape), dtype)
        for shape, dtype in (((kind.width,) * 2, "bfloat16"), ((case.heads,), "float32"), ((), "float32"))
    ]
    hidden = {name: argument((num_tokens[name], kind.width), "bfloat16") for name in STEPS}
    return call, (hidden, kind.pages, {name: step_of(name) for name in STEPS}, weights)
