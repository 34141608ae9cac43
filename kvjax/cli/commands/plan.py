"""`kvjax plan`: pools, groups, bytes, blocks and how many requests fit, as tables and words, and as JSON.

Flow:    arguments over a deployment's TOML -> [run] -> kvjax.planning.plan_kv_cache -> stdout, --json FILE
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from math import gcd, lcm

from kvjax.cli.help_text import Example, default_text
from kvjax.cli.options.fields import add_fields, add_option, read_fields
from kvjax.cli.options.replay import add_load_arguments, add_reading_arguments, reading_of
from kvjax.cli.options.types import int_list, length
from kvjax.cli.running.output_files import STANDARD, input_file, output_file, write_json
from kvjax.configs import Deployment, known_deployments, known_models, load_deployment, load_model_config
from kvjax.core import KVCacheManager, KVCacheSpec
from kvjax.errors import ConfigError
from kvjax.models.config import ModelConfig
from kvjax.planning import CacheShape, KVCachePlan, Load, Parallelism, plan_kv_cache
from kvjax.planning.load import USUAL_RUNNING, USUAL_TOKENS
from kvjax.planning.plan import DEFAULT_MAX_IN_FLIGHT_TOKENS
from kvjax.planning.report import default_lengths, plan_json, plan_table, plan_words
from kvjax.planning.states.deployed_specs import deployed_specs
from kvjax.planning.states.state_blocks import STATE_BLOCK_SIZE
from kvjax.replay import read_trace
from kvjax.replay.requests.trace import cut_tails
from kvjax.replay.working_set import load_of

MODELS_OWN = "the model's"
CACHE = (
    "memory_bytes",
    "num_blocks",
    "block_size",
    "dtype",
    "hybrid",
    "one_memory",
    "idle_state_dtype",
    "state_block_size",
)
DEVICES = ("tensor_parallel", "decode_context_parallel", "prefill_context_parallel", "data_parallel")
EXAMPLES = (
    Example("See what fits in 40 GiB of a device.", "kvjax plan gemma-3-27b --memory 40GiB --max-model-len 32k"),
    Example(
        "Plan two devices that share the heads, and keep the plan.",
        "kvjax plan llama-3-8b --memory 20GB --tensor-parallel 2 --lengths 1k,8k --json plan.json",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `kvjax plan`; a deployment fills those that are not given."""
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help=f"Plan for this model: {', '.join(known_models())}, a Hugging Face folder, or a config.json.",
    )
    parser.add_argument(
        "--deployment",
        metavar="NAME|FILE",
        help="Take what is not given from a deployment, in TOML. Those of a name are "
        f"{', '.join(known_deployments())}.",
    )
    cache = parser.add_argument_group("cache")
    add_fields(cache, Deployment, *CACHE)
    add_option(cache, "platform", shown="gpu")
    add_fields(parser.add_argument_group("devices"), Deployment, *DEVICES)
    requests = parser.add_argument_group("requests")
    requests.add_argument(
        "--max-model-len",
        type=length,
        metavar="N",
        help="Plan for requests of at most N tokens. auto takes the longest of the model's that fits in --memory."
        f"{default_text(MODELS_OWN)}",
    )
    add_option(requests, "max_num_seqs", shown=USUAL_RUNNING)
    add_option(requests, "max_in_flight_tokens", shown=DEFAULT_MAX_IN_FLIGHT_TOKENS)
    add_load_arguments(requests, f"{USUAL_TOKENS:,}")
    trace = parser.add_argument_group("trace")
    trace.add_argument(
        "--trace",
        type=input_file,
        metavar="TRACE",
        help="Balance several pools for the requests of this file, as kvjax replay does. - reads standard input.",
    )
    add_reading_arguments(trace)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--lengths",
        type=int_list,
        metavar="N,N,...",
        help=f"Say how many requests of N tokens fit.{default_text('powers of four')}",
    )
    output.add_argument("--json", type=output_file, metavar="FILE", help=f"Write the plan as JSON. {STANDARD}")


def run(args: argparse.Namespace) -> int:
    """Prints the plan; 0.

    Raises:
        ConfigError: no model, a bad model or deployment, or a trace where nothing is to be balanced for it.
        TraceError: a trace of an unknown form, or a bad line of it.
        MemoryBudgetError: the memory holds not even one request of the planned length.
        OSError: the JSON cannot be written.
    """
    deployment = _deployment(args)
    if deployment.model is None:
        raise ConfigError(f"expected a MODEL or a deployment that names one; shipped: {', '.join(known_models())}")
    model = load_model_config(deployment.model)
    if deployment.max_model_len == 0:
        deployment = replace(deployment, max_model_len=_longest(model, deployment))
    plan = _plan(model, deployment, _trace_load(args, model, deployment))
    lengths = args.lengths or default_lengths(plan.max_model_len)
    parts = [_headline(deployment, model, plan), plan_table(plan, lengths), plan_words(plan)]
    if plan.max_model_len > model.max_model_len:
        parts[-1] += f"\nNote: the model's own config says at most {model.max_model_len:,} tokens."
    print("\n\n".join(parts))
    _make_manager(plan)
    if args.json is not None:
        values = {"model": deployment.model, **plan_json(plan, lengths)}
        write_json(args.json, values)
    return 0


