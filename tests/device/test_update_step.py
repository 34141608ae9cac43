"""The update step computes what dense attention does, whatever the chunks, and leaves its arguments alone."""

from __future__ import annotations

import numpy as np
import pytest

from kvjax.device import Bucket, Buckets, create_pages, make_update_step
from tests.device.toy import VOCAB, ToyHost, ToyModel, dense_logits, toy_config

BUCKETS = Buckets((Bucket(4, 4, 8), Bucket(16, 4, 8), Bucket(32, 4, 8)))


@pytest.fixture(scope="module")
def model() -> ToyModel:
    return ToyModel()


def sequences(seed: int, lengths: list[int]) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).astype(np.int32) for length in lengths]


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
@pytest.mark.parametrize("chunk", [3, 8, 30])
def test_paged_logits_equal_dense_logits_for_every_chunk(model: ToyModel, platform: str, chunk: int) -> None:
    config = toy_config(platform=platform)
    step = make_update_step(model, config, BUCKETS)
    pages, host = create_pages(config), ToyHost(config)
    tokens = sequences(chunk, [29, 21])
    dense = [dense_logits(model, t) for t in tokens]
    for row, t in enumerate(tokens):
        host.add(row, t)
    for row, t in enumerate(tokens):
        done = 0
        while done < len(t):
            count = min(chunk, len(t) - done)
            done += count
            output = step(pages, host.plan([row], [count], wants_logits=np.array([True])))
            pages = output.pages
            np.testing.assert_allclose(output.logits[0], dense[row][done - 1], atol=2e-5, rtol=1e-4)
