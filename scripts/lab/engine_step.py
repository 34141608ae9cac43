"""Compiles a step of the engine for chips that are only described, and looks for copies of the pages in the module.

    python -m scripts.lab.engine_step v6e gemma-3-27b --layers 6       -> one line of JSON; exit status 1: copies

Flow:    configs/models -> abstract weights and pages on a mesh -> UpdateStep -> optimised module -> [step_report]

The step is the engine's: its model, its sampler, KV heads and weights split over `--shards` chips. Weights are never
made: all arguments are shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from scripts.lab.collectives import collectives
from scripts.lab.gpu.target import CARDS
from scripts.lab.tpu.chips import CHIPS, prepare_environment

prepare_environment()

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
_SEQUENCES = 8
_EMBEDDING_ROWS = 4096
_KEPT_BLOCK = 128  # inputs and outputs that share a scale
_WRITES = ("scatter", "dynamic-update-slice")  # into what they are given
_NO_COPY = ("parameter", "custom-call", "get-tuple-element", "bitcast", "tuple", "conditional", *_WRITES)


def num_page_copies(module: str, page_shapes: Iterable[tuple[int, ...]]) -> int:
    """Operations of an optimised module's text that make an array of one of the pages' shapes.

    Kernels, scatters and updates of slices do not count: they write into what they are given, as the aliases show, and
    bytes of temporaries. Nor do arrays in VMEM, S(1): XLA reads states of few pages from there.
    """
    shapes = "|".join({",".join(map(str, shape)) for shape in page_shapes})
    made = re.findall(rf"= (\(?\w+\[(?:{shapes})\](?:[^=\n]*?)) ([a-z][a-z-]*)\(([^\n]*)", module)
    root = rf"\s*ROOT [^\n]* (?:{'|'.join(_WRITES)})\("
    writes = re.findall(rf"^(%?[\w.-]+) [^\n]*\{{\n(?:[^}}\n][^\n]*\n)*?{root}", module, re.MULTILINE)
    in_hbm = [(name, rest) for kind, name, rest in made if name not in _NO_COPY and "S(1)" not in kind]
    called = [(name, re.search(r"calls=(%?[\w.-]+)", rest)) for name, rest in in_hbm]
    return sum(name != "fusion" or call is None or call[1] not in writes for name, call in called)


def step_report(compiled: Any, pages: Any) -> dict[str, int]:
    """What a compiled step does with `pages` (a KVPages of shapes): bytes on one chip, and copies in the module."""
    import jax

    leaves = jax.tree.leaves(pages)
    shapes = [leaf.sharding.shard_shape(leaf.shape) for leaf in leaves]
    module, memory = compiled.as_text(), compiled.memory_analysis()
    page_bytes = sum(leaf.dtype.itemsize * math.prod(shape) for leaf, shape in zip(leaves, shapes, strict=True))
    aliases = module.split("input_output_alias={", 1)[-1].split("}, entry_computation_layout", 1)[0]
    return {
        "page_arrays": len(leaves),
        "page_bytes": page_bytes,
        "aliased_arrays": aliases.count("-alias)"),
        "aliased_bytes": memory.alias_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "page_copies": num_page_copies(module, shapes),
        "kernel_calls": module.count('custom_call_target="tpu_custom_call"'),
    }


def chain_report(modules: Sequence[Any], pages: Any) -> dict[str, int]:
    """The report of a step that may be several programs, each with some layers' pages."""
    reports = [step_report(module, pages) for module in modules]
    summed = ("aliased_arrays", "aliased_bytes", "page_copies", "kernel_calls")
    most = max(report["temp_bytes"] for report in reports)
    sums = {name: sum(report[name] for report in reports) for name in summed}
    return reports[0] | sums | {"temp_bytes": most, "programs": len(reports)}


