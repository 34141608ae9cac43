"""What differs between compiling a Mosaic GPU kernel and interpreting it, and between versions of Pallas.

Flow:    gpu_*.py of every op -> [mosaic] -> jax.experimental.pallas.mosaic_gpu

The interpreter runs a kernel on CPU, thread by thread, and reports races. Parts of it, or of one version of it, are
missing: it knows no register layouts (jax 0.10) and no `run_state`, which a matrix product with an operand in
registers needs (up to jax 0.12). `is_interpreted` lets the few functions here do the same with plain arrays.

Where a product is replaced, its operands are read with ordinary loads. Compiled, the tensor core reads them itself,
in order with later bulk copies into the same memory; an ordinary load is not ordered, so that the replacement alone
would race. `fence` after it makes the orders equal, and whatever the race detector then reports is the kernel's own.

A *warpgroup* is 128 threads, which Pallas calls a thread of the kernel. Matrices in registers have 64 rows for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import config as _config
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

NUM_SMS = 132  # H100 and H200 SXM
MOST_BLOCKS = 65_535  # of any axis of a CUDA grid but the last one of ours, its x
SMEM_BYTES = 232_448  # of one block on Hopper
_WARPS = 4  # of a warpgroup
ROWS = 64  # of a matrix in one warpgroup's registers

# From jax 0.12 on kernels are compiled for linking, where ptxas ignores `set_max_registers`: three warpgroups then have
# 168 registers a thread each, whatever they ask for.
MOVES_REGISTERS = jax.__version_info__ < (0, 12)

_BEFORE_0_11 = jax.__version_info__ < (0, 11)
_MATRIX = plgpu.Layout.WGMMA
_PER_ROW = _MATRIX.reduce(1)
# Layout of arrays [n], a multiple of 128, that may be strided in memory: one element a thread, then the next 128.
ONE_PER_THREAD = plgpu.Layout.TILED(
    plgpu.Tiling(((128,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
_EIGHT_BIT_MATRIX = plgpu.Layout.WGMMA_UPCAST_2X  # four neighbours with a thread: one load of 32 bits


def is_interpreted() -> bool:
    """Whether kernels traced here are interpreted: inside `force_gpu_interpret_mode`."""
    return _config.pallas_tpu_interpret_mode_context_manager.value is not None


def reason_without_hopper() -> str | None:
    """Why the default device cannot run the kernels, in words; None where it can, or is no GPU."""
    if jax.default_backend() != "gpu":
        return None
    capability = getattr(jax.devices()[0], "compute_capability", None)
    return None if capability == "9.0" else f"GPU kernels need compute capability 9.0 (Hopper), got {capability}"


def reason_of_floats(*arrays: jax.Array) -> str | None:
    """Why kernels that compute in float32 cannot take arrays of these dtypes, in words; None where they can."""
    names = [jnp.dtype(array.dtype).name for array in arrays]
    if all(name in ("float32", "bfloat16", "float16") for name in names):
        return None
    return f"GPU kernels take float32, bfloat16 and float16, got {' and '.join(names)}"


def num_sms() -> int:
    """Multiprocessors of the default device (114 of an H100 PCIe); those of an H100 SXM where it is no GPU."""
    if jax.default_backend() != "gpu":
        return NUM_SMS
    return int(getattr(jax.devices()[0], "core_count", NUM_SMS))


def card_name() -> str | None:
    """The card of the default device, as "h100" or "h200"; None where it is no NVIDIA GPU."""
    if jax.default_backend() != "gpu":
        return None
    maker, _, kind = jax.devices()[0].device_kind.partition(" ")  # such as "NVIDIA H100 80GB HBM3"
    return kind.split()[0].lower() if maker == "NVIDIA" and kind else None


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    outputs: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any] = (),
    grid: dict[str, int],
    num_warpgroups: int = 1,
) -> Callable[..., Sequence[jax.Array]]:
    """A kernel over `grid` (axis name -> size); the axis "warpgroup" tells a block's warpgroups apart.

    Raises:
        NotImplementedError: an axis other than the last exceeds what a CUDA grid has.
    """
    _check_grid(name, grid)
    body.__name__ = name
    threads: dict[str, Any] = {"num_threads": num_warpgroups, "thread_name": "warpgroup"} if num_warpgroups > 1 else {}
    return plgpu.kernel(
        body,
        out_type=list(outputs),
        scratch_types=list(scratch),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        compiler_params=_compiler_params(),
        **threads,
    )


def _check_grid(name: str, grid: dict[str, int]) -> None:
    for axis, size in list(grid.items())[:-1]:
        if size > MOST_BLOCKS:
            raise NotImplementedError(
                f"{name}: expected a grid of at most {MOST_BLOCKS:,} along {axis!r}, got {size:,}; use smaller steps"
            )


def kernel_in_place(
    body: Callable[..., None], *, name: str, outputs: Sequence[jax.ShapeDtypeStruct], grid: dict[str, int]
) -> Callable[..., tuple[Sequence[jax.Array], jax.Array]]:
    """A kernel of one warpgroup a block that changes its last argument: (*inputs, array) -> (outputs, array).

    The array is updated where it is if its caller donated it. `body` sees it after the inputs, before the outputs.

    Raises:
        NotImplementedError: an axis other than the last exceeds what a CUDA grid has.
    """
    _check_grid(name, grid)
    run = pl.kernel(  # plgpu.kernel of jax 0.10 takes no references
        body,
        out_type=list(outputs),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        compiler_params=_compiler_params(),
        name=name,
    )

    def call(*arguments: jax.Array) -> tuple[Sequence[jax.Array], jax.Array]:
        *inputs, array = arguments
        changed = jax.new_ref(array, memory_space=plgpu.GMEM)
        return run(*inputs, changed), jax.freeze(changed)

    return call


def _compiler_params() -> plgpu.CompilerParams:
    return plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def tile_columns(num_columns: int) -> int:
    """Columns that `load_matrix` should take of a matrix at a time: whole tiles, few registers."""
    return min(64, num_columns & -num_columns)


def tiled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory of `shape`, tiled and swizzled over its last two axes as bulk copies and products want it.

    8-bit values, of which no product is made, have tiles of `tile_columns` too.
    """
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle((shape[-1] if bits > 8 else tile_columns(shape[-1])) * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))  # type: ignore[abstract]
    transforms = (tiling, plgpu.SwizzleTransform(swizzle))  # type: ignore[abstract]
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def chunked_rows(shape: tuple[int, int], dtype: Any, num_columns: int) -> Any:
    """Shared memory of `shape` [rows, n], plain, for rows that are copied one by one and read `num_columns` at a time.

    It says that it is not swizzled. Where nothing is said, Pallas (jax 0.11 and 0.12) may choose tiles of one row that
    are swizzled: reads of columns beyond the first tile then find others than the copies wrote.
    """
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((1, num_columns)),))  # type: ignore[abstract]


