"""Compressor against a loop over the whole sequence, however it is cut into steps, over pages that come and go."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.compressor_update import CompressorOutput, compressor_update, max_new_entries, reference
from pallas_kernels.compressor_update.oracle import compressed
from pallas_kernels.layouts import cdiv, latent_layout
from tests.pallas_kernels.cases import assert_close, random_values

DIM, NUM_TOKENS, NUM_ROWS, MAX_LEN = 5, 24, 3, 64


class Steps:
    """Sequences that advance by any number of tokens a step, in states of a window of pages.

    Pages behind the window are filled with NaN and handed out again, as a manager would hand them out.
    """

    def __init__(
        self,
        seed: int,
        ratio: int,
        overlap: bool,
        page_size: int,
        platform: str = "cpu",
        dim: int = DIM,
        max_len: int = MAX_LEN,
        op: Callable[..., CompressorOutput] | None = None,
    ) -> None:
        self.rng, self.dim, self.max_len = np.random.default_rng(seed), dim, max_len
        self.ratio, self.overlap, self.page_size = ratio, overlap, page_size
        self.width = (1 + overlap) * dim
        shape = (NUM_ROWS, max_len, self.width)
        self.kv, self.scores = (random_values(self.rng, shape, "float32") * 3 for _ in range(2))
        self.bias = random_values(self.rng, (ratio, self.width), "float32")
        columns = cdiv(max_len, page_size)
        layout = latent_layout(head_dim=2 * self.width, page_size=page_size, dtype="float32", platform=platform)
        self.pages = np.full(layout.arrays[0].shape(1 + NUM_ROWS * columns), np.nan, np.float32)
        self.pages[0] = 0
        self.tables = np.zeros((NUM_ROWS, columns), np.int32)
        self.free = self.rng.permutation(np.arange(1, self.pages.shape[0])).tolist()
        self.done = np.zeros(NUM_ROWS, np.int64)
        self.op = op or jax.jit(functools.partial(compressor_update, overlap=overlap, page_size=page_size))

    def run(self, chunks: Sequence[int]) -> None:
        """Steps of random cut, each row at most one of `chunks` tokens, to the ends of all sequences."""
        while (left := self.max_len - self.done).any():
            most = np.minimum(left, self.rng.choice(chunks))
            self.step(np.minimum(self.rng.integers(0, most + 1), NUM_TOKENS // NUM_ROWS).tolist())

    def step(self, counts: Sequence[int]) -> None:
        """New tokens of each row; the entries that come out are those of the whole sequence."""
        slots = np.full(NUM_TOKENS, -1, np.int32)
        kv, scores = (random_values(self.rng, (NUM_TOKENS, self.width), "float32") for _ in range(2))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        for row, count in enumerate(counts):
            first, end = int(self.done[row]), int(self.done[row]) + count
            self._release(row, first - (1 + self.overlap) * self.ratio + 1)
            self._allocate(row, first, end)
            tokens, at = np.arange(first, end), slice(starts[row], starts[row + 1])
            slots[at] = self.tables[row, tokens // self.page_size] * self.page_size + tokens % self.page_size
            kv[at], scores[at] = self.kv[row, first:end], self.scores[row, first:end]
            self.done[row] = end
        ends = np.array([0, 0, NUM_ROWS], np.int32)
        output = self.op(
            kv,
            scores,
            (self.pages,),
            self.tables,
            self.done.astype(np.int32),
            starts,
            ends,
            slots,
            position_bias=self.bias,
        )
        self._check(output, counts)
        self.pages = np.array(output.pages[0])
        assert not self.pages[0].any()

    def _check(self, output: CompressorOutput, counts: Sequence[int]) -> None:
        positions, entries = [], []
        for row, count in enumerate(counts):
            numbers = np.arange((self.done[row] - count) // self.ratio, self.done[row] // self.ratio)
            whole = compressed(self.kv[row, : self.done[row]], self.scores[row], self.bias, self.overlap)
            positions += (numbers * self.ratio).tolist()
            entries += list(whole[numbers])
        room = max_new_entries(NUM_TOKENS, NUM_ROWS, self.ratio)
        assert output.entries.shape == (room, self.dim)
        padding = room - len(positions)
        assert output.positions.tolist() == positions + [-1] * padding
        assert_close(output.entries, np.array(entries + [np.zeros(self.dim)] * padding), "float32", "entries")

    def _release(self, row: int, first_token: int) -> None:
        for column in range(max(first_token, 0) // self.page_size):
            page, self.tables[row, column] = int(self.tables[row, column]), 0
            if page:
                self.pages[page] = np.nan
                self.free.append(page)

    def _allocate(self, row: int, first: int, end: int) -> None:
        for column in range(first // self.page_size, cdiv(end, self.page_size)):
            if not self.tables[row, column]:
                self.tables[row, column] = self.free.pop(0)


@pytest.mark.parametrize(
    ("ratio", "overlap", "page_size", "platform"),
    [
        (4, True, 4, "cpu"),  # DeepSeek V4, layers of ratio 4
        (16, False, 8, "tpu"),  # as those of ratio 128, smaller
    ],
)
def test_entries_are_those_of_the_whole_sequence(ratio: int, overlap: bool, page_size: int, platform: str) -> None:
    """Steps of any cut: whole prompts, chunks, one token at a time, rows without tokens."""
    for seed in range(3):
        steps = Steps(seed, ratio, overlap, page_size, platform)
        steps.step([7, 1, 0])
        steps.run([1, 2, 8, 12])


def test_a_gpu_pools_more_entries_at_once() -> None:
    """As many as their states may take memory, the last ones of a step with those before."""
    op = jax.jit(functools.partial(compressor_update, overlap=True, page_size=4, backend="xla"))
    steps = Steps(0, 4, True, 4, op=op)
    steps.step([7, 1, 0])
    steps.run([1, 12])
    assert reference.entries_on_gpu(jnp.zeros((4, 1024)), True) == 1024
    assert reference.entries_on_gpu(jnp.zeros((10_000, 1024)), True) == 16


def test_room_for_entries() -> None:
    """No step completes more entries than `max_new_entries`, wherever its rows stand; some complete as many."""
    rng = np.random.default_rng(0)
    slack = []
    for _ in range(200):
        ratio, counts = int(rng.integers(1, 6)), rng.integers(0, 9, rng.integers(1, 5))
        most = int((-(-counts // ratio)).sum())
        slack.append(max_new_entries(int(counts.sum()), counts.size, ratio) - most)
    assert min(slack) == 0
