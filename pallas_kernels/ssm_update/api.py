"""The two recurrences of a Mamba layer over ragged sequences, each from the state in a page to that in another.

Flow:    inputs of the new tokens, states to read -> [causal_conv1d], [selective_scan] -> outputs, states written
Source:  Mamba (arXiv 2312.00752, section 3), Mamba-2 (arXiv 2405.21060, section 7); pages as `GroupPlan` names them

A page of a recurrent layer holds one state of everything before it (`layouts.recurrent_layout`): the array of the
convolution and that of the scan. Each op takes one of them. A sequence reads page `state_read[s]` where
`has_initial_state[s]`, else it starts from zero, and leaves its state after its last new token in the page that
`state_write` names. Both may be one page (decode), or not: a state that is a prefix hit is read and kept. Of L columns,
`state_write` names a page for the state after each of the last L new tokens, as in `gated_delta_rule`: for speculation.
Checkpoints are states left on the way, `checkpoint_pages[s]` those after `checkpoint_ends[s]` new tokens, as there.

Axis names: T new tokens (padded), S sequences (padded), L states kept of a sequence, k checkpoints of it, C channels, W
taps, H heads (Mamba 1: channels), P numbers of a head, N numbers of a state, G groups of heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from pallas_kernels.backends import resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.lazy import lazy
from pallas_kernels.slab_pages import name_in_slabs
from pallas_kernels.ssm_update import reference, validate, xla_scan
from pallas_kernels.ssm_update.arguments import Convolution, Scan
from pallas_kernels.state_checks import check_step, reason_of_checkpoints
from pallas_kernels.state_step import StepArrays

if TYPE_CHECKING:
    from pallas_kernels.ssm_update import gpu_conv, gpu_scan, tpu_conv, tpu_scan, triton_scan
    from pallas_kernels.tpu import memory
else:
    gpu_conv = lazy("pallas_kernels.ssm_update.gpu_conv")
    gpu_scan = lazy("pallas_kernels.ssm_update.gpu_scan")
    tpu_conv = lazy("pallas_kernels.ssm_update.tpu_conv")
    tpu_scan = lazy("pallas_kernels.ssm_update.tpu_scan")
    triton_scan = lazy("pallas_kernels.ssm_update.triton_scan")
    memory = lazy("pallas_kernels.tpu.memory")


class SsmOutput(NamedTuple):
    """Outputs of the new tokens, 0 for padding, in the dtype of `x`; and the states, those of the step written."""

    out: jax.Array
    states: jax.Array


_CONVS = {"reference": reference, "tpu": tpu_conv, "gpu": gpu_conv}
_SCANS = {"reference": reference, "xla": xla_scan, "tpu": tpu_scan, "gpu": gpu_scan, "triton": xla_scan}


@by_default_rules
def causal_conv1d(
    x: jax.Array,  # [T, C]
    states: jax.Array,  # [pages, C, W - 1] the last inputs, oldest first
    weight: jax.Array,  # [C, W], the last tap is the token's own
    query_start_loc: jax.Array,  # int32[S + 1] first new token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    state_read: jax.Array,  # int32[S] page to start from
    state_write: jax.Array,  # int32[S] or int32[S, L] pages to leave states in; page 0 is never written
    has_initial_state: jax.Array,  # bool[S]; those without start from page 0, which is all zero
    checkpoint_ends: jax.Array | None = None,  # int32[S, k] rising, below the sequence's new tokens; 0: none
    checkpoint_pages: jax.Array | None = None,  # int32[S, k] pages to leave states in; 0: none
    *,
    bias: jax.Array | None = None,  # [C]
    activation: str | None = "silu",
    backend: str = "auto",
) -> SsmOutput:
    """Convolution of every channel over its last W inputs, then the activation: `out` is [T, C].

    `out[t] = activation(bias + sum_j weight[:, j] * x[t - W + 1 + j])`, where inputs before the sequence's new tokens
    are those of its state, and zero before its first token. Accumulation is float32.

    A page that one sequence writes is read by no other. Sequences without new tokens write nothing, nor do columns of
    `state_write` for tokens that a sequence does not have. A token with a checkpoint has no page in `state_write`.

    Raises:
        ValueError: shapes, dtypes or (outside `jit`) values do not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    validate.check_conv(x, states, weight, bias, activation)
    reasons = {
        "tpu": lambda: tpu_conv.reason_not_supported(x, states, weight),
        "gpu": lambda: gpu_conv.reason_not_supported(x, states, weight),
    }
    chosen = resolve_backend(name_in_slabs(validate.CONV, states), backend, reasons)
    sequences = (query_start_loc, distribution, state_read, state_write, has_initial_state)
    step = StepArrays(*sequences, checkpoint_ends, checkpoint_pages)
    check_step(validate.CONV, x.shape[0], states.shape[0], step)
    arguments = (Convolution(x, weight, bias), states, step.by_column())
    if chosen == "tpu":
        chosen = memory.with_room(validate.CONV, backend, tpu_conv.causal_conv1d, *arguments, activation=activation)
    return SsmOutput(*_CONVS[chosen].causal_conv1d(*arguments, activation=activation))