def matrix(x: jax.Array) -> jax.Array:
    """`x` [rows, n] in the register layout of matrix products."""
    return x if is_interpreted() else plgpu.layout_cast(x, _MATRIX)


def per_row(x: jax.Array) -> jax.Array:
    """`x` [rows] in registers, each element with the threads that hold its row of a matrix."""
    return x if is_interpreted() else plgpu.layout_cast(x, _PER_ROW)


def spread(x: jax.Array, num_columns: int) -> jax.Array:
    """A value per row as a matrix of `num_columns` equal columns."""
    return lax.broadcast_in_dim(x, (x.shape[0], num_columns), [0])


def row_index(num_rows: int) -> jax.Array:
    """int32[num_rows] 0, 1, ... per row."""
    if is_interpreted():
        return lax.iota(jnp.int32, num_rows)
    return plgpu.broadcasted_iota(jnp.int32, (num_rows,), 0, layout=_PER_ROW)


def row_chunks(num_columns: int) -> Any:
    """Layout of matrices [rows, num_columns], 64 or 128, that go from plain to tiled memory, rows a multiple of 16.

    8 or 16 threads a row, eight elements each: of 16 bits, neither side's accesses meet in a bank.
    """
    rows = 32 // (num_columns // 8)
    tiles = plgpu.Tiling(((_WARPS * rows, num_columns), (rows, num_columns), (8,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def chunk_row_index(num_rows: int, num_columns: int) -> jax.Array:
    """As `row_index`, for rows of `row_chunks(num_columns)`."""
    if is_interpreted():
        return lax.iota(jnp.int32, num_rows)
    layout = row_chunks(num_columns).reduce(1)
    return plgpu.broadcasted_iota(jnp.int32, (num_rows,), 0, layout=layout)


def load_chunk_columns(ref: Any) -> Callable[[int], jax.Array]:
    """(i) -> column i of `ref` [rows, n] in memory that is not tiled, as a value per row of `row_chunks(8 * n)`.

    `ref` holds integers of which int32 has all.
    """
    if is_interpreted():
        columns = ref[...].astype(jnp.int32)
        return lambda i: columns[:, i]
    lanes = ref.shape[1]
    rows = 32 // lanes
    tiles = plgpu.Tiling(((_WARPS * rows, lanes), (rows, lanes), (1,)))
    layout = plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
    values = load(ref, layout).astype(jnp.int32)
    number = plgpu.broadcasted_iota(jnp.int32, ref.shape, 1, layout=layout)
    return lambda i: jnp.sum(jnp.where(number == i, values, 0), axis=1)


def readable_beyond(x: jax.Array, num_elements: int) -> jax.Array:
    """`x` [m, n] such that a bulk copy may begin within a row and end `num_elements` beyond: it finds zeros there.

    The card needs nothing for that; the interpreter copies only what there is.
    """
    return jnp.pad(x, [(0, 0), (0, num_elements)]) if is_interpreted() else x


def column_index(num_rows: int, num_columns: int) -> jax.Array:
    """int32[num_rows, num_columns]: the index of the column."""
    shape = (num_rows, num_columns)
    if is_interpreted():
        return lax.broadcasted_iota(jnp.int32, shape, 1)
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_MATRIX)


def load_matrix(ref: Any, dtype: Any) -> jax.Array:
    """`ref` [rows, n] in shared memory as a matrix of `dtype` in registers.

    `fence` must follow before a bulk copy refills it.
    """
    if is_interpreted():
        return ref[...].astype(dtype)
    layout = _MATRIX if jnp.dtype(ref.dtype).itemsize > 1 else _EIGHT_BIT_MATRIX
    index = ((),) if _BEFORE_0_11 else ()
    return matrix(plgpu.load(ref, *index, layout=layout, optimized=False).astype(dtype))


def store_plain(ref: Any, x: jax.Array) -> None:
    """`x` [rows, n] in registers to shared memory that is not tiled, whose rows may then be copied one by one."""
    if hasattr(plgpu, "store") and not is_interpreted():  # from jax 0.12 on
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def load_per_row(ref: Any) -> jax.Array:
    """`ref` [rows] in global memory as a value per row."""
    return load(ref, _PER_ROW)


def load_per_column(ref: Any) -> jax.Array:
    """`ref` [columns] in global memory as a value per column of a matrix."""
    return load(ref, _MATRIX.reduce(0))


def lane_rows(num_columns: int) -> Any:
    """Layout of matrices [rows, num_columns], a multiple of 8, that go between registers and global memory.

    Up to 8 neighbouring threads share a row, each with four neighbouring elements of every 32: loads of 16 bytes of
    float32 that fill whole sectors, few steps to sum a row up, a column's value with few threads. Rows: multiples of
    `lane_rows_step`.
    """
    lanes = _lanes(num_columns)
    rows = 32 // lanes
    tiles = plgpu.Tiling(((4 * rows, 4 * lanes), (rows, 4 * lanes), (4,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def lane_rows_step(num_columns: int) -> int:
    """Rows that `lane_rows` takes at least."""
    return 128 // _lanes(num_columns)


def lane_columns(num_columns: int) -> Any:
    """Layout of matrices [rows, num_columns], 64 or 32, that are summed over their rows.

    Each warp has a quarter of the columns, neighbouring threads four of these each: loads of 16 bytes of float32 that
    fill whole sectors. A column's rows lie with 8 or 16 threads of its warp. Rows: multiples of `lane_columns_step`.
    """
    rows = lane_columns_step(num_columns)
    tiles = plgpu.Tiling(((rows, num_columns), (rows, num_columns // 4), (4,)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1)


def lane_columns_step(num_columns: int) -> int:
    """Rows that `lane_columns` takes at least."""
    return 512 // num_columns


def _lanes(num_columns: int) -> int:
    return next(lanes for lanes in (8, 4, 2) if num_columns % (4 * lanes) == 0)


def load(ref: Any, layout: Any) -> jax.Array:
    """`ref` in memory that is not tiled, in registers of this layout."""
    if is_interpreted():
        return ref[...]
    index = ((),) if _BEFORE_0_11 else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def load_columns(ref: Any, num_columns: int) -> list[jax.Array]:
    """The columns, strided in memory, of `ref` [rows * num_columns], rows a multiple of 128, as `ONE_PER_THREAD`."""
    if is_interpreted():  # it knows no references of another shape
        return list(ref[...].reshape(-1, num_columns).T)
    rows = ref.reshape(ref.shape[0] // num_columns, num_columns)
    return [load(rows.at[:, n], ONE_PER_THREAD) for n in range(num_columns)]


def store_columns(ref: Any, columns: Sequence[jax.Array]) -> None:
    """Stores what `load_columns` gives."""
    if is_interpreted():
        ref[...] = jnp.stack(columns, axis=1).reshape(-1)
        return
    rows = ref.reshape(ref.shape[0] // len(columns), len(columns))
    for n, column in enumerate(columns):
        store_plain(rows.at[:, n], column)


def zeros(shape: tuple[int, ...], dtype: Any, layout: Any) -> jax.Array:
    """Zeros in registers of this layout, from where they may be stored."""
    x = jnp.zeros(shape, dtype)
    return x if is_interpreted() else plgpu.layout_cast(x, layout)


def fence() -> None:
    """Orders this warpgroup's ordinary loads and stores of shared memory before later bulk copies and products."""
    plgpu.commit_smem()


def start_copies(
    count: int, start: Callable[[int, Any], None], place: Callable[[int], Any] = lambda number: None
) -> None:
    """Runs `start`, which starts one bulk copy into shared memory, for the numbers below `count`.

    Each of the warpgroup's warps has a quarter of them, where Pallas can tell warps apart (from jax 0.12 on): the four
    start copies at once, and do not wait for each other at every one. `place(number)`, given to `start`, reads from
    memory where to copy from: all of a warp's before its first copy.
    """

    def start_all(numbers: range) -> None:
        for number, found in [(number, place(number)) for number in numbers]:
            start(number, found)

    if is_interpreted() or not hasattr(plgpu, "warp_map"):
        start_all(range(count))
        return

    def by_warp(warp: jax.Array) -> None:
        for own in range(min(count, _WARPS)):
            pl.when(warp == own)(functools.partial(start_all, range(own, count, _WARPS)))

    plgpu.warp_map(by_warp)


def dot_transposed(a: Any, b: Any, meanwhile: Callable[[], None] = lambda: None) -> jax.Array:
    """`a @ b.T` float32[m, n] of `a` [m, k] and `b` [n, k], both in shared memory.

    `meanwhile` runs after the product is issued, before it is waited for.
    """
    if is_interpreted():
        product = _plain_dot(a[...], b[...].T)
        meanwhile()
        return product

    def multiply(accumulator: Any) -> jax.Array:
        transposed = plgpu.transpose_ref(b, (1, 0)) if _BEFORE_0_11 else b.transpose((1, 0))
        plgpu.wgmma(accumulator, a, transposed)
        meanwhile()
        return accumulator[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def dot_add(total: jax.Array, a: jax.Array, b: Any) -> jax.Array:
    """`total + a @ b` with float32[m, n] `total`, `a` [m, k] in registers or shared memory, `b` [k, n] there."""
    if is_interpreted():
        return total + _plain_dot(a[...], b[...])
    return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.ACC.init(total))


def _plain_dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of arrays that were read with ordinary loads; see the module's text on `fence`."""
    fence()
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
