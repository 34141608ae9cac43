"""Two deployments of one model with other page sizes and layouts, and dense KV written into either by the write ops."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.core import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec
from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.mla import MLAAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.spec import KVCacheSpec
from kvjax.device import KVPages, Placement, create_pages
from kvjax.transfer import RequestPages
from pallas_kernels.kv_write import kv_write
from pallas_kernels.latent_write import latent_write

NUM_PAGES = 40
WINDOW = 9
HEADS, DIM, LATENT = 4, 8, 12


def specs(page_size: int, dtype: str = "float32") -> dict[str, KVCacheSpec]:
    """A layer of each kind."""
    kv = {"block_size": page_size, "num_kv_heads": HEADS, "head_size": DIM, "dtype": dtype}
    states = ((HEADS, 2, 3), (2 * HEADS, 3))
    return {
        "full": FullAttentionSpec(**kv),
        "window": SlidingWindowSpec(**kv, sliding_window=WINDOW),
        "latent": MLAAttentionSpec(block_size=page_size, head_size=LATENT, dtype=dtype),
        "compressed": MLAAttentionSpec(
            block_size=page_size, head_size=LATENT, dtype=dtype, tokens_per_state=4, cache_role="compressed"
        ),
        "states": MambaSpec(block_size=page_size, shapes=states, dtypes=("float32", dtype)),
    }


def config_of(layers: dict[str, KVCacheSpec], platform: str) -> KVCacheConfig:
    """A group and a pool for each layer."""
    pools = tuple(KVCachePoolSpec(NUM_PAGES, (spec.page_layout(platform),)) for spec in layers.values())
    groups = tuple(KVCacheGroupSpec((name,), spec, i) for i, (name, spec) in enumerate(layers.items()))
    return KVCacheConfig(pools, groups)


@dataclass(frozen=True)
class Dense:
    """What each layer caches of one request: arrays [tokens, ...], and the arrays of a state."""

    arrays: dict[str, tuple[np.ndarray, ...]]

    @classmethod
    def random(cls, layers: dict[str, KVCacheSpec], num_tokens: int, seed: int) -> Dense:
        rng = np.random.default_rng(seed)
        arrays = {}
        for name, spec in layers.items():
            if spec.state_pages is not None:
                shapes: tuple[tuple[int, ...], ...] = tuple(spec.state_shapes)
            else:
                shapes = tuple((num_tokens // spec.tokens_per_state, *shape) for shape in spec.entry_shapes)
            arrays[name] = tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)
        return cls(arrays)


def nan_pages(config: KVCacheConfig, placement: Placement | None = None) -> KVPages:
    """Pages of NaN, page 0 of every data rank zero."""
    pages = create_pages(config, placement)
    return jax.tree.map(lambda array: array.at[np.flatnonzero(np.arange(len(array)) % NUM_PAGES)].set(jnp.nan), pages)


def tables(layers: dict[str, KVCacheSpec], num_tokens: int, seed: int) -> tuple[np.ndarray, ...]:
    """Random pages for a request: of windows only those that the next token sees, of states one."""
    rng = np.random.default_rng(seed)
    found = []
    for spec in layers.values():
        if spec.state_pages is not None:
            found.append(rng.integers(1, NUM_PAGES, 1).astype(np.int32))
            continue
        columns = -(-num_tokens // spec.block_size)
        table = rng.permutation(np.arange(1, NUM_PAGES))[:columns].astype(np.int32)
        window = getattr(spec, "sliding_window", None)
        if window is not None:
            table[: max(0, num_tokens - window + 1) // spec.block_size] = 0
        found.append(table)
    return tuple(found)


def written(config: KVCacheConfig, pages: KVPages, request: RequestPages, dense: Dense, tokens: range) -> KVPages:
    """Pages with `tokens` of the dense KV in the pages of a request, and zeros in the rest of these pages."""
    for i, group in enumerate(config.kv_cache_groups):
        (name,), spec, table = group.layer_names, group.kv_cache_spec, request.tables[i]
        arrays, column = dense.arrays[name], pages.column(i, 0)
        if spec.state_pages is not None:
            values = [value.astype(array.dtype) for value, array in zip(arrays, column, strict=True)]
            new = tuple(array.at[int(table[0])].set(value) for array, value in zip(column, values, strict=True))
        else:
            per_page = spec.block_size // spec.tokens_per_state
            stop = -(-(request.stop // spec.tokens_per_state) // per_page)
            touched = table[request.first // spec.block_size : stop]
            column = tuple(array.at[touched].set(0) for array in column)
            entries = np.arange(tokens.start // spec.tokens_per_state, tokens.stop // spec.tokens_per_state)
            slots = table[entries // per_page] * per_page + entries % per_page
            slots = jnp.asarray(np.where(table[entries // per_page] > 0, slots, -1), jnp.int32)
            values = [jnp.asarray(array[entries], column[0].dtype) for array in arrays]
            if len(values) == 2:
                new = kv_write(values[0], values[1], column, slots, backend="reference")
            else:
                new = latent_write(values[0], column, slots, page_size=per_page, backend="reference")
        pages = pages.with_column(i, 0, new)
    return pages
