"""The recurrence of a gated delta net over ragged sequences, from the state in a page to those in others.

Flow:    inputs of the new tokens, states to read -> [gated_delta_rule] -> outputs, states written
Source:  Gated DeltaNet (arXiv 2412.06464, section 3), Kimi Linear (arXiv 2510.26692, section 3); pages as `GroupPlan`
         names them

A page of a recurrent layer holds one state of everything before it (`layouts.recurrent_layout`): the array of the
convolution, which `ssm_update.causal_conv1d` moves, and that of the recurrence, which this op moves. A sequence reads
page `state_read[s]` where `has_initial_state[s]`, else it starts from zero, and leaves its state after its last new
token in the page that `state_write` names. Both may be one page (decode), or not: a state that is a prefix hit is read
and kept.

Speculation: `state_write` of L columns names a page for the state after each of the last L new tokens, the last token's
in the last column. A step of one token and d drafts names d + 1 pages there, for example the running block of
`kvjax.core.kinds.mamba` and d of its speculative blocks, in any order; a step of a prompt names one. Once r drafts are
rejected, the state to go on from is in page `state_write[s, L - 1 - r]`: the next step reads it there, or `page_ops`
copies it to where the next plan reads.

Checkpoints: `checkpoint_ends[s]` names up to k lengths within the new tokens of a sequence, `checkpoint_pages[s]` the
pages where the states after so many of them are left, as if the step ended there; the sequence goes on.

Axis names: T new tokens (padded), S sequences (padded), L states kept of a sequence, k checkpoints of it, G key heads,
H value heads, K numbers of a key, V numbers of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax

from pallas_kernels.backends import resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.gated_delta_rule import reference, validate, xla_rule
from pallas_kernels.gated_delta_rule.arguments import Inputs
from pallas_kernels.lazy import lazy
from pallas_kernels.slab_pages import name_in_slabs
from pallas_kernels.state_checks import check_step
from pallas_kernels.state_step import StepArrays

if TYPE_CHECKING:
    from pallas_kernels.gated_delta_rule import gpu_rule, tpu_rule
    from pallas_kernels.tpu import memory
else:
    gpu_rule = lazy("pallas_kernels.gated_delta_rule.gpu_rule")
    tpu_rule = lazy("pallas_kernels.gated_delta_rule.tpu_rule")
    memory = lazy("pallas_kernels.tpu.memory")


class DeltaOutput(NamedTuple):
    """Outputs of the new tokens, 0 for padding, in the dtype of `v`; and the states, those of the step written."""

    out: jax.Array
    states: jax.Array


_RULES = {"reference": reference, "xla": xla_rule, "tpu": tpu_rule, "gpu": gpu_rule}


@by_default_rules
def gated_delta_rule(
    q: jax.Array,  # [T, G, K]
    k: jax.Array,  # [T, G, K]
    v: jax.Array,  # [T, H, V]
    g: jax.Array,  # [T, H] logarithm of the decay; Kimi Delta Attention: [T, H, K]
    beta: jax.Array,  # [T, H] how much of the difference is written, after the sigmoid
    states: jax.Array,  # [pages, H, K, V]
    query_start_loc: jax.Array,  # int32[S + 1] first new token of each sequence; last: number of real tokens
    distribution: jax.Array,  # int32[3] ends of the decode, prefill and mixed sequences; the last is how many are real
    state_read: jax.Array,  # int32[S] page to start from
    state_write: jax.Array,  # int32[S] or int32[S, L] pages to leave states in; page 0 is never written
    has_initial_state: jax.Array,  # bool[S]; those without start from page 0, which is all zero
    checkpoint_ends: jax.Array | None = None,  # int32[S, k] rising, below the sequence's new tokens; 0: none
    checkpoint_pages: jax.Array | None = None,  # int32[S, k] pages to leave states in; 0: none
    *,
    scale: float | None = None,  # None: K ** -0.5
    use_qk_l2norm: bool = False,
    backend: str = "auto",
) -> DeltaOutput:
    """For each token and value head h, with key head `h // (H / G)`: `out` is [T, H, V].

        `state = exp(g) * state`                a row per number of the key, each with its decay where g has K of them
        `delta = beta * (v - state^T k)`
        `state = state + k delta^T`,   `out = scale * state^T q`

    `use_qk_l2norm` divides q and k by their lengths: `x / sqrt(x . x + 1e-6)`. States are computed in float32, from the
    pages' dtype and back to it. Convolution, gates and norms around it are the caller's.

    A page that one sequence writes is read by no other. Sequences without new tokens write nothing, nor do columns of
    `state_write` for tokens that a sequence does not have. A token with a checkpoint has no page in `state_write`.

    Raises:
        ValueError: shapes, dtypes or (outside `jit`) values do not fit; nothing is written.
        NotImplementedError: `backend` is a platform without a kernel, or whose kernel cannot do this call.
    """
    validate.check_inputs(q, k, v, g, beta, states)
    options = validate.check_options(q.shape[2], scale, use_qk_l2norm)
    reasons = {
        "tpu": lambda: tpu_rule.reason_not_supported(v, k, g, states),
        "gpu": lambda: gpu_rule.reason_not_supported(v, k, g, states),
    }
    chosen = resolve_backend(
        name_in_slabs(validate.OP, states), backend, reasons, xla_rule.path_over(states, state_read.shape[0])
    )
    sequences = (query_start_loc, distribution, state_read, state_write, has_initial_state)
    step = StepArrays(*sequences, checkpoint_ends, checkpoint_pages)
    check_step(validate.OP, v.shape[0], states.shape[0], step)
    arguments = (Inputs(q, k, v, g, beta), states, step.by_column())
    if chosen == "tpu":
        chosen = memory.with_room(validate.OP, backend, tpu_rule.gated_delta_rule, *arguments, options=options)
    return DeltaOutput(*_RULES[chosen].gated_delta_rule(*arguments, options=options))
