"""A tiny hybrid model, a host without a manager, and dense attention: what the device tests compare."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.sliding_window import SlidingWindowSpec
from kvjax.core.pool.page_edits import NO_COPIES, NO_PAGES, PageCopies
from kvjax.core.spec import KVCacheConfig, KVCacheGroupSpec, KVCachePoolSpec, cdiv
from kvjax.core.step.group_plans import GroupTables
from kvjax.core.step.step_builder import build_step_plan
from kvjax.core.step.step_plan import StepPlan
from kvjax.device import AttentionOptions

BLOCK_SIZE, WINDOW, VOCAB, NUM_BLOCKS = 4, 6, 31, 600
Q_HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 8, 4, 8, 16


def toy_config(
    num_blocks: int = NUM_BLOCKS, platform: str = "cpu", kv_heads: int = KV_HEADS, num_layers: int = 3
) -> KVCacheConfig:
    """Layer 0 (and 2) with a window, layer 1 full; both groups share one pool of as many columns as the first has."""
    sizes = {"block_size": BLOCK_SIZE, "num_kv_heads": kv_heads, "head_size": HEAD_DIM, "dtype": "float32"}
    window, full = SlidingWindowSpec(**sizes, sliding_window=WINDOW), FullAttentionSpec(**sizes)
    windowed = tuple(f"layers.{i}" for i in range(0, num_layers, 2))
    columns = (full.page_layout(platform),) * len(windowed)
    groups = (
        KVCacheGroupSpec(windowed, window),
        KVCacheGroupSpec(("layers.1",), full),
    )
    return KVCacheConfig((KVCachePoolSpec(num_blocks, columns),), groups)


class ToyAttention(nnx.Module):
    def __init__(self, layer: int, kv_heads: int, rngs: nnx.Rngs) -> None:
        def linear(outputs: int) -> nnx.Linear:
            return nnx.Linear(HIDDEN, outputs, use_bias=False, rngs=rngs)

        self.layer, self.kv_heads = layer, kv_heads
        self.q, self.k, self.v = linear(Q_HEADS * HEAD_DIM), linear(kv_heads * HEAD_DIM), linear(kv_heads * HEAD_DIM)
        self.out = nnx.Linear(Q_HEADS * HEAD_DIM, HIDDEN, use_bias=False, rngs=rngs)
        self.sinks = nnx.Param(jax.random.normal(rngs.params(), (Q_HEADS,), jnp.float32))

    def __call__(self, x: jax.Array, attend) -> jax.Array:
        q = self.q(x).reshape(-1, Q_HEADS, HEAD_DIM)
        k, v = (project(x).reshape(-1, self.kv_heads, HEAD_DIM) for project in (self.k, self.v))
        if self.layer % 2 == 0:
            options = AttentionOptions(sm_scale=HEAD_DIM**-0.5, sliding_window=WINDOW)
        else:
            options = AttentionOptions(sm_scale=HEAD_DIM**-0.5, soft_cap=5.0, sinks=self.sinks[...])
        return self.out(attend(f"layers.{self.layer}", q, k, v, options).reshape(x.shape[0], -1))


class ToyModel(nnx.Module):
    """Two or three attention layers on token and position embeddings."""

    def __init__(self, seed: int = 0, kv_heads: int = KV_HEADS, num_layers: int = 3) -> None:
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.layers = nnx.List([ToyAttention(i, kv_heads, rngs) for i in range(num_layers)])
        self.head = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, token_ids: jax.Array, positions: jax.Array, attend) -> jax.Array:
        angle = positions[:, None].astype(jnp.float32) / (10.0 ** jnp.linspace(0, 2, HIDDEN, dtype=jnp.float32))[None]
        x = self.embed(token_ids) + 0.3 * jnp.sin(angle)
        for layer in self.layers:
            x = x + jnp.tanh(layer(x, attend))
        return x

    def logits(self, hidden: jax.Array) -> jax.Array:
        return self.head(hidden) * 3.0


def dense_attend(layer_name: str, q: jax.Array, k: jax.Array, v: jax.Array, options: AttentionOptions) -> jax.Array:
    """Causal attention over one whole sequence, written as plainly as can be."""
    length, group = q.shape[0], q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("qhd,khd->hqk", q, k) * options.sm_scale
    if options.soft_cap is not None:
        scores = options.soft_cap * jnp.tanh(scores / options.soft_cap)
    distance = jnp.arange(length)[:, None] - jnp.arange(length)[None, :]
    visible = distance >= 0
    if options.sliding_window is not None:
        visible &= distance < options.sliding_window
    scores = jnp.where(visible[None], scores, -jnp.inf)
    if options.sinks is not None:
        sinks = jnp.broadcast_to(options.sinks[:, None, None], (*scores.shape[:2], 1))
        scores = jnp.concatenate([scores, sinks], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :length]
    return jnp.einsum("hqk,khd->qhd", weights, v)


DENSE_LENGTH = 64


@nnx.jit
def _dense(model: ToyModel, token_ids: jax.Array) -> jax.Array:
    return model.logits(model(token_ids, jnp.arange(DENSE_LENGTH), dense_attend))


def dense_logits(model: ToyModel, token_ids: np.ndarray) -> np.ndarray:  # [length, VOCAB]
    """Logits after every token of one sequence; padded at its end, which causal attention does not see."""
    padded = np.zeros(DENSE_LENGTH, np.int32)
    padded[: len(token_ids)] = token_ids
    return np.asarray(_dense(model, padded))[: len(token_ids)]


def sample(logits: jax.Array, sampling: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The best token, moved on by a request's offset; and the best logit."""
    return (jnp.argmax(logits, axis=-1) + sampling["offset"]) % VOCAB, jnp.max(logits, axis=-1)