def is_in_place(report: dict[str, int]) -> bool:
    """Whether every page array is the output's buffer too, and nothing copies one."""
    return (
        report["page_copies"] == 0
        and report["aliased_arrays"] >= report["page_arrays"]
        and report["aliased_bytes"] >= report["page_bytes"]
    )


def first_layers(data: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """A config.json's object for the first layers of its model: counts, and what has an entry or a number per layer."""
    text = data.get("text_config", data)
    names = [name for name in ("num_hidden_layers", "decoder_layers", "encoder_layers") if name in text]
    before = text[names[0]]
    cut = {
        name: value[:num_layers]
        for name, value in text.items()
        if isinstance(value, list | str) and len(value) == before and name != "architectures"
    }
    numbered = text.get("linear_attn_config")  # Kimi Linear's: layers by number, from 1 on
    if numbered is not None:
        kept = {k: [i for i in v if i <= num_layers] for k, v in numbered.items() if isinstance(v, list)}
        cut["linear_attn_config"] = numbered | kept
    text = text | cut | dict.fromkeys(names, num_layers)
    whole = data | {"text_config": text} if "text_config" in data else text
    return {name: value for name, value in whole.items() if name != "quantization_config"}


def one_of_each_kind(data: dict[str, Any]) -> dict[str, Any]:
    """A config.json's object of two layers: one dense and one of experts, recurrent and full, sliding and full.

    The layers are the model's own; only how many there are of each kind is not.
    """
    text = data.get("text_config", data)
    kinds = {"first_k_dense_replace": 1, "full_attention_interval": 2}
    changed: dict[str, Any] = {name: count for name, count in kinds.items() if name in text}
    if "sliding_window" in text:
        changed["layer_types"] = ["sliding_attention", "full_attention"]
    text = first_layers(text, 2) | changed
    return data | {"text_config": text} if "text_config" in data else text


def config_of(model: str, num_layers: int | None) -> dict[str, Any]:
    """The config.json's object of a model's first layers, or of one of each kind."""
    data = json.loads((MODELS / f"{model}.json").read_text())
    return one_of_each_kind(data) if num_layers is None else first_layers(data, num_layers)


def described(chip: str, count: int) -> tuple[str, list[Any]]:
    """The platform, and `count` devices, of a TPU of four chips, or of one process with as many cards; or this host."""
    import jax
    from jax.experimental import topologies

    if chip == "cpu":
        return "cpu", jax.devices("cpu")[:count]
    if chip in CHIPS:
        topology = topologies.get_topology_desc(topology_name=CHIPS[chip].topology_of_four, platform="tpu")
        return "tpu", list(topology.devices[:count])
    config, shape = CARDS[chip].config, f"1x1x{count}"
    topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology=shape)
    return "gpu", list(topology.devices)


