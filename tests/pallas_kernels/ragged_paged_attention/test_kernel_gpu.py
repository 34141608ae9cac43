"""The GPU kernels against the float64 oracle: features, NaN wherever unseen, races; their plans by counting."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu import mosaic
from pallas_kernels.gpu.kv import KVRing
from pallas_kernels.gpu.plan import Field, GpuConfig, Keys, plan_decode
from pallas_kernels.gpu.tiles import TileShape
from pallas_kernels.interpret.on_gpu import compile_on_gpu, gpu_device
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import kernel_gpu, ragged_paged_attention
from pallas_kernels.ragged_paged_attention.gpu_prefill import Split
from pallas_kernels.ragged_paged_attention.oracle import Options
from pallas_kernels.schedule import Batch
from tests.pallas_kernels.cases import Shape, as_bytes, assert_close, assert_right, make_case, random_values

SMALL = kernel_gpu.Tuning(decode_block=64, decode_stages=2, num_blocks=3, prefill_block=64, prefill_stages=2)
SHAPE = Shape(
    num_tokens=48, num_rows=4, num_columns=18, page_size=16, num_q_heads=2, num_kv_heads=1, head_dim=64,
    q_dtype="bfloat16", kv_dtype="bfloat16",
)  # fmt: skip
ROWS = [(1, 270), (1, 5), (6, 37), (35, 210)]  # more blocks than stages; pieces that end within a sequence
DECODE, PREFILL = [(1, 270), (1, 5), (1, 130)], [(40, 280)]


def compiled(shape: Shape, options: Options, tuning: kernel_gpu.Tuning = SMALL) -> Callable[..., Any]:
    """The kernels for steps of one shape: (arrays of a case) -> (out, lse)."""
    mask = MaskRule(options.causal, options.sliding_window, options.attention_chunk_size, options.num_sink_tokens)
    given = {name: getattr(options, name) for name in ("sinks", "k_scale", "v_scale")}
    call = functools.partial(
        kernel_gpu.ragged_paged_attention,
        mask=mask,
        num_kv_heads=shape.num_kv_heads,
        sm_scale=options.sm_scale,
        soft_cap=options.soft_cap,
        **{name: None if x is None else jnp.asarray(x, jnp.float32) for name, x in given.items()},
        return_lse=True,
        tuning=tuning,
    )
    return compile_on_gpu(call, *make_case(0, shape, []).arrays)


@functools.cache
def plain() -> Callable[..., Any]:
    """The kernels for `SHAPE`, without features."""
    return compiled(SHAPE, Options())


def test_cross_attention_may_have_more_queries_than_keys() -> None:
    """Without a mask every query sees every key of its sequence, and a sequence without keys gives nothing."""
    options = Options(causal=False)
    run = compiled(SHAPE, options)
    for seed, rows in ((1, [(1, 130), (9, 3), (38, 16)]), (2, [(1, 0), (20, 1), (12, 270)])):
        case = make_case(seed, SHAPE, rows, options)
        assert_right(run(*case.arrays), case.expected(options), case.shape.q_dtype)


def test_extreme_sinks_do_not_overflow() -> None:
    """A sink far above the logits takes all the weight, far below or -inf none."""
    shape = replace(SHAPE, num_q_heads=4)
    options = Options(sinks=np.array([3e38, -1e30, -np.inf, 1e4]))
    case = make_case(7, shape, [(1, 130), (3, 70)])
    assert_right(compiled(shape, options)(*case.arrays), case.expected(options), case.shape.q_dtype)


def test_a_nan_that_is_seen_comes_out() -> None:
    """In its own sequence alone."""
    case = make_case(4, SHAPE, ROWS)
    run = plain()
    clean = run(*case.arrays)[0]
    case.pages[1][case.block_tables[0, 9], 3] = np.nan
    out = run(*case.arrays)[0]
    assert np.isnan(out[0].astype(np.float32)).all()
    np.testing.assert_array_equal(out[1:], clean[1:])


def test_padding_is_silent() -> None:
    """Tokens and rows of padding give 0 and -inf, whatever stands in their places; a row may have no query."""
    case = make_case(5, SHAPE, [(1, 5), (0, 9), (7, 7)])
    case.q[8:] = np.nan
    case.seq_lens[3:] = 48
    case.block_tables[3:] = 7
    case.query_start_loc[4:] = 40  # row 3 would hold all the rest, but is not real
    out, lse = plain()(*case.arrays)
    assert_right((out, lse), case.expected(Options()), case.shape.q_dtype)
    assert (out[8:] == 0).all()
    assert (lse[8:] == -np.inf).all()


@pytest.mark.skipif(gpu_device() is not None, reason="races are seen by the interpreter only")
@pytest.mark.parametrize(
    ("wait", "rows", "head_dim"),
    [
        pytest.param("wait_free", DECODE, 64, id="decode-free"),
        pytest.param("wait_full", PREFILL, 64, id="prefill-full"),
        pytest.param("wait_changed", PREFILL, 64, id="prefill-changed"),
        pytest.param("wait_full", DECODE, 64, id="decode-full", marks=pytest.mark.sweep),
        pytest.param("wait_free", PREFILL, 64, id="prefill-free", marks=pytest.mark.sweep),
        pytest.param("wait_free", PREFILL, 144, id="wide-prefill-free", marks=pytest.mark.sweep),
    ],
)
def test_a_missing_wait_is_found(
    wait: str, rows: list[tuple[int, int]], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ring that does not wait for a barrier: the interpreter reports a race, or a barrier that nobody observed."""
    monkeypatch.setattr(KVRing, wait, lambda *_: None)
    shape = replace(SHAPE, head_dim=head_dim)
    run = compiled(shape, Options())
    with pytest.raises(Exception, match=r"race|observed|phase"):
        run(*make_case(9, shape, rows).arrays)


