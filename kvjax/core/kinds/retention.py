"""Checkpoints: lengths at which a later request may go on where a kind forgets, and what is kept for each.

Flow:    KVCacheManager(retention_interval=k) -> [Retention] -> CheckpointColumns per kind -> blocks registered
Source:  rules of vLLM 0.33 (prefix_cache_retention_interval); what else is kept: ARCHITECTURE.md, "Checkpoints"

A hit of L tokens needs all blocks of full attention before L, but only the end of a window, the chunk so far, or one
recurrent state. So these kinds need to be cached at few lengths L only, checkpoints:

    end of the prompt   the last length that the same prompt (or one that it begins) can hit
    end of the answer   the last length when the request is freed
    shared prefix       the longest prefix that the groups which keep everything had cached when the request was looked
                        up; a prefix that two requests share is likely to be asked for again
    named               what the application says that later prompts share (`Request.checkpoints`)

With the eviction policy "probation" all else that some hit could use is registered too, but evicted before anything
that a checkpoint needs, until a hit used it. So idle memory is used, and prompts that were edited near their ends still
hit. With other policies only what a checkpoint needs is registered, and what lengths every `retention_interval` tokens
need. Steps of recurrent kinds end at checkpoints and at such lengths, where their states are cached; and at landmarks,
2,048 tokens (whole intervals) and each time twice as many, so that the second prompt with a beginning hits at least
half of it. All lengths are multiples of the hits' alignment.

By vLLM's rules the end of the answer is no checkpoint and chunks are kept whole. With EAGLE there are two ends of the
prompt, each a whole alignment earlier, and since 0.33 a second shared prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvjax.core.spec import NEVER, cdiv

NUM_LENGTHS = 4  # of a row that names none: two ends, a shared prefix, and what EAGLE leaves of it
ENDS = ("all", "vllm-0.32", "vllm-0.33")  # whose rules say which ends of a request are checkpoints
DEFAULT_TOKENS = 512
LANDMARK_TOKENS = 2_048


class Retention:
    """The checkpoints of every row of one manager."""

    def __init__(
        self, interval: int, alignment: int, dropped_tokens: int, ends: str = "all", end_unit: int | None = None
    ) -> None:
        """
        Args:
            interval: tokens from one checkpoint to the next; 0: none but a request's own.
            alignment: tokens of which every hit is a multiple.
            dropped_tokens: tokens that EAGLE drops from a hit; 0 without.
            ends: one of `ENDS`.
            end_unit: tokens that vLLM takes off a prompt's end with EAGLE; None: the alignment.

        Raises:
            ValueError: the interval is negative or no multiple of the alignment, or `ends` is another word.
        """
        if ends not in ENDS:
            raise ValueError(f"expected retention_ends of {', '.join(ENDS)}, got {ends!r}")
        if interval < 0 or interval % alignment:
            raise ValueError(
                f"expected retention_interval as a multiple of {alignment} (the LCM of the block sizes), or 0, "
                f"got {interval}"
            )
        self.interval = interval
        self.alignment = alignment
        self._end_unit = alignment if end_unit is None else end_unit
        has_landmarks = interval > 0 and ends == "all"
        self._landmark = cdiv(LANDMARK_TOKENS, interval) * interval if has_landmarks else NEVER
        self._ends = ends
        self.is_vllms = ends != "all"
        self._dropped_tokens = dropped_tokens
        self.num_last = 1 + cdiv(dropped_tokens, alignment)  # states of an answer that the next prompt may go on from
        self.lengths = np.zeros((0, NUM_LENGTHS), np.int64)  # [rows], 0: none
        self.longest = np.zeros(0, np.int64)  # [rows] of them

    def reserve_rows(self, num_rows: int) -> None:
        """Makes the arrays hold at least `num_rows` rows."""
        missing = num_rows - self.lengths.shape[0]
        if missing > 0:
            self.lengths = np.pad(self.lengths, ((0, missing), (0, 0)))
            self.longest = np.pad(self.longest, (0, missing))

    def lengths_for(self, num_tokens: int, num_shared_tokens: int, named: Sequence[int] = ()) -> tuple[int, ...]:
        """Checkpoints of a request's own: it has so many tokens, shares as many with what is cached, and names some.

        The same prompt can hit all its tokens but the last, a longer one all of them. By vLLM's rules only the first
        counts, but with EAGLE both do, each a whole alignment earlier, and what is left of the shared prefix.
        """
        size, dropped = self.alignment, self._dropped_tokens
        lengths: tuple[int, ...] = (num_tokens - dropped - 1, num_tokens - dropped, num_shared_tokens, 0)
        if self.is_vllms:
            unit, ends = self._end_unit, (num_tokens - 1, 0)
            if dropped:
                ends = ((num_tokens - 1) // unit * unit - unit, num_tokens // unit * unit - unit)
            lengths = (*ends, num_shared_tokens, num_shared_tokens - dropped if self._ends == "vllm-0.33" else 0)
        lengths = (*lengths, *(length - dropped for length in named))
        return tuple(max(length, 0) // size * size for length in lengths)

    def num_own_tokens(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Tokens whose ends are checkpoints: all of a request; by vLLM's rules its prompt, after a preemption too."""
        return num_prompt_tokens if self.is_vllms else num_tokens

    def end_of(self, num_tokens: int) -> int:
        """The longest hit of a longer request that begins with so many tokens."""
        return max(num_tokens - self._dropped_tokens, 0) // self.alignment * self.alignment

    def note_admission(self, row: int, num_tokens: int, num_shared_tokens: int, named: Sequence[int] = ()) -> None:
        """Such a request begins in a row."""
        lengths = self.lengths_for(num_tokens, num_shared_tokens, named)
        missing = len(lengths) - self.lengths.shape[1]
        if missing > 0:
            self.lengths = np.pad(self.lengths, ((0, 0), (0, missing)))
        self.lengths[row, : len(lengths)], self.lengths[row, len(lengths) :] = lengths, 0
        self.longest[row] = max(lengths)

    def share_row(self, row: int, new_rows: np.ndarray) -> None:
        """Int64[n] new rows go on from a row."""
        self.lengths[new_rows] = self.lengths[row]
        self.longest[new_rows] = self.longest[row]

    def lengths_of(self, row: int) -> tuple[int, ...]:
        """Checkpoints of the row's own."""
        return tuple(self.lengths[row].tolist())

    def step_end(self, start: int, end: int, lengths: Iterable[int]) -> int:
        """Where a step from `start` to `end` tokens should end, so that states exist where they are kept.

        That is the first of the request's own checkpoints, `lengths`, and of the landmarks; before it, the last one of
        the interval.
        """
        end = min([end, self._next_landmark(start), *(length for length in lengths if length > start)])
        last = end // self.interval * self.interval if self.interval else 0
        return last if last > start else end

    def lengths_between(self, start: int, end: int, lengths: Iterable[int]) -> list[int]:
        """The landmarks and those of a request's own checkpoints, `lengths`, behind `start` and before `end` tokens."""
        found = {length for length in lengths if start < length < end}
        landmark = self._next_landmark(start)
        while landmark < end:
            found.add(landmark)
            landmark *= 2
        return sorted(found)

    def end_with_checkpoints(self, start: int, end: int, num_tokens: int, between: Sequence[int], most: int) -> int:
        """Where a step from `start` towards `end` ends that leaves at most `most` of the states `between` on its way.

        The prompt's last step ends with it, others where a state is kept.
        """
        if len(between) > most:
            return between[most]
        if end >= num_tokens:
            return end
        for unit in (self.interval, self.alignment):
            if unit and (last := end // unit * unit) > start:
                return last
        return start

    def _next_landmark(self, num_tokens: int) -> int:
        """The first behind so many tokens."""
        landmark = self._landmark
        return landmark if num_tokens < landmark else landmark << (num_tokens // landmark).bit_length()


def default_interval(alignment: int) -> int:
    """The least multiple of the alignment that is at least `DEFAULT_TOKENS`."""
    return cdiv(DEFAULT_TOKENS, alignment) * alignment


__all__ = ["ENDS", "Retention", "default_interval"]
