"""Pages that were sent are those that the same tokens, written here, would have made."""

from __future__ import annotations

from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from kvjax.device import Placement
from kvjax.planning import plan_kv_cache, with_idle_states
from kvjax.transfer import PageReader, PageWriter, RequestPages
from tests.transfer.worlds import WINDOW, Dense, config_of, nan_pages, specs, tables, written


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.sweep), 37])
@pytest.mark.parametrize(
    ("sender", "receiver", "dtype"),
    [
        ((4, "cpu"), (8, "tpu"), "bfloat16"),
        pytest.param((4, "cpu"), (4, "cpu"), "float32", marks=pytest.mark.sweep),
        pytest.param((8, "tpu"), (4, "cpu"), "bfloat16", marks=pytest.mark.sweep),
        pytest.param((8, "tpu"), (16, "tpu"), "float32", marks=pytest.mark.sweep),
        ((12, "cpu"), (8, "cpu"), "float32"),
    ],
)
def test_pages_are_those_of_the_same_tokens_written_here(
    sender: tuple[int, str], receiver: tuple[int, str], dtype: str, num_tokens: int
) -> None:
    """Where both have a page; what the sender's window has left behind is zero, every other page untouched."""
    ours, theirs = specs(sender[0], dtype), specs(receiver[0], dtype)
    source, destination = config_of(ours, sender[1]), config_of(theirs, receiver[1])
    dense = Dense.random(ours, num_tokens, num_tokens)
    sent = RequestPages(tables(ours, num_tokens, 1), 0, num_tokens)
    arrives = RequestPages(tables(theirs, num_tokens, 2), 0, num_tokens)
    pages = written(source, nan_pages(source), sent, dense, range(num_tokens))

    reader, writer = PageReader(source, Placement.create()), PageWriter(destination, Placement.create())
    cache = writer.placed(reader.read(pages, sent))
    result = writer.write(nan_pages(destination), arrives, cache)

    expected = written(destination, nan_pages(destination), arrives, dense, range(num_tokens))
    left_behind = max(0, num_tokens - WINDOW + 1) // sender[0] * sender[0]  # of the window, tokens that were released
    window = RequestPages((arrives.tables[1],), 0, num_tokens)
    alone = config_of({"window": theirs["window"]}, receiver[1])
    kept = written(alone, nan_pages(alone), window, dense, range(left_behind, num_tokens))
    chex.assert_trees_all_equal(result, expected.with_column(1, 0, kept.column(0, 0)))


def test_tokens_that_the_receiver_has_already_are_not_touched() -> None:
    """A hit of 16 tokens: the pages before it hold NaN and keep it."""
    layers = specs(8)
    config = config_of(layers, "cpu")
    dense = Dense.random(layers, 37, 5)
    sent, arrives = (RequestPages(tables(layers, 37, seed), 16, 37) for seed in (1, 2))
    pages = written(config, nan_pages(config), sent, dense, range(37))
    reader, writer = PageReader(config, Placement.create()), PageWriter(config, Placement.create())
    result = writer.write(nan_pages(config), arrives, writer.placed(reader.read(pages, sent)))
    kept = arrives.tables[0][:2]
    assert np.isnan(np.asarray(result.column(0, 0)[0])[kept]).all()
    expected = written(config, nan_pages(config), arrives, dense, range(16, 37))
    chex.assert_trees_all_equal(result, expected)


def test_a_read_is_a_copy() -> None:
    """The sender may write to its pages, or free them, as soon as it has read."""
    layers = specs(4)
    config = config_of(layers, "cpu")
    dense = Dense.random(layers, 10, 0)
    request = RequestPages(tables(layers, 10, 1), 0, 10)
    reader = PageReader(config, Placement.create())
    pages = written(config, nan_pages(config), request, dense, range(10))
    first = reader.read(pages, request)
    jax.tree.map(lambda array: array.delete(), pages)
    again = reader.read(written(config, nan_pages(config), request, dense, range(10)), request)
    chex.assert_trees_all_equal(first.arrays, again.arrays)


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    layers = specs(4)
    config, other = config_of(layers, "cpu"), config_of(specs(4, "bfloat16"), "cpu")
    request = RequestPages(tables(layers, 10, 1), 0, 10)
    one = Placement.create()
    sent = PageReader(config, one, weights_version="1").read(nan_pages(config), request)
    with pytest.raises(ValueError, match="expected KV of weights '2', got '1'; compute the prompt"):
        PageWriter(config, one, weights_version="2").placed(sent)
    with pytest.raises(ValueError, match="5 layers differ; layer 'compressed': expected entries"):
        PageWriter(other, one, weights_version="1").placed(sent)
    writer = PageWriter(config, one, weights_version="1")
    pages = nan_pages(config)
    with pytest.raises(ValueError, match="expected tokens of 0 to 10, got 0 to 11"):
        writer.write(pages, RequestPages(request.tables, 0, 11), sent)
    with pytest.raises(ValueError, match="expected block tables of 5 groups, got 4"):
        writer.write(pages, RequestPages(request.tables[1:], 0, 10), sent)
    with pytest.raises(ValueError, match="expected the first entry at the start of a page of 4, got 3"):
        writer.write(pages, RequestPages(request.tables, 3, 10), sent)
    with pytest.raises(ValueError, match="expected a block table of 3 columns for 10 entries, got 2"):
        writer.write(pages, RequestPages((request.tables[0][:2], *request.tables[1:]), 0, 10), sent)
    with pytest.raises(ValueError, match="expected 0 <= first < stop, got tokens 4 to 4"):
        RequestPages(request.tables, 4, 4)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(pages))


def test_idle_states_are_not_sent() -> None:
    """A request is sent where it ends, and they end where blocks do."""
    layers = {"full": specs(4)["full"], "states": replace(specs(4)["states"], mamba_cache_mode="align")}
    config = plan_kv_cache(with_idle_states(layers, "int8"), max_model_len=16, num_blocks=20).config
    for one in (PageReader, PageWriter):
        with pytest.raises(NotImplementedError, match="plan without idle_state_dtype"):
            one(config, Placement.create())
