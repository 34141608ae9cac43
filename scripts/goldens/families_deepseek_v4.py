"""DeepSeek V4: windows, compressed entries of 4 and 128 tokens, an indexer; dense and sparse choice of entries.

Source:  transformers models/deepseek_v4: DeepseekV4Indexer, DeepseekV4IndexerScorer
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import transformers

from scripts.goldens.family import TINY, Arrays, Family, TokenInputs, rope

LAYERS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2
PROMPT_LENGTHS = (45, 140, 200, 37, 130, 98)  # tokens; the last one's continuation crosses 128
HUB_NAMES = (  # the other model keeps the names that transformers writes, so that both are read in tests
    (r"^model\.", ""),
    (r"^embed_tokens\.", "embed."),
    (r"^hc_head\.hc_", "hc_head_"),
    (r"attn\.norm\.", "attn.kv_norm."),
)
TOP_K = 6  # entries, of up to 50


def outputs_of(model: torch.nn.Module, end: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """What the modules whose names end with `end` return in a pass over one sequence, in the order of layers."""
    outputs: list[torch.Tensor] = []
    modules = [module for name, module in model.named_modules() if name.endswith(end)]
    hooks = [module.register_forward_hook(lambda *call: outputs.append(call[-1][0])) for module in modules]
    with torch.no_grad():
        model(**arguments, use_cache=False)
    for hook in hooks:
        hook.remove()
    return outputs


class IndexerInputs(TokenInputs):
    """Tokens; beside them what the indexers of a pass over the prompt compute."""

    def extras(self, model: torch.nn.Module, prompt: np.ndarray, number: int) -> Arrays:
        """
        index_scores  float32[num_indexers, num_tokens, num_entries], -inf for entries that a token cannot see
        indices       int32[num_indexers, num_tokens, TOP_K] ascending, -1 for those that there are too few entries for
        """
        scores = outputs_of(model, ".scorer", self.arguments(model, prompt, {}, 0))
        indices = outputs_of(model, ".indexer", self.arguments(model, prompt, {}, 0))
        found = np.sort(torch.stack(indices).numpy().astype(np.int32), axis=-1)
        entries = np.arange(scores[0].shape[-1])
        seen = entries < (np.arange(len(prompt))[:, None] + 1) // 4
        return {"index_scores": np.where(seen, torch.stack(scores).float().numpy(), -np.inf), "indices": found}


def draw_experts_of_tokens(model: torch.nn.Module) -> None:
    """The experts of every token in the layers that look them up."""
    for name, table in model.named_buffers():
        if name.endswith("tid2eid"):
            num_experts = model.config.n_routed_experts
            table.copy_(torch.rand(table.shape[0], num_experts).argsort(dim=-1)[:, : table.shape[1]])


def v4(index_topk: int) -> transformers.PreTrainedConfig:
    sizes: dict[str, Any] = TINY | {"hidden_size": 32, "num_key_value_heads": 1}
    del sizes["intermediate_size"]
    yarn = rope("yarn", factor=8.0, beta_fast=8.0, beta_slow=1.0, original_max_position_embeddings=64)
    return transformers.DeepseekV4Config(
        **sizes,
        head_dim=16,
        qk_rope_head_dim=8,
        num_hidden_layers=len(LAYERS),
        layer_types=LAYERS,
        mlp_layer_types=["hash_moe"] * 2 + ["moe"] * 4,
        moe_intermediate_size=16,
        n_routed_experts=6,
        num_experts_per_tok=2,
        q_lora_rank=24,
        o_groups=2,
        o_lora_rank=16,
        index_n_heads=8,
        index_head_dim=16,
        index_topk=index_topk,
        sliding_window=16,
        swiglu_limit=1.5,
        num_nextn_predict_layers=0,
        compress_rope_theta=40000.0,
        rope_parameters={key: value for key, value in yarn.items() if key != "rope_theta"},
    )


def families() -> dict[str, Family]:
    common: dict[str, Any] = {"prompt_lengths": PROMPT_LENGTHS, "settle": draw_experts_of_tokens}
    return {
        "deepseek_v4": Family(config=v4(512), renamed=HUB_NAMES, **common),
        "deepseek_v4_sparse": Family(config=v4(TOP_K), inputs=IndexerInputs(), **common),
    }
