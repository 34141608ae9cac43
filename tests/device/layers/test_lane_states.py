"""States that lie otherwise than their heads: in whole lanes on TPU, or in several parts; what is computed is equal."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from kvjax.core.kinds.full_attention import FullAttentionSpec
from kvjax.core.kinds.mamba import MambaSpec
from kvjax.core.kinds.ring_state import RingStateSpec
from kvjax.core.spec import KVCacheConfig, KVCacheSpec
from kvjax.device import make_update_step
from kvjax.planning import plan_kv_cache
from tests.device.serving import Server
from tests.device.steps.test_drafts import BUCKETS, CLOSE, HEADS, KEY, STATE_BLOCK, TAPS, VALUE, delta_model
from tests.device.toy_kinds import HASH_BLOCK, VOCAB

MAX_MODEL_LEN = 40
LANES = 128


def delta_config(platform: str, ring_tokens: int | None, parts: int) -> KVCacheConfig:
    heads, columns = HEADS * parts, VALUE // parts
    state: KVCacheSpec = MambaSpec(
        block_size=STATE_BLOCK,
        shapes=((HEADS * (2 * KEY + VALUE), TAPS - 1), (heads, KEY, columns)),
        dtypes=("float32",) * 2,
        token_shapes=((HEADS, KEY), (heads, columns), (heads,)),
        token_dtypes=("float32",) * 3,
        mamba_cache_mode="align",
        lane_arrays=(1,),
    )
    if ring_tokens is not None:
        assert isinstance(state, MambaSpec)
        state = RingStateSpec.of(state, ring_tokens, 0)
    specs = {
        "layers.0": state,
        "layers.1": FullAttentionSpec(block_size=HASH_BLOCK, num_kv_heads=4, head_size=8, dtype="float32"),
    }
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_in_flight_tokens": 48}
    return plan_kv_cache(specs, num_blocks=[600, 600], platform=platform, **sizes).config


def served(platform: str, ring_tokens: int | None, parts: int = 1) -> Server:
    """Prompts in chunks, a hit, and answers."""
    step = make_update_step(delta_model(), delta_config(platform, ring_tokens, parts), BUCKETS)
    server = Server(step, HASH_BLOCK, MAX_MODEL_LEN)
    prompts = {name: np.random.default_rng(seed).integers(0, VOCAB, 21).tolist() for seed, name in enumerate("ab")}
    server.run(prompts, 7)
    assert server.run({"again": prompts["a"][:19] + [3, 1]}, 5) == {"again": 16}
    return server


@pytest.mark.parametrize("parts", [1, VALUE])
@pytest.mark.parametrize("ring_tokens", [None, 3])
def test_padded_states_compute_what_plain_ones_do(ring_tokens: int | None, parts: int) -> None:
    """Also in parts of a number each. Zeros behind keys and values stay zeros, in every page that was written."""
    plain, padded = served("cpu", ring_tokens), served("tpu", ring_tokens, parts)
    assert padded.tokens == plain.tokens
    for name, logits in plain.logits.items():
        np.testing.assert_allclose(np.array(padded.logits[name]), np.array(logits), **CLOSE)
    config = padded.config
    group = next(group for group in config.kv_cache_groups if group.kv_cache_spec.state_pages is not None)
    states = jax.tree.map(np.asarray, padded.pages.column(group.pool_id, 0)[1])
    assert states.shape[1:] == (HEADS * parts, LANES, LANES)
    written = states[~np.isnan(states).all(axis=(1, 2, 3))]
    assert len(written) > 2
    assert np.abs(written[1:, :, :KEY, : VALUE // parts]).min() > 0
    assert not written[:, :, KEY:].any()
    assert not written[..., VALUE // parts :].any()