TURNS = {
    "one fetches": (SMALL, {}),
    "both attend": (SMALL._replace(prefill_warpgroups=2), {}),
    "tiles shared out": (SMALL._replace(prefill_blocks=2), {}),
    "default": (kernel_gpu.Tuning(num_blocks=3), {}),
    "default, both attend": (kernel_gpu.Tuning(num_blocks=3), {"head_dim": 128, "page_size": 64, "num_columns": 5}),
}


@pytest.mark.parametrize("name", TURNS)
def test_warpgroups_take_turns(name: str) -> None:
    """With whole blocks, more than the ring has room for, in both ways to fetch; small and default sizes."""
    tuning, change = TURNS[name]
    case = make_case(3, replace(SHAPE, **change), [(40, 280)])
    assert_right(compiled(case.shape, Options(), tuning)(*case.arrays), case.expected(Options()), case.shape.q_dtype)


@pytest.mark.parametrize("num_blocks", [pytest.param(n, marks=pytest.mark.sweep) for n in (1, 3, 100)])
def test_tiles_may_be_shared_out_to_thread_blocks(num_blocks: int) -> None:
    """Sequences of other lengths, tiles without queries, more turns than tiles, more thread blocks than tiles."""
    case = make_case(4, SHAPE, ROWS)
    tuning = SMALL._replace(prefill_blocks=num_blocks)
    options = Options(sliding_window=70)
    assert_right(compiled(SHAPE, options, tuning)(*case.arrays), case.expected(options), case.shape.q_dtype)


def test_a_scale_of_keys_may_be_negative() -> None:
    """The maximum of scaled products is taken before they are scaled."""
    options = Options(k_scale=-0.7)
    case = make_case(8, SHAPE, ROWS)
    assert_right(compiled(SHAPE, options)(*case.arrays), case.expected(options), case.shape.q_dtype)


