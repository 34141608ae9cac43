"""The report of a plan: what it says in words, and that its JSON is JSON."""

from __future__ import annotations

import json
import re

from kvjax.planning import plan_kv_cache
from kvjax.planning.report import default_lengths, plan_json, plan_table, plan_words
from tests.planning.test_plan import GIB, full, layers, window


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


def test_words_say_that_blocks_were_given() -> None:
    words = one_line(plan_words(plan_kv_cache(layers((80, full())), num_blocks=11_468, max_model_len=131_072)))
    assert words.startswith("The number of blocks was given; they take 56.00 GiB on each device.")


def test_tables_name_every_group() -> None:
    plan = plan_kv_cache(layers((4, full()), (20, window())), num_blocks=1_000, max_model_len=8_192)
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
