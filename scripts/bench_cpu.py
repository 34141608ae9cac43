"""Times the engine on one CPU core next to Hugging Face `generate`: the demo model and Llamas of 20M parameters.

Flow:    models, prompts -> kvjax LLMEngine and Hugging Face in turns -> [bench_cpu] -> table, `--json FILE`

    python scripts/bench_cpu.py [--hf-python PYTHON]

Both take the same float32 weights and the same prompts of one length, greedy, all requests at once, each in a process
pinned to one core. Times are process times. A run asks each engine for one new token of every prompt (prefill), then
for all of them; what the rest takes is decode. `demo+lookup` drafts by prompt lookup, where it may pay. Rows of
tokens are compared; two that part are a near tie where Hugging Face's two best logits are within 1e-3 there. The
interpreter of `--hf-python` needs torch and transformers; without them kvjax runs alone. With `--onednn` XLA hands
kvjax's products to oneDNN, which torch uses too; programs compiled so cannot be kept in jax's persistent cache.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

# Before jax is imported: one thread for the products of XLA, and no accelerator.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

NEAR_TIE = 1e-3  # logits
ONEDNN: dict[str, bool | str] = {
    "xla_cpu_use_onednn": True,
    "xla_cpu_experimental_onednn_fusion_type": "LIBRARY_FUSION_TYPE_DOT",
}
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
# Llama 2's vocabulary and the width of the stories15M checkpoint, with more layers; or few wide layers.
LLAMAS = {
    "llama-20m": _LLAMA
    | {
        "vocab_size": 32000,
        "hidden_size": 288,
        "intermediate_size": 768,
        "num_hidden_layers": 11,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
    },
    "llama-20m-wide": _LLAMA
    | {
        "vocab_size": 8192,
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
MODELS = ("demo", "demo+lookup", *LLAMAS)


@dataclass(frozen=True)
class Sizes:
    """What every request asks for, and how the engine is cut."""

    batch: int
    prompt: int  # tokens
    new: int  # tokens
    chunk: int  # most tokens of a step
    drafts: int  # of a request and step, where the engine looks prompts up
    least_gain: float = 0.0  # of drafts: `SpeculativeConfig.least_gain`
    onednn: bool = False  # whether XLA hands products to oneDNN


@dataclass(frozen=True)
class Times:
    """Process seconds of each run."""

    prefill: list[float] = field(default_factory=list)  # one new token a prompt
    total: list[float] = field(default_factory=list)

    @property
    def prefill_s(self) -> float:
        """Median."""
        return median(self.prefill)

    @property
    def decode_s(self) -> float:
        """Median of what all tokens but the first took."""
        return median(total - prefill for total, prefill in zip(self.total, self.prefill, strict=True))

    @property
    def total_s(self) -> float:
        """Median."""
        return median(self.total)

    @property
    def spread(self) -> float:
        """Slowest run over fastest."""
        return max(self.total) / min(self.total)


@dataclass(frozen=True)
class Result:
    """Both engines on one model; `baseline` is None without Hugging Face."""

    model: str
    num_parameters: int
    times: Times
    baseline: Times | None
    num_rows: int = 0  # rows of tokens compared
    num_equal: int = 0
    num_near_ties: int = 0  # rows that part at a near tie

    @property
    def ratio(self) -> float | None:
        """Tokens a CPU second of kvjax over those of Hugging Face."""
        return None if self.baseline is None else self.baseline.total_s / self.times.total_s


# (prompts, new tokens of each) -> new tokens
Generate = Callable[[Sequence[Sequence[int]], int], list[list[int]]]


def pin(core: int) -> None:
    """Keeps this process, and those that it starts, on one core, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})