def _make_manager(plan: KVCachePlan) -> KVCacheManager:
    """The manager of the planned cache, with the defaults: it warns where no prompt can ever hit."""
    return KVCacheManager(
        plan.config,
        plan.max_model_len,
        gcd(*(group.spec.block_size for group in plan.groups)),
        dcp_world_size=plan.parallel.decode_context,
        pcp_world_size=plan.parallel.prefill_context,
        max_in_flight_tokens=plan.max_in_flight_tokens,
    )


def _deployment(args: argparse.Namespace) -> Deployment:
    """The named deployment with the given arguments over it; one way to size or to balance replaces the other."""
    given = {name: value for name, value in read_fields(args, Deployment).items() if value is not None}
    base = Deployment() if args.deployment is None else load_deployment(args.deployment)
    if "memory_bytes" in given or "num_blocks" in given:
        base = replace(base, memory_bytes=None, num_blocks=None)
    if "request_len" in given or "tokens_per_checkpoint" in given:
        base = replace(base, request_len=None, tokens_per_checkpoint=None)
    return replace(base, **given)


def _parallel(deployment: Deployment) -> Parallelism:
    return Parallelism(
        tensor=deployment.tensor_parallel or 1,
        data=deployment.data_parallel or 1,
        decode_context=deployment.decode_context_parallel or 1,
        prefill_context=deployment.prefill_context_parallel or 1,
    )


def _longest(model: ModelConfig, deployment: Deployment) -> int:
    """The largest `max_model_len` that the memory holds, at most the model's; 1 if none does, for the error of it."""
    if deployment.memory_bytes is None:
        raise ConfigError("expected --memory with --max-model-len auto, got none")
    in_flight = deployment.max_in_flight_tokens or DEFAULT_MAX_IN_FLIGHT_TOKENS
    return _shape(model, deployment).longest_request(deployment.memory_bytes, model.max_model_len, in_flight) or 1


def _specs(model: ModelConfig, deployment: Deployment) -> dict[str, KVCacheSpec]:
    return deployed_specs(
        model.kv_cache_specs(deployment.block_size, deployment.dtype),
        state_block_size=deployment.state_block_size or STATE_BLOCK_SIZE,
        idle_state_dtype=deployment.idle_state_dtype,
    )


def _shape(model: ModelConfig, deployment: Deployment) -> CacheShape:
    return CacheShape.of(
        _specs(model, deployment),
        platform=deployment.platform or "gpu",
        parallel=_parallel(deployment),
        hybrid=deployment.hybrid is not False,
    )


def _trace_load(args: argparse.Namespace, model: ModelConfig, deployment: Deployment) -> Load | None:
    """What the pools are to be balanced for by the trace; None: there is none."""
    if args.trace is None:
        return None
    if deployment.memory_bytes is None or deployment.request_len or deployment.tokens_per_checkpoint:
        raise ConfigError(
            "expected --trace with --memory, without --tokens-per-checkpoint and --request-len: it says how to share "
            "the memory"
        )
    trace = read_trace(args.trace, None, reading_of(args), print)
    if args.whole_blocks:
        trace = cut_tails(trace)
    return load_of(
        trace,
        _shape(model, deployment),
        deployment.memory_bytes,
        alignment=lcm(*(spec.block_size for spec in _specs(model, deployment).values())),
        max_model_len=deployment.max_model_len or model.max_model_len,
        max_in_flight_tokens=deployment.max_in_flight_tokens or DEFAULT_MAX_IN_FLIGHT_TOKENS,
        max_running=deployment.max_num_seqs or USUAL_RUNNING,
        has_answers=True,
    )


def _shares_memory(deployment: Deployment) -> bool:
    """Whether kinds of unlike pages share the memory: as told, else where bytes are given and no length to split by."""
    if deployment.one_memory is None:
        return deployment.memory_bytes is not None and deployment.request_len is None
    return deployment.one_memory


def _plan(model: ModelConfig, deployment: Deployment, load: Load | None) -> KVCachePlan:
    if load is None and deployment.request_len is None:
        load = Load(deployment.tokens_per_checkpoint or USUAL_TOKENS, deployment.max_num_seqs or USUAL_RUNNING)
    if deployment.memory_bytes is None and deployment.num_blocks is None:
        raise ConfigError("expected --memory or --num-blocks, got none")
    return plan_kv_cache(
        _specs(model, deployment),
        max_model_len=deployment.max_model_len or model.max_model_len,
        memory_bytes=deployment.memory_bytes,
        num_blocks=deployment.num_blocks,
        max_in_flight_tokens=deployment.max_in_flight_tokens or DEFAULT_MAX_IN_FLIGHT_TOKENS,
        request_len=deployment.request_len,
        load=load,
        platform=deployment.platform or "gpu",
        parallel=_parallel(deployment),
        hybrid=deployment.hybrid is not False,
        one_memory=_shares_memory(deployment),
        shared_layers=model.shared_layers,
    )


def _headline(deployment: Deployment, model: ModelConfig, plan: KVCachePlan) -> str:
    """What is planned, in one line."""
    parts = [
        f"{deployment.model}: {model.num_layers} layers",
        model.cache_words,
        deployment.dtype or model.cache_dtype,
        plan.platform if plan.parallel.num_devices == 1 else f"{plan.parallel.num_devices} x {plan.platform}",
        f"requests of up to {plan.max_model_len:,} tokens",
    ]
    return ", ".join(parts)
