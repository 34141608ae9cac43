"""What a step of a mesh sends is read off its module, and compared with what the mesh makes necessary."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvjax.models import ModelConfig
from scripts.compile_mesh_steps import main, table
from scripts.lab.collectives import Sent, bytes_over, collectives, expected_of, layers_of, moves_of
from scripts.lab.engine_step import config_of
from tests.scripts.needs_libtpu import needs_libtpu

ROOT = Path(__file__).parents[2]
MESH = {"context": 2, "tensor": 2}
MODULE = """
  %pmax.1 = f32[256,16]{0,1:T(8,128)S(1)} all-reduce(%x), channel_id=1, replica_groups=mesh['context'=2,'tensor'=2] {'context'}, use_global_device_ids=true
  %sums = (f32[256,16,128]{2,0,1:T(8,128)}, f32[256,16]{0,1}) all-reduce(%y, %z), replica_groups={{0,2},{1,3}}, to_apply=%add
  ROOT %all-reduce.8 = bf16[256,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce-start(%w), replica_groups=mesh['axis_0'=2,'axis_1'=2] {'axis_1'}, to_apply=%add
  %starts = ((f32[256,16]{1,0:T(8,128)}, f32[2]{0}), (f32[256,16]{1,0:T(8,128)}, f32[2]{0})) all-reduce-start(%v, %u), replica_groups={{0,2},{1,3}}
  %done = bf16[256,4096]{1,0} all-reduce-done(%all-reduce.8)
  %moves = (bf16[256,1024]{1,0}, bf16[256,1024]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%q), source_target_pairs={{0,1},{2,3}}
  %moved = bf16[256,1024]{1,0} collective-permute-done(%moves)
  %gathers = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%g), replica_groups={{0,1},{2,3}}, dimensions={0}
  %use = f32[256,16]{0,1} fusion(%pmax.1), metadata={op_name="all-reduce(x)"}
