"""States at any block: after a hit at every length a hybrid gives Hugging Face's tokens and logits.

States are in slabs, or with a ring in a pool of their own; what nobody has written is NaN.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.core.kinds.answer_columns import ANSWER_TOKENS
from kvjax.device import KVPages
from tests.models.families import (
    ATOL,
    IN_RINGS,
    IN_SLABS,
    Family,
    RecordingEngine,
    add_golden,
    assert_golden,
    assert_nothing_is_left,
    drain,
    engine_config,
    greedy_params,
    loaded,
    tokens_of_a_hit,
)
from tests.models.golden_models import goldens_of
from tests.models.states.test_hybrids_in_slabs import small_engine

OUTSIDE_SWEEPS = ("qwen3_next_in_slabs", "kimi_linear_in_rings", "granite_moe_hybrid_in_rings")
every_recurrent_family = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.id, marks=[] if family.id in OUTSIDE_SWEEPS else [pytest.mark.sweep])
        for family in (*IN_SLABS, *IN_RINGS)
        if family.name != "gemma4"
    ],
)


def make_engine(family: Family) -> RecordingEngine:
    """States at every block; all pages but the null ones are NaN, and integers in them have every bit set."""
    if family.ring_tokens is None:
        return small_engine(family, 4.0, state_block_size=family.block_size)
    engine = RecordingEngine(loaded(family), engine_config(family, state_block_size=family.block_size))
    engine._runner.pages = without_numbers(engine._runner.pages)
    return engine


def without_numbers(pages: KVPages) -> KVPages:
    """NaN in all pages but the null ones; integers in them have every bit set."""

    def unwritten(array: jax.Array) -> jax.Array:
        return array.at[1:].set(-1 if jnp.issubdtype(array.dtype, jnp.integer) else jnp.nan)

    return jax.tree.map(unwritten, pages)


@every_recurrent_family
def test_a_hit_at_every_length_goes_on_as_hugging_face_does(family: Family) -> None:
    """A request of the first tokens leaves a state where it ends, from which the whole prompt goes on."""
    engine = make_engine(family)
    assert tokens_of_a_hit(engine) == family.block_size
    golden = max(goldens_of(family.name), key=lambda golden: len(golden.prompt))
    for length in range(family.block_size, len(golden.prompt), family.block_size):
        engine.add_request(golden.prompt[:length], greedy_params(1))
        drain(engine)
        request_id = add_golden(engine, golden, greedy_params())
        result = drain(engine)[request_id]
        assert result.stats.num_cached_tokens == length
        assert_golden(engine, golden, result)
        engine.step()
        assert engine.manager.reset_prefix_cache()
    assert_nothing_is_left(engine)


@every_recurrent_family
def test_a_hit_inside_an_answer_goes_on_as_hugging_face_does(family: Family) -> None:
    """A prompt that repeats another and its answer starts from the state that the answer left on its way."""
    engine = make_engine(family)
    num_hits = 0
    for golden in goldens_of(family.name):
        num_prompt, num_all = len(golden.prompt), len(golden.prompt) + len(golden.greedy)
        ends = range(ANSWER_TOKENS, num_all, ANSWER_TOKENS)
        for end in [end for end in ends if num_prompt < end < num_all - 2]:
            add_golden(engine, golden, greedy_params())
            drain(engine)
            num_known = end - num_prompt + 1
            longer = np.concatenate((golden.prompt, golden.greedy[:num_known])).tolist()
            request_id = engine.add_request(longer, greedy_params(len(golden.greedy) - num_known))
            result = drain(engine)[request_id]
            assert result.stats.num_cached_tokens == end
            np.testing.assert_array_equal(result.output_token_ids, golden.greedy[num_known:])
            got = np.stack(engine.logits[request_id])[: len(golden.greedy) - num_known]
            np.testing.assert_allclose(got, golden.decode_logits[num_known:], atol=ATOL, rtol=0)
            num_hits += 1
            engine.step()
            assert engine.manager.reset_prefix_cache()
    assert num_hits
    assert_nothing_is_left(engine)


@every_recurrent_family
def test_a_named_checkpoint_is_hit_by_the_next_prompt(family: Family) -> None:
    """The prompt whose beginning it names goes on otherwise, so nothing else would have left a state there."""
    engine = make_engine(family)
    golden = max(goldens_of(family.name), key=lambda golden: len(golden.prompt))
    shared = 3 * family.block_size
    other = [*golden.prompt[:shared].tolist(), *golden.prompt[::-1].tolist()]
    engine.add_request(other, greedy_params(1), checkpoints=[shared + 1])
    drain(engine)
    request_id = add_golden(engine, golden, greedy_params())
    result = drain(engine)[request_id]
    assert result.stats.num_cached_tokens == shared
    assert_golden(engine, golden, result)
    assert_nothing_is_left(engine)
