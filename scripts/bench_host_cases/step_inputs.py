"""Cases of a decoding step's inputs: the step's arrays padded to a bucket, and a whole step that verifies drafts.

The baseline builds the same arrays in a loop over requests and groups, from lists that become arrays at the end.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from bench_host_cases.case import BenchCase, sample_us
from bench_host_cases.kvjax_side import Decoding
from bench_host_cases.plain_side import PlainDecoding
from bench_host_cases.shapes import NUM_STEPS, SHAPES, Shape
from kvjax.core import StepDrafts, build_step_plan
from kvjax.device.inputs.batch import DeviceBatch, pick_bucket
from kvjax.device.inputs.buckets import Buckets

NUM_REQUESTS, NUM_DRAFTS = 1_024, 3


def buckets_of(shape: Shape, max_num_batched_tokens: int = 4 * NUM_REQUESTS, num_drafts: int = 0) -> Buckets:
    return Buckets.default(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=NUM_REQUESTS,
        max_model_len=shape.most_tokens + 1,
        block_size=shape.hash_block_size,
        num_drafts=num_drafts,
    )


def step_inputs_samples(shape: Shape) -> list[float]:
    decoding, buckets = Decoding(shape, NUM_REQUESTS), buckets_of(shape)
    num_new = np.ones(NUM_REQUESTS, np.int64)
    order = decoding.rng.permutation(NUM_REQUESTS)  # rows are not in scheduling order where requests come and go

    def prepare() -> None:
        decoding.next_step()
        decoding.step()

    def inputs() -> DeviceBatch:
        plan = build_step_plan(decoding.manager, decoding.rows[order], num_new, pick_shape=buckets.pick)
        return DeviceBatch.from_plan(plan, pick_bucket(plan, buckets))

    return sample_us(inputs, NUM_STEPS, prepare)


def verify_step_samples(shape: Shape) -> list[float]:
    """Blocks for drafts, the step's arrays, and the drafts taken back, all of them rejected."""
    decoding = Decoding(shape, NUM_REQUESTS)
    buckets = buckets_of(shape, NUM_REQUESTS * (1 + NUM_DRAFTS), NUM_DRAFTS)
    counts = np.full(NUM_REQUESTS, NUM_DRAFTS)
    rows, manager = decoding.rows, decoding.manager
    decoding.advance()

    def step() -> None:
        drafts = StepDrafts(counts, decoding.rng.integers(0, 100, (NUM_REQUESTS, NUM_DRAFTS)))
        if manager.plan_step(rows, 1 + counts).num_planned != NUM_REQUESTS:
            raise AssertionError("a row did not fit")
        plan = build_step_plan(manager, rows, 1 + counts, drafts=drafts, pick_shape=buckets.pick)
        DeviceBatch.from_plan(plan, pick_bucket(plan, buckets))
        decoding.advance(1 + NUM_DRAFTS)
        manager.settle_drafts(rows, NUM_DRAFTS)

    return sample_us(step, NUM_STEPS // 2, decoding.append)


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


def plain_verify_step_samples(shape: Shape) -> list[float]:
    decoding = PlainDecoding(shape, NUM_REQUESTS)
    num_columns = -(-shape.most_tokens // shape.hash_block_size)
    drafts, held = [7] * NUM_DRAFTS, decoding.manager.groups[0].tables
    known: dict[str, list[int]] = {request.name: [] for request in decoding.requests}

    def step() -> list[np.ndarray]:
        token_ids: list[int] = []
        positions: list[int] = []
        starts, tables, slots, seq_lens = [0], [], [], []
        for request in decoding.requests:
            request.num_tokens += 1
            decoding.manager.allocate_slots(request, 1 + NUM_DRAFTS)
            table, blocks = known[request.name], held[request.name]
            table += [block.block_id for block in blocks[len(table) :] if block is not None]
            places = range(request.num_computed_tokens, request.num_computed_tokens + 1 + NUM_DRAFTS)
            token_ids += [3, *drafts]
            positions += places
            starts.append(starts[-1] + 1 + NUM_DRAFTS)
            tables.append(table + [0] * (num_columns - len(table)))
            slots += [table[p // 16] * 16 + p % 16 for p in places]
            seq_lens.append(places[-1] + 1)
            request.num_computed_tokens += 1
        arrays = (token_ids, positions, starts, range(len(token_ids)), tables, slots, seq_lens)
        return [np.array(values, np.int32) for values in arrays]

    return sample_us(step, 4)


def cases() -> list[BenchCase]:
    """The arrays of two shapes, and a step with drafts."""
    full = SHAPES["full"]
    return [
        *(
            BenchCase(
                f"step_inputs/{name}/{NUM_REQUESTS}",
                partial(step_inputs_samples, SHAPES[name]),
                partial(plain_step_inputs_samples, SHAPES[name]),
            )
            for name in ("full", "hybrid")
        ),
        BenchCase(
            f"verify_step/full/{NUM_REQUESTS}",
            partial(verify_step_samples, full),
            partial(plain_verify_step_samples, full),
        ),
    ]
