"""The shapes that a step may have on the device: a declared list, so that warm-up compiles all of them.

Flow:    limits of a deployment -> [Buckets] -> smallest bucket that a StepPlan fits -> DeviceBatch
Source:  ARCHITECTURE.md, "Buckets"

A product of three ladders would be hundreds of programs. The list is two short products instead. Decode steps vary S
and P: a request has one token, so T = S, and with drafts also T = S * (1 + drafts). Mixed steps vary T and P, with S as
large as it can be.

A bucket that is not mixed has steps in which every request decodes: one token, and its drafts. On GPUs its program
contains only the kernels for decoding. A step that fits such a bucket takes it before a smaller mixed one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvjax.core.spec import cdiv
from pallas_kernels.schedule import MOST_FEW

MAX_BUCKETS = 24

# Lengths of the ladders (decode S, decode P, mixed T, mixed P), and so a * b + c * d buckets; richest first. Where
# there are drafts each decode step comes twice.
_LADDER_LENGTHS = (
    (4, 3, 6, 2),
    (3, 3, 5, 2),
    (3, 2, 4, 2),
    (2, 2, 3, 2),
    (2, 1, 3, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 1),
    (0, 0, 1, 1),
)


@dataclass(frozen=True, order=True)
class Bucket:
    """Padded sizes of one compiled step: T tokens, S requests, P columns of every block table, drafts of a request.

    One that is not mixed is for steps of at most `1 + num_drafts` tokens a request, and has as many for each.
    """

    num_tokens: int  # T
    num_requests: int  # S
    num_columns: int  # P
    num_drafts: int = 0  # of a request
    is_mixed: bool = True  # whether a request may have more tokens than one and its drafts
    num_checkpoints: int = 0  # recurrent states that a request may leave on its way

    def __post_init__(self) -> None:
        counts = {"num_tokens": 1, "num_requests": 1, "num_columns": 1, "num_drafts": 0, "num_checkpoints": 0}
        for name, least in counts.items():
            if getattr(self, name) < least:
                raise ValueError(f"expected {name} >= {least}, got {getattr(self, name)}")
        if not self.is_mixed and self.num_tokens != self.num_requests * (1 + self.num_drafts):
            raise ValueError(f"expected one token a request, and its drafts, in a bucket that is not mixed, got {self}")

    @property
    def num_logits(self) -> int:
        """N, rows of logits: one for each request and each draft, as far as there are tokens."""
        return min(self.num_tokens, self.num_requests * (1 + self.num_drafts)) if self.num_drafts else self.num_requests

    def fits(
        self,
        num_tokens: int,
        num_requests: int,
        num_columns: int,
        num_drafts: int = 0,
        longest: int | None = None,  # tokens of the request that has the most; None: as many as there can be
        num_checkpoints: int = 0,
    ) -> bool:
        """Whether a step of these sizes can be padded to this bucket."""
        if longest is None:
            longest = num_tokens - num_requests + 1
        return (
            num_tokens <= self.num_tokens
            and num_requests <= self.num_requests
            and num_columns <= self.num_columns
            and num_drafts <= self.num_drafts
            and num_checkpoints <= self.num_checkpoints
            and (self.is_mixed or longest <= 1 + self.num_drafts)
        )


@dataclass(frozen=True)
class Buckets:
    """The declared step shapes, and the lengths to which lists of page ids (copies, zeroing) are padded."""

    steps: tuple[Bucket, ...]
    page_counts: tuple[int, ...] = (8, 64)  # longer lists are cut into pieces of the last
    _has_decode: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        steps = tuple(sorted(set(self.steps)))
        if not 1 <= len(steps) <= MAX_BUCKETS:
            raise ValueError(f"expected 1 to {MAX_BUCKETS} buckets, got {len(steps)}; each is a compiled program")
        if not self.page_counts or min(self.page_counts) < 1:
            raise ValueError(f"expected page_counts >= 1, got {self.page_counts}")
        object.__setattr__(self, "steps", steps)
        object.__setattr__(self, "page_counts", tuple(sorted(set(self.page_counts))))
        object.__setattr__(self, "_has_decode", not all(bucket.is_mixed for bucket in steps))

    @classmethod
    def default(
        cls,
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        max_buckets: int = MAX_BUCKETS,
        num_drafts: int = 0,
        num_checkpoints: int = 0,
        decode_apart: bool = False,
        drafts_apart: bool = False,
    ) -> Buckets:
        """At most `max_buckets` shapes; a step of at most these limits fits the last, the largest.

        `num_drafts`: the most drafts of a request in a step. Every shape has rows of logits for so many, but for
        decode steps in which nobody has a draft. `decode_apart`: decode steps without drafts have buckets that are not
        mixed, for attention that then compiles to no prefill; `drafts_apart`: those with drafts too, if these are few.
        `num_checkpoints`: recurrent states that a request may leave on its way in mixed steps.

        Raises:
            ValueError: a limit is below 1, or `num_drafts` below 0.
        """
        limits = {
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "max_model_len": max_model_len,
            "block_size": block_size,
            "max_buckets": max_buckets,
        }
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"expected {name} >= 1, got {value}")
        if num_drafts < 0:
            raise ValueError(f"expected num_drafts >= 0, got {num_drafts}")
        columns = cdiv(max_model_len, block_size)
        seqs = min(max_num_seqs, max_num_batched_tokens)
        drafts = sorted({0, num_drafts})  # of decode steps
        a, b, c, d = next(lengths for lengths in _LADDER_LENGTHS if _count(lengths, len(drafts)) <= max_buckets)
        most = max_num_batched_tokens
        apart = {k: drafts_apart and k < MOST_FEW if k else decode_apart for k in drafts}
        decode = [
            Bucket(min(s * (1 + k), most), s, p, k, is_mixed=not apart[k] or s * (1 + k) > most)
            for s in _ladder(seqs, a)
            for p in _ladder(columns, b)
            for k in drafts
        ]
        mixed = [
            Bucket(t, min(t, seqs), p, num_drafts, num_checkpoints=num_checkpoints)
            for t in _ladder(most, c)
            for p in _ladder(columns, d)
        ]
        return cls(tuple(decode + mixed))

    @property
    def max_num_tokens(self) -> int:
        """Most tokens of any bucket."""
        return max(bucket.num_tokens for bucket in self.steps)

    @property
    def max_num_requests(self) -> int:
        """Most requests of any bucket: the length of the sampled tokens that a step leaves on the device."""
        return max(bucket.num_requests for bucket in self.steps)

    @property
    def max_num_drafts(self) -> int:
        """Most drafts of a request in any bucket."""
        return max(bucket.num_drafts for bucket in self.steps)

    def pick(
        self,
        num_tokens: int,
        num_requests: int,
        num_columns: int,
        num_drafts: int = 0,
        longest: int | None = None,  # tokens of the request that has the most; None: as many as there can be
        num_checkpoints: int = 0,
    ) -> Bucket:
        """The smallest bucket that fits: fewest tokens, then requests, columns and drafts of a request.

        A step that fits a bucket that is not mixed takes the smallest such.

        Raises:
            ValueError: none fits.
        """
        sizes = (num_tokens, num_requests, num_columns, num_drafts, longest, num_checkpoints)
        for bucket in self.steps if self._has_decode else ():
            if not bucket.is_mixed and bucket.fits(*sizes):
                return bucket
        for bucket in self.steps:
            if bucket.fits(*sizes):
                return bucket
        with_drafts = f" with {num_drafts} drafts of a request" if num_drafts else ""
        raise ValueError(
            f"no bucket fits {num_tokens} tokens, {num_requests} requests or rows of logits and {num_columns} table "
            f"columns{with_drafts}; the limits are {self.max_num_tokens} tokens, {self.max_num_requests} requests and "
            f"{max(bucket.num_columns for bucket in self.steps)} columns (declared: {self._declared()})"
        )

    def _declared(self) -> str:
        def drafts(bucket: Bucket) -> str:
            kind = "" if bucket.is_mixed else " of decoding"
            return f"{kind} with {bucket.num_drafts} drafts" if bucket.num_drafts else kind

        return ", ".join(f"{b.num_tokens}x{b.num_requests}x{b.num_columns}{drafts(b)}" for b in self.steps)


def _count(lengths: tuple[int, int, int, int], num_decode: int) -> int:
    return num_decode * lengths[0] * lengths[1] + lengths[2] * lengths[3]


def _ladder(top: int, length: int) -> list[int]:
    """At most `length` rungs down from `top`, each a quarter of the one above, none below 8 but `top` itself."""
    rungs = [top][:length]
    while len(rungs) < length and rungs[-1] > 8:
        rungs.append(max(8, cdiv(rungs[-1], 4)))
    return rungs
