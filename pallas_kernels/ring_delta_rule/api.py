"""The recurrence of a gated delta net from states that are written once in a while, not in every step.

Flow:    inputs of the new tokens, states and rings to read -> [ring_delta_rule] -> outputs, entries and states written
Source:  Gated DeltaNet (arXiv 2412.06464, section 3), Kimi Linear (arXiv 2510.26692, section 3)

A page holds the state after a *base* of tokens, and a ring of R slots with what each later token adds to it: its key,
its delta and its decay (`DeltaRing`). `pallas_kernels.ring_step` says what a step does with them. With R slots a
decoding sequence writes its state every R steps. It may go on from any token of the ring: a rejected draft only makes
`num_held` smaller.

A slot is the first axis of a page, so that an entry is whole rows of lanes, in one piece, and so are the entries held:
`keys` [pages, R, G, K], `deltas` [pages, R, H, V], `decays` [pages, R, H] or [pages, R, H, K]. On TPU, decays per head
belong into slabs: an array of their own XLA copies, to turn it, in every step.

Bytes of states and rings that a decoding step moves, of those of `gated_delta_rule` (float32 states, bfloat16 keys):

    R                                                        8     12    16    32
    Qwen3-Next, deltas float32                               0.59  0.58  0.58  0.60
    Qwen3-Next, deltas bfloat16                              0.58  0.56  0.56  0.57
    Kimi Linear, deltas and decays float32                   0.62  0.62  0.62  0.69
    Kimi Linear, deltas bfloat16, decays float32             0.61  0.60  0.61  0.65
    Kimi Linear, deltas and decays bfloat16                  0.60  0.59  0.59  0.62

Axis names: T new tokens (padded), S sequences (padded), R slots of a ring, G key heads, H value heads, K numbers of a
key, V numbers of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax

from pallas_kernels.backends import resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.lazy import lazy
from pallas_kernels.ring_checks import check_ring_step
from pallas_kernels.ring_delta_rule import reference, validate, xla_rule
from pallas_kernels.ring_delta_rule.arguments import DeltaRing, Inputs
from pallas_kernels.ring_step import RingArrays
from pallas_kernels.slab_pages import in_one_column, name_in_slabs

if TYPE_CHECKING:
    from pallas_kernels.ring_delta_rule import tpu_rule
    from pallas_kernels.tpu import memory
else:
    tpu_rule = lazy("pallas_kernels.ring_delta_rule.tpu_rule")
    memory = lazy("pallas_kernels.tpu.memory")


class RingDeltaOutput(NamedTuple):
    """Outputs of the new tokens, 0 for padding, in the dtype of `v`; states and ring, those of the step written.

    Arrays that came in one column of slabs go out in one: each has the memory with all that was written.
    """

    out: jax.Array
    states: jax.Array
    ring: DeltaRing


_RULES = {"reference": reference, "xla": xla_rule, "tpu": tpu_rule}


@by_default_rules
def ring_delta_rule(
    q: jax.Array,  # [T, G, K]
    k: jax.Array,  # [T, G, K]
    v: jax.Array,  # [T, H, V]
    g: jax.Array,  # [T, H] logarithm of the decay; Kimi Delta Attention: [T, H, K]
    beta: jax.Array,  # [T, H] how much of the difference is written, after the sigmoid
    states: jax.Array,  # [pages, H, K, V]
    ring: DeltaRing,
    query_start_loc: jax.Array,  # int32[S + 1] first new token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    state_read: jax.Array,  # int32[S] page to go on from; 0, the null page, which is all zero: from nothing
    state_write: jax.Array,  # int32[S] page that gets the new tokens' entries and a written state; page 0 never does
    num_held: jax.Array,  # int32[S] tokens in the ring of the page that is read; 0 where that is page 0
    writes_state: jax.Array,  # bool[S] whether the state after them is written, and the ring starts anew
    *,
    max_new_tokens: int,  # at most R
    scale: float | None = None,  # None: K ** -0.5
    use_qk_l2norm: bool = False,
    backend: str = "auto",
) -> RingDeltaOutput:
    """The outputs of `gated_delta_rule`; in a ring, what its tokens add. Of a sequence with c held, n new tokens:

        `S`                  state of page `state_read`, moved on by slots 0 to c - 1 of its ring
        `writes_state`       S goes to page `state_write`, whose first free slot f is then 0; also where n = 0
        not `writes_state`   both pages are one, c + n <= R, f = c
        `n <= max_new_tokens`  outputs from S; slots f to f + n - 1 of page `state_write` get the tokens' entries
        `n > max_new_tokens`   outputs are 0 and no slot is written: the caller runs `gated_delta_rule` from S

    With `D[j]` what decay leaves of token j at token t, `B` the base state and `D` what is left of that:

        `delta[t] = beta[t] * (v[t] - (D k[t])^T B - sum_{j < t} (k[t] . D[j] k[j]) delta[j])`
        `out[t] = scale * ((D q[t])^T B + sum_{j <= t} (q[t] . D[j] k[j]) delta[j])`

    over the held tokens and the new ones: no state is updated for an output. `use_qk_l2norm` divides q and k by their
    lengths, as there. All is computed in float32, from the dtypes of states and ring and back to them; entries in
    bfloat16 are rounded for later steps, not for this one. Keys have the dtype of k, deltas and decays any.

    A page that one sequence writes is read by no other. No other page changes; in a page that is written, slots behind
    the new ones may hold anything afterwards, and are never read. Callers donate states and ring: they are written in
    place.

    GPU has no kernel of this op; "auto" takes the vectorised path there, as it does on CPU.

    Raises:
        ValueError: shapes, dtypes or (outside `jit`) values do not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    num_slots = validate.check_inputs(Inputs(q, k, v, g, beta), states, ring)
    options = validate.check_options(q.shape[2], scale, use_qk_l2norm, max_new_tokens)
    reasons = {"tpu": lambda: tpu_rule.reason_not_supported(v, g, states, ring, options)}
    path = xla_rule.path_over(states, ring, state_read.shape[0])
    chosen = resolve_backend(name_in_slabs(validate.OP, states), backend, reasons, path)
    step = RingArrays(query_start_loc, distribution, state_read, state_write, num_held, writes_state)
    check_ring_step(validate.OP, v.shape[0], states.shape[0], num_slots, max_new_tokens, step)
    arguments = (Inputs(q, k, v, g, beta), in_one_column((states, *ring)), step)
    if chosen == "tpu":
        chosen = memory.with_room(validate.OP, backend, tpu_rule.ring_delta_rule, *arguments, options=options)
    if backend == "auto" and chosen == "reference":
        chosen = "xla"
    out, pages = _RULES[chosen].ring_delta_rule(*arguments, options=options)
    return RingDeltaOutput(out, pages[0], DeltaRing(pages[1], pages[2], pages[3]))
