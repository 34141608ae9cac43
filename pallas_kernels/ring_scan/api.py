"""The recurrence of a Mamba 2 layer from states that are written once in a while, not in every step.

Flow:    inputs of the new tokens, states and rings to read -> [ring_scan] -> outputs, entries and states written
Source:  Mamba-2 (arXiv 2405.21060, section 6: the state is a sum over tokens, an output a masked attention)

A page holds the state after a *base* of tokens, and a ring of R slots with what each later token adds to it: its input,
its time step and its b (`ScanRing`). `pallas_kernels.ring_step` says what a step does with them. With R slots a
decoding sequence writes its state every R steps. It may go on from any token of the ring: a rejected draft only makes
`num_held` smaller.

A slot is the first axis of a page, so that an entry is in one piece, and so are the entries held. Its shape is free:
`xs` [pages, R, H, P], `dts` [pages, R, H] and `bs` [pages, R, G, N] do, or rows of 128 words as `ring_page_shapes`
says. TPU kernels take those alone: a head has fewer numbers than a row has lanes, and a DMA writes whole rows.

Axis names: T new tokens (padded), S sequences (padded), R slots of a ring, H heads, P numbers of a head, N numbers of a
state, G groups of heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax

from pallas_kernels.backends import resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.layouts import slot_rows
from pallas_kernels.lazy import lazy
from pallas_kernels.ring_checks import check_ring_step
from pallas_kernels.ring_scan import reference, validate, xla_scan
from pallas_kernels.ring_scan.arguments import Options, Scan, ScanRing
from pallas_kernels.ring_step import RingArrays
from pallas_kernels.slab_pages import in_one_column, name_in_slabs

if TYPE_CHECKING:
    from pallas_kernels.ring_scan import tpu_scan
    from pallas_kernels.tpu import memory
else:
    tpu_scan = lazy("pallas_kernels.ring_scan.tpu_scan")
    memory = lazy("pallas_kernels.tpu.memory")


class RingScanOutput(NamedTuple):
    """Outputs of the new tokens, 0 for padding, in the dtype of `x`; states and ring, those of the step written.

    Arrays that came in one column of slabs go out in one: each has the memory with all that was written.
    """

    out: jax.Array
    states: jax.Array
    ring: ScanRing


_SCANS = {"reference": reference, "xla": xla_scan, "tpu": tpu_scan}


def ring_page_shapes(
    num_slots: int, num_heads: int, head_dim: int, num_groups: int, state_dim: int, dtype: str
) -> tuple[tuple[tuple[int, ...], str], ...]:
    """(shape, dtype) of a page of `xs`, `dts` and `bs`, whose slots are whole rows of 128 words.

    Of one device: `num_heads` and `num_groups` are those of its shard. `dtype`: of x and b.
    """
    counts = ((num_heads * head_dim, dtype), (num_heads, "float32"), (num_groups * state_dim, dtype))
    return tuple(((num_slots, *slot_rows(*count)), count[1]) for count in counts)


@by_default_rules
def ring_scan(
    x: jax.Array,  # [T, H, P]
    states: jax.Array,  # [pages, H, P, N]
    dt: jax.Array,  # [T, H] before softplus
    a: jax.Array,  # [H] negative
    b: jax.Array,  # [T, G, N]
    c: jax.Array,  # as b
    ring: ScanRing,
    query_start_loc: jax.Array,  # int32[S + 1] first new token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    state_read: jax.Array,  # int32[S] page to go on from; 0, the null page, which is all zero: from nothing
    state_write: jax.Array,  # int32[S] page that gets the new tokens' entries and a written state; page 0 never does
    num_held: jax.Array,  # int32[S] tokens in the ring of the page that is read; 0 where that is page 0
    writes_state: jax.Array,  # bool[S] whether the state after them is written, and the ring starts anew
    *,
    max_new_tokens: int,  # at most R
    d: jax.Array | None = None,  # [H] factor of the input added to the output
    dt_bias: jax.Array | None = None,  # [H]
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> RingScanOutput:
    """The outputs of `selective_scan`; in a ring, what its tokens add. Of a sequence with k held, n new tokens:

        `S`                  state of page `state_read`, moved on by slots 0 to k - 1 of its ring
        `writes_state`       S goes to page `state_write`, whose first free slot f is then 0; also where n = 0
        not `writes_state`   both pages are one, k + n <= R, f = k
        `n <= max_new_tokens`  outputs from S; slots f to f + n - 1 of page `state_write` get the tokens' entries
        `n > max_new_tokens`   outputs are 0 and no slot is written: the caller runs `selective_scan` from S

    With `step = clip(softplus(dt + dt_bias), dt_limit)`, `D[j] = exp(a * sum of step over the tokens after j up to t)`,
    `B` the base state and `D` what is left of that:

        `out[t] = D * B c[t] + sum_{j <= t} D[j] * (b[j] . c[t]) * step[j] * x[j] + d * x[t]`

    over the held tokens and the new ones: no state is updated for an output. All is computed in float32, from the
    dtypes of states and ring and back to them.

    A page that one sequence writes is read by no other. No other page changes; in a page that is written, slots behind
    the new ones may hold anything afterwards, and are never read. Callers donate states and ring: they are written in
    place.

    GPUs have no kernel of this op; "auto" takes the vectorised path there, as it does on CPU.

    Raises:
        ValueError: shapes, dtypes or (outside `jit`) values do not fit; nothing is written.
        NotImplementedError: the states are Mamba 1's, of which a token's entry is not much smaller than a state; or
            `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    inputs = Scan(x, dt, a, b, c, d, dt_bias)
    num_slots = validate.check_inputs(inputs, states, ring, dt_limit)
    arrays = RingArrays(query_start_loc, distribution, state_read, state_write, num_held, writes_state)
    check_ring_step(validate.OP, x.shape[0], states.shape[0], num_slots, max_new_tokens, arrays)
    options, pages = (
        Options((float(dt_limit[0]), float(dt_limit[1])), int(max_new_tokens)),
        in_one_column((states, *ring)),
    )
    reasons = {"tpu": lambda: tpu_scan.reason_not_supported(inputs, [*pages], options.max_new_tokens)}
    name, path = name_in_slabs(validate.OP, states), xla_scan.path_over(states, ring, state_read.shape[0])
    chosen = resolve_backend(name, backend, reasons, path)
    if chosen == "tpu":
        chosen = memory.with_room(validate.OP, backend, tpu_scan.ring_scan, inputs, pages, arrays, options=options)
    if backend == "auto" and chosen == "reference":
        chosen = "xla"
    out, pages = _SCANS[chosen].ring_scan(inputs, pages, arrays, options=options)
    return RingScanOutput(out, pages[0], ScanRing(pages[1], pages[2], pages[3]))
