"""Block hashes of a request with extra keys of every kind, as releases of vLLM compute them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvjax.core.hashing.block_hash import BlockHasher
from kvjax.core.hashing.extra_keys import EXTRA_KEY_STYLES, LoRARequest, MultiModalFeature
from kvjax.core.requests.request import Request
from tests.core.hashing.plain_hashing import hash_value, plain_hashes

# 12 tokens in blocks of 4, PYTHONHASHSEED=0: what get_request_block_hasher of 0.16.0, 0.22.1 and 0.33.0 returned.
GOLDEN = {
    ("vllm-0.16", "sha256"): [
        "1219a4ee89b7eaed81f599e5855b48351dfd07654853f28f7653d0b779902f24",
        "907c6717982013a3a9732dab6121f59d1497dd4983641ef94264bd212437a915",
        "8eb8bf72c26c596ebe508656d2b89b67343795eb53791209157c22bedbfe507f",
    ],
    ("vllm-0.16", "sha256_cbor"): [
        "087ba6e68ce533ff17059cbe7eafe5740845c52a274a24b5af8b2129ad6ed61e",
        "8043bbf2c0d92e3d2acbed63c7fafd3a456194f710aec3dba227cf5782cd39f2",
        "bb5787da8aa3683bd8bc5892b4b1f21e30441b309de93fb9af1c1ad2b84a528d",
    ],
    ("vllm-0.22", "sha256"): [
        "00bb6fa77e2d5f702b2fa9254bfc78763f6d811d51a2a0d29484865a0d606acb",
        "85a6bc3f56bb673c5e2a5f61e9e8ad30340725d8a19dd2de8aefaba2f8d8aea2",
        "defd04c6f796064ee669eb74674525ab5e8400492912c81cd38642b18ba23c19",
    ],
    ("vllm-0.22", "sha256_cbor"): [
        "c6bb9f94df23a11068948c346620f0077504a4d0281936085915921448297691",
        "77a8d684bf304f092ceae140b4f92a4d2f6600d9043d6d1903cbc496f663aac6",
        "c1a2fccb8067720f541a3e3f1fa78a1ae6ba267b22a3c4b8d74dc0881a93ae56",
    ],
    ("vllm-0.33", "sha256"): [
        "388967c5213648fd54f3c4d8019dd6d275e53cc7f4b480ca44dc77d62bffa6ed",
        "6470fb40406553a95b02b35599d9647f8b42b742be591f73fc247272575b81fd",
        "1e9bc1ff15657d4ad626293be79d6996930f88273079966700e0ab5bd988200b",
    ],
    ("vllm-0.33", "sha256_cbor"): [
        "a02336dd6c8da073b2edbaf2cf04e05cd1d2e601958fec1d57de026b7d9e2b7f",
        "330f37034455448e547ca98d8c97aebec3a01cca59d8d2aee69ab53397f6f20c",
        "6c08b69a90ac8ff31a3dc2846c6138ae1b927ade0cffc7763dbf57d423e593d3",
    ],
}
EMBEDS = np.arange(40, dtype=np.float32).reshape(10, 4)


def hashes_of(algorithm: str, num_prompt_tokens: int, **options: Any) -> list[bytes]:
    """All blocks of the 12 tokens; those behind the prompt are generated."""
    request = Request(
        "r",
        range(num_prompt_tokens),
        mm_features=[MultiModalFeature("image", 1, 4)],
        lora=LoRARequest("adapter", "/adapters/1", adapter_id=1),
        cache_salt="salt",
        prompt_embeds=EMBEDS,
        block_hasher=BlockHasher(4, algorithm, seed="0", **options),
    )
    request.append_output_token_ids(range(num_prompt_tokens, 12))
    return list(request.block_hashes)


@pytest.mark.parametrize(("style", "algorithm"), GOLDEN)
def test_hashes_are_those_of_the_release(style: str, algorithm: str) -> None:
    hashes = hashes_of(algorithm, len(EMBEDS), extra_key_style=style)
    assert [block_hash.hex() for block_hash in hashes] == GOLDEN[style, algorithm]


def test_the_golden_hashes_are_of_every_style() -> None:
    assert {style for style, _ in GOLDEN} == set(EXTRA_KEY_STYLES)


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_the_default_is_the_newest_release(algorithm: str) -> None:
    assert [h.hex() for h in hashes_of(algorithm, len(EMBEDS))] == GOLDEN["vllm-0.33", algorithm]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"])
def test_large_embeddings_are_hashed_whole_where_the_style_has_their_bytes(algorithm: str) -> None:
    """More than a pickle's frame of 64 KiB a block, by the plain encoders."""
    embeds = np.arange(8 * 8192, dtype=np.float32).reshape(8, 8192)
    hasher = BlockHasher(4, algorithm, seed="0", extra_key_style="vllm-0.16")
    request = Request("r", range(8), prompt_embeds=embeds, block_hasher=hasher)
    keys = [(embeds[:4].tobytes(),), (embeds[4:].tobytes(),)]
    assert request.block_hashes == plain_hashes(algorithm, hash_value(algorithm, "0"), range(8), 4, keys)