def is_greedy(model: ToyModel, prompt: np.ndarray, generated: list[int]) -> bool:
    """Whether every generated token is the best one after all before it, computed over the whole sequence at once."""
    best = dense_logits(model, np.array([*prompt, *generated])).argmax(axis=-1)
    return best[len(prompt) - 1 : -1].tolist() == generated


@dataclass
class ToyHost:
    """Tables as the manager keeps them: blocks allocated from a list, all freed when a request ends.

    Blocks of the window group that lie before every visible token become the null block, as a manager would make them.
    """

    kv_cache_config: KVCacheConfig
    num_rows: int = 8
    num_columns: int = 16
    request_table: SimpleNamespace = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.num_rows, self.num_columns * BLOCK_SIZE)
        self.request_table = SimpleNamespace(
            token_ids=np.zeros(shape, np.int32),
            num_tokens=np.zeros(self.num_rows, np.int64),
            num_computed_tokens=np.zeros(self.num_rows, np.int64),
            request_ids=np.full(self.num_rows, None, np.object_),
        )
        groups = len(self.kv_cache_config.kv_cache_groups)
        self._tables = [np.zeros((self.num_rows, self.num_columns), np.int32) for _ in range(groups)]
        self._num_blocks = [np.zeros(self.num_rows, np.int64) for _ in range(groups)]
        self._free = [list(range(1, pool.num_blocks)) for pool in self.kv_cache_config.pools]

    def group_tables(self) -> list[GroupTables]:
        groups = enumerate(self.kv_cache_config.kv_cache_groups)
        return [
            GroupTables((i,), group.kv_cache_spec.block_size, self._tables[i][None], self._num_blocks[i])
            for i, group in groups
        ]

    def take_page_copies(self) -> tuple[PageCopies, ...]:
        return (NO_COPIES,) * len(self.kv_cache_config.pools)

    def take_pages_to_zero(self) -> tuple[np.ndarray, ...]:
        return (NO_PAGES,) * len(self.kv_cache_config.pools)

    def add(self, row: int, token_ids: np.ndarray) -> None:
        table = self.request_table
        table.request_ids[row] = f"r{row}"
        table.token_ids[row, : len(token_ids)] = token_ids
        table.num_tokens[row], table.num_computed_tokens[row] = len(token_ids), 0

    def append(self, row: int, token_id: int) -> None:
        self.request_table.token_ids[row, self.request_table.num_tokens[row]] = token_id
        self.request_table.num_tokens[row] += 1

    def allocate(self, row: int, num_new: int) -> None:
        """Blocks up to the new tokens; window blocks out of sight are freed and become null."""
        computed = int(self.request_table.num_computed_tokens[row])
        for group_id, group in enumerate(self.kv_cache_config.kv_cache_groups):
            table, counts, free = self._tables[group_id], self._num_blocks[group_id], self._free[group.pool_id]
            if group.kv_cache_spec.kind == "sliding_window":
                self._give_back(group_id, row, max(0, computed - WINDOW + 1) // BLOCK_SIZE)
            while counts[row] < cdiv(computed + num_new, BLOCK_SIZE):
                table[row, counts[row]] = free.pop(0)
                counts[row] += 1

    def release(self, row: int) -> None:
        """Ends the request of `row`."""
        for group_id, counts in enumerate(self._num_blocks):
            self._give_back(group_id, row, int(counts[row]))
            counts[row] = 0
        self.request_table.request_ids[row] = None

    def _give_back(self, group_id: int, row: int, count: int) -> None:
        ids = self._tables[group_id][row, :count]
        self._free[self.kv_cache_config.kv_cache_groups[group_id].pool_id] += ids[ids > 0].tolist()
        ids[:] = 0

    def plan(self, rows: list[int], num_new: list[int], **options) -> StepPlan:
        """Allocates, builds the plan, and advances."""
        for row, count in zip(rows, num_new, strict=True):
            self.allocate(row, count)
        plan = build_step_plan(self, np.array(rows), np.array(num_new), **options)
        self.request_table.num_computed_tokens[rows] += num_new
        return plan

    def scramble(self) -> None:
        """Overwrites everything that a careless plan might still look at."""
        table = self.request_table
        for array in (table.token_ids, table.num_tokens, table.num_computed_tokens, *self._tables, *self._num_blocks):
            array[...] = 7
