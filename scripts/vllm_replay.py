"""A trace through vLLM's own KV cache manager with its own defaults, one prompt at a time, for models and memory sizes.

Usage:   DIR/python scripts/vllm_replay.py TRACE --models A,B --memory BYTES,BYTES --json FILE, by the wrapper that
         vllm_conformance.sh writes; `kvjax replay --compare-defaults --beside` runs it
Flow:    trace, kvjax's specs of a model -> vLLM's specs and groups -> [vLLM's manager] -> hit tokens, a JSON file
Source:  vLLM 0.33.0 v1/core/kv_cache_planning.py, sched/scheduler.py; platforms/interface.py (_align_hybrid_block_size)

`--kvjax POLICY` has kvjax's manager in the place of vLLM's, as `kvjax.adapters.vllm.install(policy=POLICY)` puts it.

The calls are those of vLLM's scheduler and of `kvjax replay --serial`. A prompt is looked up, allocated whole (or in
steps of `--max-num-batched-tokens`; with recurrent states in those that vLLM's scheduler makes of it) and freed. Blocks
are 16 tokens; with recurrent states as many as give attention pages of a state's size, and states are padded to these
pages.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bench_host_cases.vllm_side import make_request  # sets vLLM's platform, so it comes first

# isort: split
import torch
import vllm
from vllm.config import CacheConfig
from vllm.v1 import kv_cache_interface
from vllm.v1.core import kv_cache_manager
from vllm.v1.core.kv_cache_planning import _get_kv_cache_groups_uniform_page_size
from vllm.v1.core.sched.scheduler import Scheduler

from kvjax.adapters.vllm import install
from kvjax.configs import load_model_config
from kvjax.core.spec import KVCacheSpec

ATTENTION = {
    "FullAttentionSpec": ("num_kv_heads", "head_size"),
    "SlidingWindowSpec": ("num_kv_heads", "head_size", "sliding_window"),
    "ChunkedLocalAttentionSpec": ("num_kv_heads", "head_size", "attention_chunk_size"),
    "MLAAttentionSpec": ("head_size",),
}
TRACE_BLOCK = 512  # tokens of a hash id


def translate(spec: KVCacheSpec, block_size: int, page_bytes: int | None) -> Any:
    """vLLM's spec of a layer.

    Raises:
        ValueError: a kind that this script does not translate.
    """
    name, values = type(spec).__name__, vars(spec)
    if name == "MambaSpec":
        dtypes = tuple(getattr(torch, dtype) for dtype in values["dtypes"])
        made = kv_cache_interface.MambaSpec(block_size, values["shapes"], dtypes, mamba_cache_mode="align")
        return replace(made, page_size_padded=page_bytes)
    if name not in ATTENTION or values.get("tokens_per_state", 1) != 1:
        raise ValueError(f"expected layers of {', '.join(ATTENTION)} or MambaSpec, got {spec}")
    fields = {"num_kv_heads": 1} | {field: values[field] for field in ATTENTION[name]}
    return getattr(kv_cache_interface, name)(block_size, dtype=getattr(torch, values["dtype"]), **fields)


def specs_of(model: str) -> dict[str, Any]:
    """vLLM's specs of a model's layers, all with pages of one size."""
    ours = load_model_config(model).kv_cache_specs()
    states = [spec for spec in ours.values() if spec.state_pages is not None]
    block_size = max(spec.block_size for spec in states or ours.values())  # kvjax's states have vLLM's block size
    attention = {name: translate(spec, block_size, None) for name, spec in ours.items() if spec.state_pages is None}
    page_bytes = max(spec.page_size_bytes for spec in attention.values())
    return {name: attention.get(name) or translate(spec, block_size, page_bytes) for name, spec in ours.items()}


class Replay:
    """A manager for one model and memory size, with vLLM's defaults but for `prefix_match_unit`."""

    def __init__(
        self, model: str, memory_bytes: int, max_model_len: int, prefix_match_unit: int | None, step_tokens: int
    ) -> None:
        groups = _get_kv_cache_groups_uniform_page_size(specs_of(model))
        page_bytes = groups[0].kv_cache_spec.page_size_bytes
        self.num_blocks = memory_bytes // (page_bytes * max(len(group.layer_names) for group in groups))
        config = kv_cache_interface.KVCacheConfig(
            self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=CacheConfig().prefix_cache_retention_interval,
        )
        sizes = [group.kv_cache_spec.block_size for group in groups]
        self.block_size, self.hash_block_size = math.lcm(*sizes), prefix_match_unit or math.gcd(*sizes)
        self.manager = kv_cache_manager.KVCacheManager(config, max_model_len, self.block_size, self.hash_block_size)
        self.step_tokens = step_tokens
        self.scheduler = self._stand_in() if config.has_mamba_layers else None

    def _stand_in(self) -> Any:
        """What `Scheduler._mamba_block_aligned_split` reads of a scheduler."""
        return SimpleNamespace(
            cache_config=SimpleNamespace(block_size=self.block_size),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            max_num_scheduled_tokens=self.step_tokens,
            use_eagle_block_drop=False,
            num_hash_lookahead_tokens=0,
            mamba_partial_cache_hit=self.manager.coordinator.enable_partial_hash_hits,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
            mamba_shared_prefix_checkpoint=False,
        )

    def serve(self, name: str, line: dict[str, Any]) -> int | None:
        """Hit tokens of a prompt; None: it does not fit."""
        num_tokens = line["input_length"]
        request = make_request(name, [0] * num_tokens)
        request.block_hashes[:] = self._hashes(line["hash_ids"], num_tokens)
        blocks, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        given: tuple[Any, ...] = (hit, blocks)
        done = hit
        while done < num_tokens:
            step = self._step(request, min(num_tokens - done, self.step_tokens), *given[:1])
            self.manager.new_step_starts()
            if self.manager.allocate_slots(request, step, *given) is None:
                self.manager.free(request)
                return None
            self.manager.block_pool.free_blocks(self.manager.take_kv_cache_block_copies()[1])
            given, done = (), done + step
            request.num_computed_tokens = done
        self.manager.free(request)
        return hit

    def _step(self, request: Any, num_left: int, num_hit: int = 0) -> int:
        if self.scheduler is None:
            return num_left
        return Scheduler._mamba_block_aligned_split(self.scheduler, request, num_left, num_hit)

    def _hashes(self, hash_ids: list[int], num_tokens: int) -> Iterator[bytes]:
        """Hashes of full hash blocks: the id of the last token's trace block stands for all before it."""
        for end in range(self.hash_block_size, num_tokens + 1, self.hash_block_size):
            yield hash_ids[(end - 1) // TRACE_BLOCK].to_bytes(16, "big") + end.to_bytes(16, "big")


def replay(
    model: str, memory_bytes: int, lines: list[dict[str, Any]], unit: int | None, step_tokens: int
) -> dict[str, Any]:
    """A row of the result."""
    run = Replay(model, memory_bytes, max(line["input_length"] for line in lines) + 1, unit, step_tokens)
    hits = [run.serve(f"{i}", line) for i, line in enumerate(lines)]
    served = [(hit, line["input_length"]) for hit, line in zip(hits, lines, strict=True) if hit is not None]
    variant = "" if unit is None else f", unit {unit}"
    under = "kvjax under " if type(run.manager).__module__.startswith("kvjax") else ""
    return {
        "name": f"{under}vLLM {vllm.__version__}{variant}",
        "model": model,
        "memory_bytes": memory_bytes,
        "prefix_match_unit": unit,
        "num_blocks": run.num_blocks,
        "block_size": run.block_size,
        "hit_tokens": sum(hit for hit, _ in served),
        "prompt_tokens": sum(length for _, length in served),
        "refused_requests": len(lines) - len(served),
    }


def main() -> None:
    """Prints and writes a row for each model and memory size; with states, one more for hits inside their blocks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path, help="JSON lines of input_length and hash_ids of 512 tokens (Mooncake)")
    parser.add_argument("--models", required=True, help="names of kvjax, separated by commas")
    parser.add_argument("--memory", required=True, help="bytes, separated by commas")
    parser.add_argument("--json", type=Path, required=True, help="write the rows there")
    parser.add_argument("--max-num-batched-tokens", type=int, default=1 << 30, help="of a step; left out: no limit")
    parser.add_argument(
        "--kvjax", metavar="POLICY", help="with kvjax's manager: stack or kvjax (no hits inside blocks)"
    )
    options = parser.parse_args()
    if options.kvjax is not None:
        install(policy=options.kvjax)
    lines = [json.loads(line) for line in options.trace.read_text().splitlines()]
    rows: list[dict[str, Any]] = []
    for model in options.models.split(","):
        has_states = any(spec.state_pages is not None for spec in load_model_config(model).kv_cache_specs().values())
        for memory_bytes in map(int, options.memory.split(",")):
            for unit in (None, 16) if has_states and options.kvjax is None else (None,):
                try:
                    rows.append(replay(model, memory_bytes, lines, unit, options.max_num_batched_tokens))
                except ValueError as error:
                    print(f"{model}: {error}", flush=True)
                else:
                    print(json.dumps(rows[-1]), flush=True)
    options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
