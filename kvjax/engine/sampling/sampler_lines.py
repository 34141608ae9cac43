"""What requests ask of the sampler beyond temperature, top k and top p: lines of the sampler's state on the device.

Flow:    EngineRequest, StepPlan -> [SamplerLines] -> SamplerWrites of a step -> SamplerState (device) -> sampler (jit)

Few requests ask, so the others pay for one column of zeros. One that does gets a line when it starts to run: its
penalties, biases and mask are written once. Penalties count tokens, so the line also has those of prompt and output, by
place. The host writes them as the model gets them: the new tokens of every step, drafts included, and at the start
those that were computed before. A token that the host does not know yet is taken on the device from where the model
takes it. A row of logits looks at the places before its own and no further, so a draft that is rejected is overwritten
before it counts, and nothing depends on steps, chunks or preemption.

A line is free once its request runs no more, and found so when a line is wanted.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvjax.core import StepPlan
from kvjax.engine.requests.engine_request import EngineRequest, RequestStatus
from kvjax.engine.requests.token_matcher import packed

NO_LINE = 0  # of requests that ask nothing; the state's line 0 changes nothing
MAX_EDITS = 512
FOREVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class SamplerSizes:
    """Shapes of the sampler's state."""

    num_lines: int  # R, line 0 included
    num_tokens: int  # L, of the longest request
    vocab_size: int

    @property
    def num_words(self) -> int:
        """W, words of a mask."""
        return -(-self.vocab_size // 32)


@dataclass(frozen=True)
class LineWrite:
    """All of one line but its mask and its tokens."""

    line: int
    values: np.ndarray  # float32[4] presence, frequency and repetition penalty, min_p
    num_prompt_tokens: int
    has_mask: bool
    wants_best: bool  # log-probabilities of the best tokens
    edit_ids: np.ndarray  # int32[k] tokens whose logits are changed
    edit_bias: np.ndarray  # float32[k] what is added
    edit_end: np.ndarray  # int32[k] place of the sampled token from which on it is not


@dataclass(frozen=True)
class TokenWrites:
    """Tokens of lines by place."""

    lines: np.ndarray  # int32[n]
    places: np.ndarray  # int32[n]
    token_ids: np.ndarray  # int32[n]
    source: np.ndarray  # int32[n] -1: `token_ids` has it, else where `previous` on the device does


@dataclass(frozen=True)
class SamplerWrites:
    """What is written into the state before a step, in this order."""

    lines: tuple[LineWrite, ...]
    masks: tuple[tuple[int, np.ndarray], ...]  # line, int32[W]
    tokens: TokenWrites | None


@dataclass
class _Pending:
    """Lines of requests that have started since the last step."""

    lines: list[LineWrite] = field(default_factory=list)
    masks: list[tuple[int, np.ndarray]] = field(default_factory=list)


class SamplerLines:
    """Lines by row of the request table. Owned by one engine's thread; a step without lines costs nothing."""

    def __init__(self, sizes: SamplerSizes) -> None:
        self._sizes = sizes
        self._line_of: dict[EngineRequest, int] = {}
        self._free = list(range(sizes.num_lines - 1, NO_LINE, -1))
        self._counts_tokens = np.zeros(sizes.num_lines, np.bool_)
        self._wants_best = np.zeros(sizes.num_lines, np.bool_)
        self._matched: dict[int, EngineRequest] = {}  # by line, those with a matcher
        self._started: dict[int, EngineRequest] = {}  # by line, those that count tokens and were in no step yet
        self._pending = _Pending()

    @property
    def is_idle(self) -> bool:
        """Whether no request has a line."""
        return not self._line_of

    def start(self, request: EngineRequest) -> int:
        """The line of a request that runs from here on, `NO_LINE` if it asks nothing."""
        if not needs_line(request):
            return NO_LINE
        line = self._take_line(request)
        params, pending = request.params, self._pending
        self._counts_tokens[line], self._wants_best[line] = params.has_penalties, bool(params.logprobs)
        pending.lines.append(_line_write(request, line, self._sizes.vocab_size))
        if params.has_penalties:
            self._started[line] = request
        if request.matcher is not None:
            self._matched[line] = request
        elif params.allowed_token_ids is not None:
            pending.masks.append((line, packed(np.array(params.allowed_token_ids), self._sizes.num_words)))
        return line

    def want_best(self, lines: np.ndarray) -> bool:  # int32[N]
        """Whether one of the lines asks for log-probabilities of best tokens."""
        return bool(self._wants_best[lines].any())

    def take(
        self,
        plan: StepPlan,
        lines: np.ndarray,  # int32[S] of the plan's requests
        samples: np.ndarray,  # bool[S]
    ) -> SamplerWrites | None:
        """What is to be written before a step; None: nothing."""
        pending, self._pending = self._pending, _Pending()
        masks = pending.masks + [self._mask(line) for line in lines[samples].tolist() if line in self._matched]
        tokens = self._tokens(plan, lines)
        if not (pending.lines or masks or tokens):
            return None
        return SamplerWrites(tuple(pending.lines), tuple(masks), tokens)

    def _take_line(self, request: EngineRequest) -> int:
        line = self._line_of.get(request)
        if line is not None:
            return line
        if not self._free:
            self._free_stopped()
        self._line_of[request] = line = self._free.pop()
        return line

    def _free_stopped(self) -> None:
        for request in [one for one in self._line_of if one.status is not RequestStatus.RUNNING]:
            line = self._line_of.pop(request)
            self._free.append(line)
            self._matched.pop(line, None)
            self._started.pop(line, None)

    def _mask(self, line: int) -> tuple[int, np.ndarray]:
        """What the matcher of a line allows now."""
        request = self._matched[line]
        words = np.empty(self._sizes.num_words, np.int32)
        request.fill_bitmask(words)
        allowed = request.params.allowed_token_ids
        return line, words if allowed is None else words & packed(np.array(allowed), self._sizes.num_words)

    def _tokens(self, plan: StepPlan, lines: np.ndarray) -> TokenWrites | None:
        """Tokens that lines have not: those of the step, and those before it of requests that start."""
        counting = np.flatnonzero(self._counts_tokens[lines])
        if not counting.size:
            return None
        first = plan.num_computed_tokens[counting]
        counts = plan.num_new_tokens[counting]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        index = np.repeat(plan.query_start_loc[counting], counts) + within
        parts = [
            (
                np.repeat(lines[counting], counts),
                np.repeat(first, counts) + within,
                plan.token_ids[index],
                plan.token_source[index],
            )
        ]
        for line, count in zip(lines[counting].tolist(), first.tolist(), strict=True) if self._started else ():
            request = self._started.pop(line, None)
            if request is not None:
                known = request.request.token_ids[:count]
                parts.append((np.full(count, line), np.arange(count), known, np.full(count, -1)))
        columns = (np.concatenate(column).astype(np.int32) for column in zip(*parts, strict=True))
        return TokenWrites(*columns)


def needs_line(request: EngineRequest) -> bool:
    """Whether a request asks anything of the sampler's state."""
    params = request.params
    return bool(
        params.has_penalties
        or params.min_p
        or params.logit_bias
        or params.bad_token_ids
        or params.allowed_token_ids is not None
        or request.matcher is not None
        or params.logprobs
        or (params.min_tokens and request.stop_token_ids)
    )


def _line_write(request: EngineRequest, line: int, vocab_size: int) -> LineWrite:
    params, num_prompt_tokens = request.params, request.request.num_prompt_tokens
    never = -np.inf
    edits = [(token, bias, FOREVER) for token, bias in params.logit_bias.items()]
    edits += [(token, never, FOREVER) for token in params.bad_token_ids]
    if params.min_tokens:
        end = num_prompt_tokens + params.min_tokens
        edits += [(token, never, end) for token in sorted(request.stop_token_ids) if 0 <= token < vocab_size]
    ids, bias, ends = zip(*edits, strict=True) if edits else ((), (), ())
    return LineWrite(
        line=line,
        values=np.array(
            [params.presence_penalty, params.frequency_penalty, params.repetition_penalty, params.min_p], np.float32
        ),
        num_prompt_tokens=num_prompt_tokens,
        has_mask=params.allowed_token_ids is not None or request.matcher is not None,
        wants_best=bool(params.logprobs),
        edit_ids=np.array(ids, np.int32),
        edit_bias=np.array(bias, np.float32),
        edit_end=np.array(ends, np.int32),
    )


__all__ = ["MAX_EDITS", "NO_LINE", "SamplerLines", "SamplerSizes", "SamplerWrites", "needs_line"]