"""  # noqa: E501
SENT = Counter(
    {
        Sent("all-reduce", "context", "f32[256,16]"): 3,
        Sent("all-reduce", "context", "f32[2]"): 1,
        Sent("all-reduce", "context", "f32[256,16,128]"): 1,
        Sent("all-reduce", "tensor", "bf16[256,4096]"): 1,
        Sent("collective-permute", "tensor 0>1", "bf16[256,1024]"): 1,
        Sent("all-gather", "tensor", "bf16[16,4]"): 1,
    }
)
LLAMA = {"num_attention_heads": 32, "hidden_size": 4096}


def test_arrays_are_counted_by_opcode_and_axis() -> None:
    """A start's operands do not count beside its results, nor an end beside its start, nor a collective's bare name."""
    assert collectives(MODULE, MESH) == SENT


def test_a_layer_sends_its_softmax_states_over_context_and_its_sums_over_tensor() -> None:
    """Two layers: maximum, weights and values of 16 heads; then o_proj's and down_proj's rows."""
    sent = expected_of(LLAMA, num_layers=2, num_tokens=256, num_context=2, num_shards=2)
    assert bytes_over(sent, "context") == 2 * (2 * 256 * 16 + 256 * 16 * 128) * 4
    assert bytes_over(sent, "tensor") == 2 * 2 * 256 * 4096 * 2
    joined = expected_of(LLAMA, num_layers=2, num_tokens=256, num_context=2, num_shards=2, compiler="gpu")
    assert [bytes_over(joined, axis) for axis in MESH] == [bytes_over(sent, axis) for axis in MESH]
    assert not expected_of(LLAMA, num_layers=2, num_tokens=256, num_context=1, num_shards=1)


def test_latents_experts_and_recurrent_layers_send_what_they_have() -> None:
    """MLA: 512 numbers of a latent a head; routed experts: one row a token more; states: no softmax."""
    deepseek = {
        "num_attention_heads": 128,
        "hidden_size": 7168,
        "kv_lora_rank": 512,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
    }
    sent = expected_of(deepseek, num_layers=2, num_tokens=64, num_context=2, num_shards=2)
    assert bytes_over(sent, "context") == 2 * (2 * 64 * 64 + 64 * 64 * 512) * 4
    assert bytes_over(sent, "tensor") == (2 + 2) * 64 * 7168 * 2
    sent = expected_of(deepseek, num_layers=2, num_tokens=64, num_context=2, num_shards=2, compiler="cpu")
    assert bytes_over(sent, "tensor") == (2 + 3) * 64 * 7168 * 2
    sizes = {"num_layers": 1, "num_context": 2, "num_shards": 2, "compiler": "gpu"}
    assert Sent("all-reduce", "context", "f32[256,64,512]") in expected_of(deepseek, num_tokens=256, **sizes)
    assert Sent("all-reduce", "context", "f32[2101248]") in expected_of(deepseek, num_tokens=64, **sizes)
    sent = expected_of(deepseek, num_layers=2, num_tokens=64, num_context=2, num_shards=2, compiler="gpu")
    assert bytes_over(sent, "tensor") == (2 + 2) * 64 * 7168 * 2
    hybrid = {
        "num_attention_heads": 16,
        "head_dim": 256,
        "hidden_size": 2048,
        "full_attention_interval": 2,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
    }
    sent = expected_of(hybrid, num_layers=2, num_tokens=64, num_context=2, num_shards=2)
    assert bytes_over(sent, "context") == (2 * 64 * 8 + 64 * 8 * 256) * 4
    assert bytes_over(sent, "tensor") == (4 * 64 * 2048 + 64 * (1024 + 1024 + 2048)) * 2
    gated = hybrid | {"num_experts": 512, "shared_expert_intermediate_size": 512}
    sent = expected_of(gated, num_layers=2, num_tokens=64, num_context=2, num_shards=2, compiler="gpu")
    assert sent[Sent("all-reduce", "tensor", f"bf16[{2 * 64 * 2048}]")] == 2


@pytest.mark.parametrize("num_shards", [1, 2, 4, 8])
@pytest.mark.parametrize("channels", [(16, 16, 32), (32, 32, 32), (8, 8, 48)])
def test_every_channel_moves_to_the_device_of_its_head(channels: tuple[int, ...], num_shards: int) -> None:
    """Channel by channel: who holds it, and whose head it is of."""
    held, moves, start = sum(channels) // num_shards, Counter[tuple[int, int]](), 0
    for width in channels:
        for i in range(width):
            moves[(start + i) // held, i // (width // num_shards)] += 1
        start += width
    expected = {pair: count for pair, count in moves.items() if pair[0] != pair[1]}
    found = Counter[tuple[int, int]]()
    for source, target, count in moves_of(channels, num_shards):
        found[source, target] += count
    assert found == expected


@pytest.mark.parametrize("name", ["llama-3-8b", "gemma-3-27b", "deepseek-v3", "qwen3-next-80b-a3b"])
def test_two_layers_are_one_of_each_kind(name: str) -> None:
    config = config_of(name, None)
    specs = ModelConfig.from_dict(config).kv_cache_specs(64, "bfloat16")
    assert len(specs) == 2
    whole = ModelConfig.from_dict(config_of(name, 62)).kv_cache_specs(64, "bfloat16")
    assert {type(spec) for spec in specs.values()} == {type(spec) for spec in whole.values()}
    kinds = {"deepseek-v3": ["attention and feed-forward", "attention and experts"]}
    assert name not in kinds or [str(layer) for layer in layers_of(config, 2)] == kinds[name]


@pytest.mark.parametrize(
    ("groups", "axis"),
    [
        ("{{0,1},{2,3}}", "tensor"),
        ("{{3,1},{0,2}}", "context"),
        ("[2,2]<=[4]", "tensor"),
        ("[2,2]<=[2,2]T(1,0)", "context"),
        ("{{0,1,2,3}}", "context+tensor"),
        ("mesh['a'=4] {'a'}", "context+tensor"),
        ("mesh['a'=2,'b'=2] {'a','b'}", "context+tensor"),
        ("{{0,3},{1,2}}", "{{0,3},{1,2}}"),
        ("mesh['a'=8]:(1) {'a':(1)2}", "mesh['a'=8]:(1) {'a':(1)2}"),
    ],
)
def test_groups_are_named_by_their_axis(groups: str, axis: str) -> None:
    """Groups that lie along no axis keep what the module says of them, so no formula has them."""
    line = f"  %a = f32[8]{{0}} all-gather(%x), channel_id=1, replica_groups={groups}, dimensions={{0}}"
    assert collectives(line, MESH) == Counter([Sent("all-gather", axis, "f32[8]")])


def test_pairs_and_scalars_are_told_too() -> None:
    line = "  %p = pred[] collective-permute(%x), channel_id=1, source_target_pairs={{0,2},{2,0}}, metadata={}"
    (sent,) = collectives(line, MESH)
    assert sent == Sent("collective-permute", "{{0,2},{2,0}}", "pred[]")
    assert sent.num_bytes == 1


def test_what_the_formula_lacks_is_marked() -> None:
    surplus = Counter([Sent("all-gather", "tensor", "f32[4]")])
    lines = table(SENT + surplus, SENT)
    assert sum("expected 0" in line for line in lines) == 1
    assert not any("expected" in line for line in table(SENT, SENT))


@needs_libtpu
@pytest.mark.sweep
@pytest.mark.parametrize("chip", ["v6e", "v7x"])
def test_a_step_of_two_axes_sends_what_it_must_in_place(chip: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--chip", chip, "--layers", "1"]) == 0, capsys.readouterr().out


@pytest.mark.sweep
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek_v3", "qwen3_next"])
def test_steps_of_a_family_send_the_formulas_arrays_and_no_other(name: str) -> None:
    program = [sys.executable, "-m", "tests.scripts.collectives_on_cpu", name]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    environment.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)  # XLA sends what it sends for users
    done = subprocess.run(program, capture_output=True, text=True, timeout=290, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
