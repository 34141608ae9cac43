"""Merges attention over disjoint parts of the keys into attention over all of them.

Flow:    (out, lse) of each part -> [merge_states] -> AttentionOutput
Source:  the merge of attention states of FlashInfer (arXiv 2501.01005, section 2.2); sinks as GPT-OSS

Parts come from a common prefix attended once for many requests (cascade), from ranks that each hold some of the keys
(context parallelism), or from one long sequence cut into pieces (split KV). They are computed without sinks.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pallas_kernels.attention_output import AttentionOutput
from pallas_kernels.backends import by_xla, resolve_backend
from pallas_kernels.default_rules import by_default_rules
from pallas_kernels.merge_states import reference, validate


@by_default_rules
def merge_states(
    outs: jax.Array | Sequence[jax.Array],  # [N, T, Hq, Dv], or N arrays [T, Hq, Dv]
    lses: jax.Array | Sequence[jax.Array],  # float32[N, T, Hq], or N arrays [T, Hq]: natural log, -inf: saw nothing
    *,
    sinks: jax.Array | None = None,  # float32[Hq] natural-log logits without a value, -inf: none
    return_lse: bool = False,
    backend: str = "auto",
) -> AttentionOutput:
    """Attention over the keys of all N parts, in the dtype of `outs`; the result has no pages.

    `out = sum_n exp(lse_n - lse) * out_n` with `lse = log(exp(sink) + sum_n exp(lse_n))`, computed in float32. What a
    part of LSE -inf has as out (NaN too) changes nothing. A row where no part saw a key gives out 0 and LSE -inf, with
    sinks too.

    Raises:
        ValueError: there is no part, or shapes or dtypes do not fit.
        NotImplementedError: `backend` is a platform without a kernel.
    """
    # XLA fuses it everywhere: one read of the parts, one write.
    resolve_backend(validate.OP, backend, {"tpu": by_xla, "gpu": by_xla})
    outs, lses = validate.stacked("outs", outs), validate.stacked("lses", lses)
    validate.check(outs, lses, sinks)
    out, lse = reference.merge_states(outs, lses, sinks)
    return AttentionOutput(out, lse if return_lse else None, ())
