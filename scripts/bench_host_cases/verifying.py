"""Cases of a step that verifies drafts: blocks for them, the step's arrays, and rejected ones taken back.

The baseline does the same in a loop over requests: the plain manager's blocks, then lists that become arrays.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from bench_host_cases.case import BenchCase, collector_off, sample_us, time_us
from bench_host_cases.decoding import NUM_STEPS, SHAPES, Decoding, PlainDecoding, Shape
from kvjax.core import StepDrafts, build_step_plan
from kvjax.device.batch import DeviceBatch, pick_bucket
from kvjax.device.buckets import Buckets

NUM_REQUESTS, NUM_DRAFTS = 1_024, 3


def verify_step_samples(shape: Shape) -> list[float]:
    decoding = Decoding(shape, NUM_REQUESTS)
    buckets = Buckets.default(
        max_num_batched_tokens=NUM_REQUESTS * (1 + NUM_DRAFTS),
        max_num_seqs=NUM_REQUESTS,
        max_model_len=shape.most_tokens + 1,
        block_size=shape.hash_block_size,
        num_drafts=NUM_DRAFTS,
    )
    counts = np.full(NUM_REQUESTS, NUM_DRAFTS)
    rows, manager = decoding.rows, decoding.manager

    def step() -> None:
        drafts = StepDrafts(counts, decoding.rng.integers(0, 100, (NUM_REQUESTS, NUM_DRAFTS)))
        if manager.plan_step(rows, 1 + counts).num_planned != NUM_REQUESTS:
            raise AssertionError("a row did not fit")
        plan = build_step_plan(manager, rows, 1 + counts, drafts=drafts, pick_shape=buckets.pick)
        DeviceBatch.from_plan(plan, pick_bucket(plan, buckets))
        manager.request_table.advance(rows, 1 + NUM_DRAFTS)
        manager.settle_drafts(rows, NUM_DRAFTS)

    samples = []
    with collector_off():
        for _ in range(NUM_STEPS // 2):
            decoding.append()
            samples.append(time_us(step))
    return samples


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
            places = range(request.num_computed, request.num_computed + 1 + NUM_DRAFTS)
            token_ids += [3, *drafts]
            positions += places
            starts.append(starts[-1] + 1 + NUM_DRAFTS)
            tables.append(table + [0] * (num_columns - len(table)))
            slots += [table[p // 16] * 16 + p % 16 for p in places]
            seq_lens.append(places[-1] + 1)
            request.num_computed += 1
        arrays = (token_ids, positions, starts, range(len(token_ids)), tables, slots, seq_lens)
        return [np.array(values, np.int32) for values in arrays]

    return sample_us(step, 4)


def cases() -> list[BenchCase]:
    shape = SHAPES["full"]
    name = f"verify_step/full/{NUM_REQUESTS}"
    return [BenchCase(name, partial(verify_step_samples, shape), partial(plain_verify_step_samples, shape))]