def demo_prompts(sizes: Sizes) -> list[list[int]]:
    """Conversations of the demo, each after the others as often as fill a prompt."""
    from kvjax.demo import demo_model_path
    from kvjax.demo.conversations import demo_requests
    from kvjax.models.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(demo_model_path())
    assert tokenizer is not None
    texts = [tokenizer.encode(request.prompt) for request in demo_requests()]
    prompts = []
    for row in range(sizes.batch):
        tokens: list[int] = []
        for earlier in range(len(texts)):
            tokens = texts[(row - earlier) % len(texts)] + tokens
        prompts.append((tokens * (sizes.prompt // len(tokens) + 1))[-sizes.prompt :])
    return prompts


def random_prompts(sizes: Sizes, vocab_size: int) -> list[list[int]]:
    """Token ids without meaning, from a seed."""
    import numpy as np

    return np.random.default_rng(0).integers(3, vocab_size, (sizes.batch, sizes.prompt)).tolist()


def make_llama(folder: Path, config: dict[str, Any]) -> Path:
    """Writes a Llama of random weights, from a seed."""
    from flax import nnx

    from kvjax.models.config import ModelConfig
    from kvjax.models.registry import build_model
    from kvjax.models.save import save_weights

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    parsed = ModelConfig.from_folder(folder)
    save_weights(build_model(parsed, dtype="float32", rngs=nnx.Rngs(0)), folder, "float32")
    return folder


def make_engine(folder: Path, sizes: Sizes, *, lookup: bool) -> tuple[Generate, int]:
    """An engine of ours, warmed up, and how many parameters its model has."""
    import jax
    from flax import nnx

    from kvjax.engine import EngineConfig, LLMEngine, SamplingParams
    from kvjax.engine.speculation import SpeculativeConfig

    block_size = 16
    length = sizes.prompt + sizes.new
    config = EngineConfig(
        block_size=block_size,
        num_blocks=4 * sizes.batch * (length // block_size + 2) + 1,
        max_model_len=length,
        max_num_seqs=sizes.batch,
        max_num_batched_tokens=max(sizes.chunk, sizes.batch),
        enable_prefix_caching=False,  # every run computes every prompt, as the baseline does
        max_buckets=8,
        speculative=SpeculativeConfig(num_drafts=sizes.drafts, least_gain=sizes.least_gain) if lookup else None,
        compiler_options=ONEDNN if sizes.onednn else None,
    )
    engine = LLMEngine.from_folder(folder, config, dtype="float32")
    engine.warmup()

    def generate(prompts: Sequence[Sequence[int]], num_new_tokens: int) -> list[list[int]]:
        params = SamplingParams(max_tokens=num_new_tokens, temperature=0.0, ignore_eos=True)
        return [result.output_token_ids.tolist() for result in engine.generate(prompts, params)]

    parameters = nnx.state(engine.model.module, nnx.Param)
    return generate, sum(leaf.size for leaf in jax.tree.leaves(parameters))


def compare(model: str, folder: Path, prompts: list[list[int]], sizes: Sizes, python: str | None, runs: int) -> Result:
    """Runs both engines in turns; the first run of each is not counted."""
    from kvjax.bench.hugging_face import HuggingFaceProcess

    generate, num_parameters = make_engine(folder, sizes, lookup=model.endswith("+lookup"))
    ours, theirs = Times(), Times()
    with ExitStack() as stack:
        baseline = None if python is None else stack.enter_context(HuggingFaceProcess(folder, python=python))
        for run in range(runs + 1):
            for num_new, times in ((1, "prefill"), (sizes.new, "total")):
                start = time.process_time()
                tokens = generate(prompts, num_new)
                seconds = time.process_time() - start
                other = None if baseline is None else baseline.generate(prompts, num_new)
                if run:
                    getattr(ours, times).append(seconds)
                if run and other is not None:
                    getattr(theirs, times).append(other.cpu_s)
        if baseline is None:
            return Result(model, num_parameters, ours, None)
        wanted = baseline.generate(prompts, sizes.new, margins=True)
    equal, ties = 0, 0
    for mine, reference, margins in zip(tokens, wanted.tokens, wanted.margins, strict=True):
        parted = next((i for i, (x, y) in enumerate(zip(mine, reference, strict=True)) if x != y), None)
        equal += parted is None
        ties += parted is not None and margins[parted] < NEAR_TIE
    return Result(model, num_parameters, ours, theirs, len(tokens), equal, ties)


def lines(result: Result, sizes: Sizes) -> list[str]:
    """The table's lines of one model: tokens a CPU second of each part, and the ratio."""
    counts = {
        "prefill": sizes.batch * sizes.prompt,
        "decode": sizes.batch * (sizes.new - 1),
        "total": sizes.batch * (sizes.prompt + sizes.new),
    }
    text = []
    for part, count in counts.items():
        ours = getattr(result.times, f"{part}_s")
        line = f"{result.model:14} {part:8} {count / ours:14,.0f}"
        if result.baseline is not None:
            theirs = getattr(result.baseline, f"{part}_s")
            line += f" {count / theirs:14,.0f} {theirs / ours:8.2f}x"
        text.append(line)
    if result.baseline is not None:
        other = result.num_rows - result.num_equal - result.num_near_ties
        text.append(
            f"{'':14} {result.num_parameters:,} parameters; equal greedy tokens in {result.num_equal} of "
            f"{result.num_rows} rows, {result.num_near_ties} part at a near tie, {other} elsewhere; slowest run over "
            f"fastest {result.times.spread:.2f} and {result.baseline.spread:.2f}"
        )
    return text


def main(arguments: list[str] | None = None) -> int:
    """Measures, prints, writes; returns the exit status."""
    from kvjax.cli.output_files import output_file

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=output_file, metavar="FILE", help="write the results as JSON")
    parser.add_argument("--only", choices=MODELS, help="this model alone")
    parser.add_argument("--runs", type=int, default=5, help="runs of each engine (default %(default)s)")
    parser.add_argument("--batch", type=int, default=16, help="requests at once (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of each prompt (default %(default)s)")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each (default %(default)s)")
    parser.add_argument("--chunk", type=int, default=512, help="most tokens of a step (default %(default)s)")
    parser.add_argument("--drafts", type=int, default=4, help="most drafts of prompt lookup (default %(default)s)")
    parser.add_argument(
        "--least-gain", type=float, default=0.3, help="right drafts a request that a step expects (default %(default)s)"
    )
    parser.add_argument("--onednn", action="store_true", help="products by oneDNN (default: by XLA's own choice)")
    parser.add_argument(
        "--core", type=int, default=max(range(os.cpu_count() or 1)), help="the core (default: the last)"
    )
    parser.add_argument(
        "--hf-python", default=sys.executable, metavar="PYTHON", help="interpreter with torch and transformers"
    )
    options = parser.parse_args(arguments)
    for name, least in (("runs", 1), ("batch", 1), ("prompt", 1), ("new", 2), ("chunk", 1), ("drafts", 1)):
        if getattr(options, name) < least:
            parser.error(f"expected --{name} of at least {least}, got {getattr(options, name)}")
    pin(options.core)

    from kvjax.demo import demo_model_path
    from kvjax.errors import MissingExtraError

    sizes = Sizes(
        options.batch,
        options.prompt,
        options.new,
        options.chunk,
        options.drafts,
        options.least_gain,
        options.onednn,
    )
    python = options.hf_python
    print(f"{'model':14} {'part':8} {'kvjax tok/s':>14} {'HF tok/s':>14} {'ratio':>9}", flush=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for model in MODELS if options.only is None else (options.only,):
            if model in LLAMAS:
                path = make_llama(Path(folder) / model, LLAMAS[model])
                prompts = random_prompts(sizes, LLAMAS[model]["vocab_size"])
            else:
                path, prompts = demo_model_path(), demo_prompts(sizes)
            try:
                results.append(compare(model, path, prompts, sizes, python, options.runs))
            except MissingExtraError as error:
                print(f"{error}; kvjax alone:", flush=True)
                python = None
                results.append(compare(model, path, prompts, sizes, None, options.runs))
            print("\n".join(lines(results[-1], sizes)), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
