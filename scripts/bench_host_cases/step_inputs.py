"""Cases of a decoding step's inputs: `build_step_plan`, and its plan padded to a bucket.

The baseline builds the same arrays in a loop over requests and groups, from lists that become arrays at the end.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from bench_host_cases.case import BenchCase, collector_off, sample_us, time_us
from bench_host_cases.decoding import NUM_STEPS, SHAPES, Decoding, Shape
from kvjax.core.step.step_builder import build_step_plan
from kvjax.device.batch import DeviceBatch, pick_bucket
from kvjax.device.buckets import Buckets

NUM_REQUESTS = 1_024


def buckets_of(shape: Shape, max_num_batched_tokens: int = 4 * NUM_REQUESTS) -> Buckets:
    return Buckets.default(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=NUM_REQUESTS,
        max_model_len=shape.most_tokens + 1,
        block_size=shape.hash_block_size,
    )


def step_inputs_samples(shape: Shape) -> list[float]:
    decoding, buckets = Decoding(shape, NUM_REQUESTS), buckets_of(shape)
    num_new = np.ones(NUM_REQUESTS, np.int64)
    order = decoding.rng.permutation(NUM_REQUESTS)  # rows are not in scheduling order where requests come and go

    def inputs() -> DeviceBatch:
        plan = build_step_plan(decoding.manager, decoding.rows[order], num_new, pick_shape=buckets.pick)
        return DeviceBatch.from_plan(plan, pick_bucket(plan, buckets))

    samples = []
    with collector_off():
        for _ in range(NUM_STEPS):
            decoding.append()
            decoding.plan()
            samples.append(time_us(inputs))
            decoding.advance()
    return samples


class PlainInputs:
    """A step of the same sizes from lists: a token, its count and a block table per group for each request."""

    def __init__(self, shape: Shape) -> None:
        self.num_columns = -(-shape.most_tokens // shape.hash_block_size)
        lengths = [shape.prompt + i % shape.spread + 1 for i in range(NUM_REQUESTS)]
        self.tokens = [[7] * length for length in lengths]
        self.groups = [
            (spec.block_size, [list(range(1, -(-length // spec.block_size) + 1)) for length in lengths])
            for spec in shape.specs
        ]

    def __call__(self) -> list[np.ndarray]:
        token_ids, positions, starts = [], [], [0]
        for tokens in self.tokens:
            token_ids.append(tokens[-1])
            positions.append(len(tokens) - 1)
            starts.append(starts[-1] + 1)
        arrays = [token_ids, positions, starts, list(range(len(token_ids)))]
        for block_size, tables in self.groups:
            padded, slots, seq_lens = [], [], []
            for table, position in zip(tables, positions, strict=True):
                padded.append(table + [0] * (self.num_columns - len(table)))
                slots.append(table[position // block_size] * block_size + position % block_size)
                seq_lens.append(position + 1)
            arrays += [padded, slots, seq_lens]  # type: ignore[list-item]
        return [np.array(values, np.int32) for values in arrays]


def plain_step_inputs_samples(shape: Shape) -> list[float]:
    return sample_us(PlainInputs(shape), 4)


def cases() -> list[BenchCase]:
    return [
        BenchCase(
            f"step_inputs/{name}/{NUM_REQUESTS}",
            partial(step_inputs_samples, SHAPES[name]),
            partial(plain_step_inputs_samples, SHAPES[name]),
        )
        for name in ("full", "hybrid")
    ]
