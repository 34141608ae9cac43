"""The report of a plan: what it says in words, and that its JSON is JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from kvjax.core import ChunkedLocalAttentionSpec, MambaSpec, MLAAttentionSpec, SinkFullAttentionSpec
from kvjax.planning import Parallelism, plan_kv_cache
from kvjax.planning.report import default_lengths, plan_json, plan_table, plan_words
from tests.planning.test_plan import GIB, full, layers, window

STATES = MambaSpec(block_size=16, shapes=((32, 128, 128),), dtypes=("float32",), mamba_cache_mode="align")


def one_line(text: str) -> str:
    return " ".join(text.split())


def test_words_explain_the_worked_example() -> None:
    words = one_line(plan_words(plan_kv_cache(layers((80, full())), memory_bytes=56 * GIB, max_model_len=131_072)))
    assert "a page holds 16 tokens of one layer in 65,536 bytes;" in words
    assert "11,468 blocks, one of them the null block" in words
    assert "holds 8,192 blocks of pool 0; 11,467 are free for requests, so 1.4 of them fit at once" in words
    assert "The block tables of one such request are 32.00 KiB on the device" in words


def test_words_name_groups_windows_padding_and_parallelism() -> None:
    specs = layers((4, full(head_size=64)), (20, window(head_size=64)), (2, full(2)))
    arguments = {"memory_bytes": 8 * GIB, "max_model_len": 8_192, "tensor_parallel": 2}
    words = one_line(plan_words(plan_kv_cache(specs, platform="tpu", **arguments)))
    assert "Tensor parallelism over 2 devices" in words
    assert "in 32,768 bytes (16,384 without the device's padding) or 8,192 bytes;" in words
    assert "Its 6 groups (6 + 4 + 4 + 4 + 4 + 4 layers)" in words
    assert "blocks are set aside for 8,192 tokens in flight" in words


def test_words_name_what_scalar_memory_holds() -> None:
    """On TPU a row of 2,048 blocks is 8 KiB; one of 2**20 / 4 blocks fills the megabyte."""
    plan = plan_kv_cache(layers((2, full())), num_blocks=9_000, max_model_len=32_768, platform="tpu")
    words = one_line(plan_words(plan))
    assert "of group 0, takes 8.00 KiB for a request of 32,768 tokens: 126 such requests fit in one launch." in words
    plan = plan_kv_cache(layers((2, full(block_size=4))), num_blocks=300_000, max_model_len=2**20, platform="tpu")
    words = one_line(plan_words(plan))
    assert "takes 1.00 MiB for a request of 1,048,576 tokens: 0 such requests fit in one launch. Take larger" in words
    assert "scalar memory" not in plan_words(plan_kv_cache(layers((2, full())), num_blocks=9, max_model_len=32))


def test_words_name_sinks_ranks_and_the_usual_request() -> None:
    sinks = SinkFullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, dtype="bfloat16", sink_len=64)
    parallel = Parallelism(tensor=16, decode_context=2, data=3)
    arguments = {"memory_bytes": GIB, "max_model_len": 8_192, "request_len": 1_024}
    words = one_line(plan_words(plan_kv_cache(layers((2, sinks)), parallel=parallel, **arguments)))
    assert "4 blocks hold the layers' own attention sinks." in words
    assert "Context parallelism over 2 ranks splits the tokens of a head: a block id stands for 2 times" in words
    assert "Each of 3 replicas has requests and a cache of its own: together" in words
    assert "balanced" not in words
    words = one_line(plan_words(plan_kv_cache(layers((2, sinks), (4, window(num_kv_heads=1))), **arguments)))
    assert "The pools are balanced for requests of 1,024 tokens that all run: an idle cache keeps" in words


def test_words_and_json_give_what_the_other_balance_would_keep() -> None:
    """The default beside longest requests that all run, and these beside the default."""
    specs, arguments = layers((2, full()), (4, window(num_kv_heads=1))), {"memory_bytes": GIB, "max_model_len": 65_536}
    usual, longest = plan_kv_cache(specs, **arguments), plan_kv_cache(specs, request_len=65_536, **arguments)
    kept = [f"keeps {plan.kept.tokens:,} tokens and {plan.kept.checkpoints:,} checkpoints" for plan in (usual, longest)]
    loads = [
        "balanced for a checkpoint (states, ends of windows) for every 8,192 tokens, with at most 256 requests running",
        "balanced for requests of 65,536 tokens that all run",
    ]
    for plan, order in ((usual, 1), (longest, -1)):
        words = one_line(plan_words(plan)).lower()
        places = [
            words.index(f"{load}{sign} an idle cache {room}")
            for load, room, sign in zip(loads, kept, ":,"[::order], strict=True)
        ]
        assert places[::order] == sorted(places)
        balances = plan_json(plan, [1_024])["balances"][::order]
        assert [one["num_blocks"] for one in balances] == [
            [pool.num_blocks for pool in one.pools] for one in (usual, longest)
        ]
    assert usual.kept.checkpoints > 4 * longest.kept.checkpoints
    assert "balances" in plan_json(plan_kv_cache(specs, num_blocks=9_000, max_model_len=1_024), [1_024])


def test_tables_have_a_line_for_each_kind_of_page() -> None:
    latent = MLAAttentionSpec(block_size=256, head_size=512, dtype="bfloat16", tokens_per_state=4)
    other = replace(latent, tokens_per_state=128)
    chunked = ChunkedLocalAttentionSpec(
        block_size=256, num_kv_heads=1, head_size=128, dtype="bfloat16", attention_chunk_size=8_192
    )
    plan = plan_kv_cache(layers((3, latent), (2, other), (1, chunked)), num_blocks=99, max_model_len=8_192)
    lines = [line.split() for line in plan_table(plan, [8_192]).splitlines()]
    assert ["0", "0", "mla_attention", "/", "4", "3", "256", "65,536", "65,536", "32"] in lines
    assert ["0", "0", "mla_attention", "/", "128", "2", "256", "2,048", "2,048", "32"] in lines
    assert ["1", "1", "chunked_local_attention", "8,192", "1", "256", "131,072", "131,072", "32"] in lines


def test_words_say_that_blocks_were_given() -> None:
    words = one_line(plan_words(plan_kv_cache(layers((80, full())), num_blocks=11_468, max_model_len=131_072)))
    assert words.startswith("The number of blocks was given; they take 56.00 GiB on each device.")


def test_tables_name_every_group() -> None:
    plan = plan_kv_cache(layers((4, full()), (20, window())), num_blocks=4_000, max_model_len=8_192)
    table = plan_table(plan, [2_048, 8_192])
    assert re.search(r"1-5 +0 +sliding_window 1,024 +4 ", table)
    assert re.search(r" 0 +0 +full_attention +4 ", table)
    assert all(len(line) <= 120 for line in table.splitlines())


def test_json_round_trips() -> None:
    plan = plan_kv_cache(layers((4, full()), (20, window())), memory_bytes=GIB, max_model_len=8_192)
    data = plan_json(plan, [2_048, 8_192])
    assert json.loads(json.dumps(data)) == data
    assert data["requests_that_fit"]["8192"] == data["concurrency"]
    assert [name for group in data["groups"] for name in group["layer_names"][:1]]


def test_default_lengths_end_at_the_longest() -> None:
    assert default_lengths(131_072) == [2_048, 8_192, 32_768, 131_072]
    assert default_lengths(100) == [100]


def test_words_name_slabs_and_what_they_leave() -> None:
    specs = layers((12, full(2, head_size=256)), (36, STATES))
    plan = plan_kv_cache(specs, memory_bytes=40 * GIB, max_model_len=32_768, one_memory=True)
    words = one_line(plan_words(plan))
    assert "share 1,706 slabs of 24.00 MiB, one of them for the null blocks." in words
    assert "A slab is 64 of pool 0 or 1 of pool 1 blocks at a time, which leave 0.0% or 0.0% of it;" in words
    assert "1,705 slabs are free for requests" in words
    assert "balanced" not in words
    values = plan_json(plan, [1_024])
    assert values["slabs"]["num_slabs"] == 1_706
    assert values["used_bytes"] == 1_706 * 24 * 2**20
    assert len(values["balances"]) == 1
    assert json.loads(json.dumps(values)) == values | {
        "slabs": values["slabs"] | {"blocks_per_slab": [64, 1], "waste": [0.0, 0.0]}
    }
    typed = plan_kv_cache(specs, memory_bytes=40 * GIB, max_model_len=32_768)
    assert plan_json(typed, [1_024])["slabs"] is None
    assert (plan.kept.tokens, plan.kept.checkpoints) == (155 * 8_192, 155)  # 8 slabs of tokens and 3 of states each


def test_groups_of_one_memory_have_as_many_layers_as_the_smallest_pool() -> None:
    for num_full, num_states, widths in ((7, 20, [7, 7, 7, 6]), (4, 9, [4, 3, 3, 3]), (5, 5, [5, 5])):
        specs = layers((num_full, full(2)), (num_states, STATES))
        plan = plan_kv_cache(specs, memory_bytes=40 * GIB, max_model_len=4_096, one_memory=True)
        assert [len(group.layer_names) for group in plan.groups] == widths
        typed = plan_kv_cache(specs, memory_bytes=40 * GIB, max_model_len=4_096)
        assert [len(group.layer_names) for group in typed.groups] == [num_full, num_states]
