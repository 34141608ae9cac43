"""States at any block: after a hit at every length a hybrid gives Hugging Face's tokens and logits."""

from __future__ import annotations

from tests.models.families import (
    Family,
    add_golden,
    assert_golden,
    assert_nothing_is_left,
    drain,
    every_recurrent_family,
    greedy_params,
    tokens_of_a_hit,
)
from tests.models.golden_models import goldens_of
from tests.models.one_family.test_hybrids_in_slabs import small_engine


@every_recurrent_family
def test_a_hit_at_every_length_goes_on_as_hugging_face_does(family: Family) -> None:
    """A request of the first tokens leaves a state where it ends, from which the whole prompt goes on."""
    engine = small_engine(family, 4.0, state_block_size=family.block_size)
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