def test_who_fetches_follows_from_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 slots wherever registers suffice; the first of two warpgroups fetches few, large pages."""
    monkeypatch.setattr(mosaic, "MOVES_REGISTERS", False)
    assert Split.of(64, 64, 16) == Split.of(96, 96, 32) == Split(fetches_apart=True, block=128)
    assert Split.of(128, 128, 16) == Split.of(192, 128, 64) == Split(fetches_apart=True, block=64)
    assert (
        Split.of(128, 128, 64)
        == Split.of(64, 64, 64)
        == Split.of(128, 128, 16, fetches_apart=False)
        == Split(False, 128)
    )
    assert Split.of(256, 256, 64) == Split(fetches_apart=False, block=64)
    monkeypatch.setattr(mosaic, "MOVES_REGISTERS", True)
    assert Split.of(128, 128, 16) == Split.of(128, 128, 64) == Split(fetches_apart=True, block=128)


MASKS = (
    MaskRule(),
    MaskRule(sliding_window=30),
    MaskRule(attention_chunk_size=50),
    MaskRule(sliding_window=70, num_sink_tokens=40),
    MaskRule(causal=False, sliding_window=9),
)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("page_size", [8, 64])
def test_blocks_are_whole_where_they_say_so(mask: MaskRule, page_size: int) -> None:
    """By trying every key: each seen key is in one block of a tile, whole blocks hold keys that all queries see."""
    rng = np.random.default_rng(page_size)
    seq_len = rng.integers(1, 400, 60)
    first = rng.integers(0, seq_len)
    last = np.minimum(seq_len - 1, first + rng.integers(0, 40, 60))
    tiles = (jnp.asarray(x, jnp.int32) for x in (first, last, seq_len))

    @jax.jit
    def plan(*tiles: jax.Array) -> tuple[Any, ...]:
        keys = Keys.of_tiles(mask, *tiles, page_size, 64)
        number = jnp.arange(16, dtype=jnp.int32)[:, None]
        return keys, Keys(*(x[None] for x in keys)).block(number), keys.num_whole

    keys, order, num_whole = jax.tree.map(np.asarray, plan(*tiles))
    visible = jax.jit(mask.visible)
    key = np.arange(400, dtype=np.int32)
    for i, end in enumerate(keys.end):
        pos = np.minimum(first[i] + np.arange(40, dtype=np.int32), last[i])[:, None].astype(np.int32)
        seen = np.asarray(visible(key, pos, pos, np.int32(seq_len[i]))) & (key < seq_len[i])
        blocks = order[:end, i]
        assert sorted(blocks) == list(range(end))
        slots = blocks[:, None] * 64 + np.arange(64)
        places = slots + np.where(slots < keys.sink_pages[i] * page_size, 0, keys.shift[i] * page_size)
        assert set(key[seen.any(axis=0)]) <= set(places.reshape(-1))
        assert set(places[: num_whole[i]].reshape(-1)) <= set(key[seen.all(axis=0)])


@pytest.mark.parametrize("num_blocks", [1, 3, 7])
def test_the_plan_gives_every_block_to_one_piece(num_blocks: int) -> None:
    """Each block of each unit once; shares that differ by less than a block; a unit's pieces are its own."""
    config = GpuConfig(MaskRule(sliding_window=300), None, 2, 1, 64, 64, 16, "bfloat16", "bfloat16", 64, 2)
    plan = jax.jit(plan_decode, static_argnums=(1, 2))
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lens = rng.integers(1, 500, 5).astype(np.int32)
        q_lens = rng.integers(0, 2, 5).astype(np.int32)
        batch = Batch(lens, np.zeros_like(lens), np.where(np.arange(5) < 4, q_lens, 0).astype(np.int32))
        pieces, blocks, units = (np.asarray(x) for x in plan(batch, config, num_blocks))
        done = [[] for _ in units]
        shares = []
        for first, end in blocks:
            shares.append(0)
            for piece in range(first, end):
                unit = pieces[piece, Field.SEQ] * 2 + pieces[piece, Field.HEAD]
                own = range(pieces[piece, Field.FIRST], pieces[piece, Field.END])
                done[unit] += own
                shares[-1] += len(own)
                assert units[unit, 0] <= piece < units[unit, 1] or not own
        for unit, found in enumerate(done):
            seq = unit // 2
            live = seq < 4 and q_lens[seq]
            first_page = max(lens[seq] - 300, 0) // 16
            pages = -(-lens[seq] // 16) - first_page
            assert found == list(range(-(-pages * 16 // 64) if live else 0))
            assert units[unit, 1] - units[unit, 0] == 0 or live
        assert max(shares) <= -(-sum(shares) // num_blocks) or not any(shares)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "packed": ({"platform": "tpu"}, "GPU kernels read split K and V pages"),
    "float32": ({"q_dtype": "float32"}, "take bfloat16 or float16 queries, got float32"),
    "mixed": ({"kv_dtype": "float16"}, "take pages of bfloat16 as the queries or of 8 bits, got float16"),
    "page": ({"page_size": 24}, "page sizes that are powers of two from 8 to 128, got 24"),
    "small page": ({"page_size": 4}, "page sizes that are powers of two from 8 to 128, got 4"),
    "dim": ({"head_dim": 72}, "head dimensions from 64 to 256 in steps of 16, got 72 and 72"),
    "dim, 8 bits": ({"head_dim": 80, "kv_dtype": "int8"}, "from 64 to 256 in steps of 32, got 80 and 80"),
    "small dim": ({"head_dim": 32}, "head dimensions from 64 to 256 in steps of 16, got 32 and 32"),
    "group": ({"num_q_heads": 130}, "at most 64 query heads per KV head, got 65"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_the_kernels_cannot_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="gpu" refuses; "auto" on a GPU warns once and gives what Triton gives, or XLA over packed pages."""
    change, message = BAD[name]
    backend, path = ("xla", "vectorised XLA") if name == "packed" else ("triton", "a kernel in Triton")
    shape = replace(SHAPE, **{"num_tokens": 8, "num_q_heads": 4, "num_kv_heads": 2, **change})
    case = make_case(12, shape, [(1, 5), (3, 9)])
    arguments = {"sm_scale": 0.1, "num_kv_heads": 2}
    with pytest.raises(NotImplementedError, match=f"ragged_paged_attention: .*{message}"):
        ragged_paged_attention(*case.arrays, **arguments, backend="gpu")
    expected = ragged_paged_attention(*case.arrays, **arguments, backend=backend)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(mosaic, "reason_without_hopper", lambda: None)
    with pytest.warns(RuntimeWarning, match=f"{path} runs instead"):
        result = ragged_paged_attention(*case.arrays, **arguments)
    np.testing.assert_array_equal(np.asarray(result.out), np.asarray(expected.out))
    ragged_paged_attention(*case.arrays, **arguments)  # no second warning


def test_other_cards_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="10.0")])
    assert mosaic.reason_without_hopper() == "GPU kernels need compute capability 9.0 (Hopper), got 10.0"
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability="9.0")])
    assert mosaic.reason_without_hopper() is None


def test_the_op_writes_new_kv_and_attends(monkeypatch: pytest.MonkeyPatch) -> None:
    """backend="gpu" on split pages, 8-bit ones with scales: every token sees what the step itself writes."""
    small = functools.partial(kernel_gpu.ragged_paged_attention, tuning=SMALL)
    monkeypatch.setattr(kernel_gpu, "ragged_paged_attention", small)
    shape = replace(SHAPE, kv_dtype="float8_e4m3fn")
    rows = [(1, 20), (21, 30)]
    case = make_case(11, shape, rows)
    rng = np.random.default_rng(0)
    new_kv = tuple(jnp.asarray(random_values(rng, (48, 1, 64), "bfloat16")) for _ in range(2))
    slots = np.full(48, -1, np.int32)
    token = 0
    for row, (q_len, seq_len) in enumerate(rows):
        for pos in range(seq_len - q_len, seq_len):
            slots[token], token = case.block_tables[row, pos // 16] * 16 + pos % 16, token + 1

    def step(*arrays, backend="gpu"):  # type: ignore[no-untyped-def]
        *arrays, k, v, slots = arrays
        scale = jnp.float32(0.5)
        extra = {"new_kv": (k, v), "slot_mapping": slots, "sm_scale": 0.125, "return_lse": True, "backend": backend}
        return ragged_paged_attention(*arrays, **extra, k_scale=scale, v_scale=scale)

    arguments = (*case.arrays, *new_kv, jnp.asarray(slots))
    out, lse, pages = compile_on_gpu(step, *arguments)(*arguments)
    expected = jax.jit(functools.partial(step, backend="reference"))(*arguments)
    chex.assert_trees_all_equal(as_bytes(pages), as_bytes(expected.pages), strict=True)
    assert_close(out, expected.out, "bfloat16", "out")
    assert_close(lse, expected.lse, "float32", "lse")


def test_heads_split_over_devices() -> None:
    """Inside `jax.shard_map` as kvjax.device calls it: each device has its own heads, tables are whole."""
    shape = replace(SHAPE, num_q_heads=4, num_kv_heads=2)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))
    heads, pages, whole = (jax.sharding.PartitionSpec(*axes) for axes in ((None, "tp"), (None, None, "tp"), ()))

    def call(*arrays: jax.Array) -> jax.Array:
        return ragged_paged_attention(*arrays, sm_scale=0.1, backend="gpu").out

    specs = (heads, (pages, pages), *[whole] * 4)
    sharded = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=heads, check_vma=False)
    assert jax.eval_shape(sharded, *make_case(0, shape, []).arrays).shape == (48, 4, 64)


@pytest.mark.parametrize("group", range(1, 65))
def test_pieces_fill_the_rows(group: int) -> None:
    """Every head and token of a tile once, in whole eights, without overlap, in 128 rows; heads divide the group."""
    shape = TileShape.of(group)
    assert group % shape.heads == 0
    rows, places = [], []
    for warpgroup in range(2):
        for piece in shape.pieces(warpgroup):
            assert piece.num_rows % 8 == piece.row % 8 == piece.token % 8 == 0
            assert piece.row + piece.num_rows <= 64
            rows += [64 * warpgroup + piece.row + i for i in range(piece.num_rows)]
            places += [(piece.head, piece.token + i) for i in range(piece.num_rows)]
    assert rows == list(range(len(rows)))
    assert places == [(head, token) for head in range(shape.heads) for token in range(shape.tokens)]
