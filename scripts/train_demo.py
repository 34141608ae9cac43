"""Trains the demo model that ships in kvjax/demo/model: a small Gemma-3-shaped decoder on Python's own documentation.

Flow:    demo_model/corpus.py -> BPE tokenizer -> packed rows -> [train_demo] -> Hugging Face folder

    python scripts/train_demo.py --out build/demo --steps 1100        # pip install 'kvjax[train]'

Every `--save-every` steps the folder is written anew, with the optimizer's state beside it (`--resume` goes on).
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvjax.demo.conversations import END_OF_TURN
from kvjax.models import Decoder, DenseAttention, ModelConfig, build_model
from kvjax.models.save import save_weights
from scripts.demo_model.corpus import demo_documents

ROW_TOKENS = 640
BATCH_ROWS = 4
VOCAB_SIZE = 2048
PAD, EOS, BOS = 0, 1, 2
MUON_LEARNING_RATE = 0.02
ADAM_LEARNING_RATE = 0.004
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "query_pre_attn_scalar": 64,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "sliding_window": 64,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": BOS,
    "torch_dtype": "bfloat16",
}


def train_tokenizer(documents: list[str]) -> Tokenizer:
    """A byte-level BPE whose first ids are padding, end of turn and beginning."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", END_OF_TURN, "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[np.ndarray]:  # int32[BATCH_ROWS, ROW_TOKENS + 1]
    """Endless batches; every row begins with a document and holds as many as fit."""
    random = np.random.default_rng(seed)
    rows: list[np.ndarray] = []
    while True:
        row: list[int] = []
        for encoding in tokenizer.encode_batch(demo_documents(int(random.integers(2**31)))):
            row += encoding.ids
            if len(row) > ROW_TOKENS:
                rows.append(np.asarray(row[: ROW_TOKENS + 1], np.int32))
                row = []
            if len(rows) == BATCH_ROWS:
                yield np.stack(rows)
                rows = []


def make_optimizer(params: dict[str, jax.Array], steps: int) -> optax.GradientTransformation:
    """Muon for matrices, Adam for embeddings and norms; a short warm-up, then linear decay to nothing."""

    def schedule(peak: float) -> optax.Schedule:
        warmup = min(50, steps // 10 + 1)
        pieces = [optax.linear_schedule(0.0, peak, warmup), optax.linear_schedule(peak, 0.0, steps - warmup)]
        return optax.join_schedules(pieces, [warmup])

    labels = {name: "muon" if name.endswith("kernel") else "adam" for name in params}
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.partition(
            {
                "muon": optax.contrib.muon(schedule(MUON_LEARNING_RATE), weight_decay=0.01),
                "adam": optax.adam(schedule(ADAM_LEARNING_RATE), b2=0.95),
            },
            labels,
        ),
    )


def split_params(module: Decoder) -> tuple[dict[str, jax.Array], Any]:
    """Parameters by dotted path, and what puts such a dict back into a module."""
    graph, state = nnx.split(module)
    paths = [path for path, _ in nnx.to_flat_state(state)]
    params = {".".join(map(str, path)): param[...] for path, param in nnx.to_flat_state(state)}

    def join(values: dict[str, jax.Array]) -> Decoder:
        flat = [(path, nnx.Param(values[".".join(map(str, path))])) for path in paths]
        return nnx.merge(graph, nnx.from_flat_state(flat))

    return params, join


def make_step(join: Any, optimizer: optax.GradientTransformation) -> Any:
    """The jitted training step: (params, optimizer state, rows) -> the same and the mean loss in nats."""

    def loss_of(params: dict[str, jax.Array], rows: jax.Array) -> jax.Array:
        module = join(params)
        positions = jnp.arange(ROW_TOKENS)

        def row_loss(row: jax.Array) -> jax.Array:
            logits = module.logits(module(row[:-1], positions, DenseAttention()))
            return optax.softmax_cross_entropy_with_integer_labels(logits, row[1:]).mean()

        return jax.vmap(row_loss)(rows).mean()

    def step(params: Any, opt_state: Any, rows: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, rows)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def save_folder(out: Path, module: Decoder, tokenizer: Tokenizer) -> None:
    """The model as a Hugging Face folder."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"), pretty=False)
    special = {"pad_token": "<pad>", "eos_token": END_OF_TURN, "bos_token": "<bos>"}
    files = {
        "config.json": CONFIG,
        "generation_config.json": {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            **special,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    save_weights(module, out, "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--steps", type=int, default=1100, help="optimizer steps (default 1100)")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default 100)")
    parser.add_argument("--resume", action="store_true", help="go on from the state in --out")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    else:
        tokenizer = train_tokenizer(demo_documents(args.seed))
    module = build_model(ModelConfig.from_dict(CONFIG), rngs=nnx.Rngs(args.seed))
    params, join = split_params(module)
    optimizer = make_optimizer(params, args.steps)
    opt_state, done = optimizer.init(params), 0
    state_file = args.out / "train_state.pickle"
    if args.resume:
        params, opt_state, done = pickle.loads(state_file.read_bytes())
    print(f"{sum(p.size for p in params.values()):,} parameters, {args.steps - done} steps to go", flush=True)
    step, losses, started = make_step(join, optimizer), [], time.monotonic()
    for number, rows in enumerate(batches(tokenizer, args.seed + done), start=done + 1):
        params, opt_state, loss = step(params, opt_state, jnp.asarray(rows))
        losses.append(float(loss))
        if number % 20 == 0 or number == args.steps:
            seconds = time.monotonic() - started
            speed = (number - done) * rows.size / seconds
            print(f"step {number}: loss {np.mean(losses[-20:]):.3f}, {speed:,.0f} tokens/s", flush=True)
        if number % args.save_every == 0 or number >= args.steps:
            save_folder(args.out, join(params), tokenizer)
            state_file.write_bytes(pickle.dumps((jax.device_get(params), jax.device_get(opt_state), number)))
        if number >= args.steps:
            return


if __name__ == "__main__":
    main()