def keep_projections(module: Any, dtype: str) -> None:
    """Gives all projections of an abstract model but the output head kernels of eight bits, in blocks of 128 x 128."""
    import jax
    from flax import nnx

    from kvjax.models.layers.linear import Linear

    for path, layer in nnx.iter_modules(module):
        if isinstance(layer, Linear) and "lm_head" not in path:
            shape = layer.kernel.shape
            scale = tuple(-(-size // _KEPT_BLOCK) for size in shape)
            kernels = (jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(scale, "float32"))
            layer.keep_quantised(*kernels, (_KEPT_BLOCK, _KEPT_BLOCK))


def compile_step(
    chip: str,
    model: str,
    *,
    num_layers: int | None,
    num_shards: int,
    num_tokens: int,
    num_blocks: int,
    block_size: int,
    num_context: int = 1,
    one_memory: bool = False,
    idle_state_dtype: str | None = None,
    ring_tokens: int | None = None,
    kept_dtype: str | None = None,
) -> dict[str, Any]:
    """Compiles a step, and encoders and work on pages as done before one; the report of the step.

    Heads and weights are split over `num_shards` chips, and with `num_context` > 1 the tokens of pages over so many;
    kernels then are those that the chip's own process would choose. `chip` may be a card, where jax has its compiler.
    `num_layers` None: one of each kind. A step of as many tokens as sequences decodes. With `one_memory` all
    pools share what `num_blocks` of each would take. Projections are of `kept_dtype`, None: in bfloat16.
    """
    from unittest import mock

    import jax
    import numpy as np
    from flax import nnx

    from kvjax.device import Bucket, Buckets, Placement, make_update_step
    from kvjax.device.pages.idle_states import loaded, move_states_padded, stored
    from kvjax.device.pages.kv_pages import page_shapes
    from kvjax.device.pages.page_ops import copy_pages_padded, zero_pages_padded
    from kvjax.engine.sampling.sampler import sample
    from kvjax.engine.sampling.sampling_table import SamplingTable
    from kvjax.engine.step.config import CHECKPOINTS_IN_STEP
    from kvjax.models import ModelConfig, build_model
    from kvjax.models.sharding import param_sharding
    from kvjax.planning import Parallelism, plan_kv_cache, with_idle_states, with_ring_states

    config = ModelConfig.from_dict(config_of(model, num_layers))
    splits = config.splits_cache(num_shards)
    platform, devices = described(chip, num_context * num_shards)
    specs = config.kv_cache_specs(max(block_size, config.default_block_size) * num_context, "bfloat16")
    if idle_state_dtype is not None:
        specs = with_idle_states(specs, idle_state_dtype)
    if ring_tokens is not None:
        specs = with_ring_states(specs, ring_tokens, num_drafts=0)
    options: dict[str, Any] = {
        "specs": specs,
        "max_model_len": 8192,
        "max_in_flight_tokens": num_tokens,
        "platform": platform,
        "parallel": Parallelism(tensor=num_shards if splits else 1, page_context=num_context),
        "shared_layers": config.shared_layers,
    }
    plan = plan_kv_cache(num_blocks=num_blocks, **options)
    if one_memory:
        plan = plan_kv_cache(memory_bytes=plan.used_bytes, one_memory=True, **options)
    mesh = jax.sharding.Mesh(np.array(devices).reshape(num_context, num_shards), ("context", "tensor"))
    placement = Placement(mesh, "tensor" if splits else None, "context" if num_context > 1 else None)
    abstract = nnx.eval_shape(lambda: build_model(config, dtype="bfloat16", rngs=nnx.Rngs(0)))
    if kept_dtype is not None:
        keep_projections(abstract, kept_dtype)
    graph, state = nnx.split(abstract)
    params = [
        (
            path,
            param.replace(
                jax.ShapeDtypeStruct(param.shape, param.dtype, sharding=param_sharding(abstract, path, mesh, "tensor"))
            ),
        )
        for path, param in nnx.to_flat_state(state)
    ]
    module = nnx.merge(graph, nnx.from_flat_state(params))
    columns = 8192 // min(group.spec.block_size for group in plan.groups)
    is_mixed = num_tokens != _SEQUENCES
    has_states = any(group.spec.state_pages is not None for group in plan.groups)
    leaves_states = is_mixed and has_states and idle_state_dtype is None  # as an engine's steps do
    num_checkpoints = CHECKPOINTS_IN_STEP if leaves_states else 0
    bucket = Bucket(num_tokens, _SEQUENCES, columns, is_mixed=is_mixed, num_checkpoints=num_checkpoints)
    dim, embeds = config.embedding_dim, None
    if dim is not None:
        embeds = jax.ShapeDtypeStruct((_EMBEDDING_ROWS, dim), "bfloat16", sharding=placement.replicated)
    backend = platform if num_context == 1 and platform != "cpu" else "auto"
    step = make_update_step(
        module,
        plan.config,
        Buckets((bucket,)),
        placement=placement,
        sample_fn=sample,
        mrope=config.has_mrope,
        encoder_shapes=config.encoder_shapes,
        embeds=embeds is not None,
        backend=backend,
    )
    pages = page_shapes(plan.config, placement)
    rows = np.zeros(1, np.int64)
    sampling = SamplingTable().batch(rows, rows)
    with contextlib.ExitStack() as stack:
        stack.enter_context(jax.set_mesh(mesh))
        stack.enter_context(mock.patch("jax.default_backend", return_value=platform))
        if platform == "gpu":  # kernels ask for the card's compute capability
            stack.enter_context(mock.patch("jax.devices", return_value=devices))
        programs = step.compiled_programs(pages, bucket, sampling=sampling, embeds=embeds)
        report: dict[str, Any] = chain_report(programs, pages)
        sent = sum((collectives(program.as_text(), mesh.shape) for program in programs), Counter())
        report["collectives"] = [[*each, count] for each, count in sorted(sent.items())]
        for shape in config.encoder_shapes:
            encoder = step_report(step.compiled_encoder(pages, shape), pages)
            report["page_copies"] += encoder["page_copies"]
            report["aliased_arrays"] = min(report["aliased_arrays"], encoder["aliased_arrays"])
            report["encoder_temp_bytes"] = encoder["temp_bytes"]
        ids = jax.ShapeDtypeStruct((8,), np.int32)
        edits = [
            copy_pages_padded.lower(pages, 0, ids, ids, backend=backend),
            zero_pages_padded.lower(pages, 0, ids, backend=backend),
        ]
        for pair in plan.config.idle_groups[:1]:
            running, idle = (plan.config.kv_cache_groups[group_id].pool_id for group_id in pair)
            for source, destination, convert in ((running, idle, stored), (idle, running, loaded)):
                moves = (pages, source, destination, ids, ids)
                edits.append(move_states_padded.lower(*moves, convert=convert, backend=backend))
        done = [step_report(lowered.compile(), pages) for lowered in edits]
        report["page_copies"] += sum(edit["page_copies"] for edit in done)
        report["edit_aliased_bytes"] = min(edit["aliased_bytes"] for edit in done)
        report["edit_temp_bytes"] = max(edit["temp_bytes"] for edit in done)
    return report


def main(arguments: list[str]) -> int:
    """Exit status: 0, or 1 where the pages are copied."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("chip", choices=sorted([*CHIPS, *CARDS, "cpu"]))
    parser.add_argument("model", help="a name of configs/models")
    parser.add_argument("--layers", type=int, default=6, help="of the model")
    parser.add_argument("--each-kind", action="store_true", help="two layers, one of each kind that the model has")
    parser.add_argument("--shards", type=int, default=4, help="chips")
    parser.add_argument("--context", type=int, default=1, help="times so many chips, which share the tokens of a page")
    parser.add_argument("--tokens", type=int, default=256, help=f"of the step; of {_SEQUENCES}: it decodes")
    parser.add_argument(
        "--blocks", type=int, default=4096, help="so many that pages do not fit into VMEM, where XLA would copy them"
    )
    parser.add_argument("--block-size", type=int, default=64, help="but at least the model's own")
    parser.add_argument("--one-memory", action="store_true", help="all pools share the memory of so many blocks")
    parser.add_argument("--idle-states", metavar="DTYPE", help="cached states are kept so: int8, int16")
    parser.add_argument("--ring-tokens", type=int, metavar="N", help="of recurrent states")
    parser.add_argument("--kept", choices=("float8_e4m3fn", "int8"), help="projections are kept in so many bits")
    options = parser.parse_args(arguments)
    report = compile_step(
        options.chip,
        options.model,
        num_layers=None if options.each_kind else options.layers,
        num_shards=options.shards,
        num_tokens=options.tokens,
        num_blocks=options.blocks,
        block_size=options.block_size,
        num_context=options.context,
        one_memory=options.one_memory,
        idle_state_dtype=options.idle_states,
        ring_tokens=options.ring_tokens,
        kept_dtype=options.kept,
    )
    print(json.dumps(report))
    return int(not is_in_place(report))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