@by_default_rules
def selective_scan(
    x: jax.Array,  # Mamba 1: [T, H]; Mamba 2: [T, H, P]
    states: jax.Array,  # Mamba 1: [pages, H, N]; Mamba 2: [pages, H, P, N]
    dt: jax.Array,  # [T, H] before softplus
    a: jax.Array,  # Mamba 1: [H, N]; Mamba 2: [H]; negative
    b: jax.Array,  # Mamba 1: [T, N]; Mamba 2: [T, G, N]
    c: jax.Array,  # as b
    query_start_loc: jax.Array,  # int32[S + 1] first new token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    state_read: jax.Array,  # int32[S] page to start from
    state_write: jax.Array,  # int32[S] or int32[S, L] pages to leave states in; page 0 is never written
    has_initial_state: jax.Array,  # bool[S]; those without start from page 0, which is all zero
    checkpoint_ends: jax.Array | None = None,  # int32[S, k] rising, below the sequence's new tokens; 0: none
    checkpoint_pages: jax.Array | None = None,  # int32[S, k] pages to leave states in; 0: none
    *,
    d: jax.Array | None = None,  # [H] factor of the input added to the output
    dt_bias: jax.Array | None = None,  # [H]
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    backend: str = "auto",
) -> SsmOutput:
    """The recurrence of a Mamba layer: `out` is as `x`. With `step = clip(softplus(dt + dt_bias), dt_limit)`:

    Mamba 1, for channel h:   `state[n] = exp(step * a[n]) * state[n] + step * b[n] * x`,   `out = c . state + d * x`
    Mamba 2, for head h:      `state[p, n] = exp(step * a) * state[p, n] + step * b[g, n] * x[p]`,
                              `out[p] = c[g] . state[p] + d * x[p]`,   with `g = h // (H / G)`

    States are computed in float32, from the pages' dtype and back to it. What else the layer does (gate, norm) is the
    caller's. A page that one sequence writes is read by no other. Sequences without new tokens write nothing, nor do
    columns of `state_write` for tokens that a sequence does not have. A token with a checkpoint has no page in
    `state_write`.

    Raises:
        ValueError: shapes, dtypes or (outside `jit`) values do not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    validate.check_scan(x, states, dt, a, b, c, d, dt_bias, dt_limit)
    reasons = {
        "tpu": lambda: tpu_scan.reason_not_supported(x, states, b),
        "gpu": lambda: gpu_scan.reason_not_supported(x, states),
        "triton": lambda: reason_of_checkpoints(checkpoint_ends) or triton_scan.reason_not_supported(x),
    }
    chosen = resolve_backend(
        name_in_slabs(validate.SCAN, states), backend, reasons, xla_scan.path_over(states, state_read.shape[0])
    )
    sequences = (query_start_loc, distribution, state_read, state_write, has_initial_state)
    step = StepArrays(*sequences, checkpoint_ends, checkpoint_pages)
    check_step(validate.SCAN, x.shape[0], states.shape[0], step)
    options: dict[str, Any] = {"dt_limit": (float(dt_limit[0]), float(dt_limit[1]))}
    arguments = (Scan(x, dt, a, b, c, d, dt_bias), states, step.by_column())
    if chosen == "tpu":
        chosen = memory.with_room(validate.SCAN, backend, tpu_scan.selective_scan, *arguments, **options)
    if chosen == "triton":
        options["by_triton"] = triton_scan.Sizes()
    return SsmOutput(*_SCANS[chosen].selective_scan(*arguments, **options))
