"""What devices send each other in a compiled step, against what its mesh makes necessary.

Flow:    text of an optimised module, mesh -> [collectives] -> arrays by opcode and mesh axis <- [expected_of]

XLA may combine several collectives into one of many operands, or start and end one apart, so arrays are counted and not
operations: two all-reduces of one array each and one of both send the same.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_OPCODES = "all-reduce|all-gather|all-to-all|ragged-all-to-all|reduce-scatter|collective-permute|collective-broadcast"
_OPERATION = re.compile(
    rf"^\s*(?:ROOT )?%?[\w.-]+ = (?P<made>.*?) (?P<opcode>{_OPCODES})(?P<start>-start)?\((?P<rest>.*)$"
)
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
_OPERANDS = re.compile(
    r"^\(\([^()]*(?:\([^()]*\)[^()]*)*\), "
)  # what the start of one makes names them before its results
_NAMES_OPERAND = ("collective-permute", "all-gather")  # whose starts do so without a tuple of their own
_BITS = re.compile(r"\d+")


class Sent(NamedTuple):
    """One array of a collective, as one device gets it."""

    opcode: str
    axis: str  # of the mesh, several joined by "+"; what the module says where it is neither
    array: str  # "f32[256,16]"

    @property
    def num_bytes(self) -> int:
        """Bytes of the array on one device."""
        match = _ARRAY.fullmatch(self.array)
        assert match is not None  # as it was made
        bits = _BITS.search(match[1])
        sizes = [int(size) for size in match[2].split(",") if size]
        return math.prod(sizes) * (8 if bits is None else int(bits[0])) // 8


def collectives(module: str, mesh_shape: Mapping[str, int]) -> Counter[Sent]:
    """How often each array is sent in an optimised module's text; loops' bodies count once.

    `mesh_shape`: size by axis, in the order of the devices that the module runs on.
    """
    found: Counter[Sent] = Counter()
    for line in module.splitlines():
        if (match := _OPERATION.match(line)) is None:
            continue
        axis = _axis(match["rest"], mesh_shape)
        made = _ARRAY.findall(_OPERANDS.sub("(", match["made"]))
        if match["start"] and match["opcode"] in _NAMES_OPERAND and not match["made"].startswith("(("):
            made = made[1:2]  # (operand, result), of a permute two flags beside
        found.update(Sent(match["opcode"], axis, f"{dtype}[{shape}]") for dtype, shape in made)
    return found


def _axis(rest: str, mesh_shape: Mapping[str, int]) -> str:
    """The axes along which the devices of each group lie, or what the operation says."""
    match = re.search(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, [a-z_]+=|$)", rest)
    said = match[1] if match is not None else "every device"
    groups = _groups(said)
    devices = np.arange(math.prod(mesh_shape.values())).reshape(*mesh_shape.values())
    names = list(mesh_shape)
    for chosen in range(1, 1 << len(names)):
        along = [i for i in range(len(names)) if chosen >> i & 1]
        if groups == _rows(devices, along):
            return "+".join(names[i] for i in along)
    return said


def _rows(devices: np.ndarray, along: list[int]) -> set[frozenset[int]]:
    """The groups of devices that differ in the dimensions `along` only."""
    others = [i for i in range(devices.ndim) if i not in along]
    size = math.prod(devices.shape[i] for i in along)
    return {frozenset(row) for row in devices.transpose(*others, *along).reshape(-1, size).tolist()}


def _groups(said: str) -> set[frozenset[int]] | None:
    """Replica groups in any of XLA's three notations; None: in another."""
    if match := re.fullmatch(r"mesh\[(.*?)\] \{(.*?)\}", said):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match[1])}
        chosen = re.findall(r"'(\w+)'", match[2])
        if match[2] != ",".join(f"'{name}'" for name in chosen) or not set(chosen) <= set(sizes):
            return None
        devices = np.arange(math.prod(sizes.values())).reshape(*sizes.values())
        return _rows(devices, [list(sizes).index(name) for name in chosen])
    if match := re.fullmatch(r"\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", said):
        sizes_of = [int(size) for size in match[3].split(",")]
        order = [int(i) for i in match[4].split(",")] if match[4] else list(range(len(sizes_of)))
        ids = np.arange(math.prod(sizes_of)).reshape(sizes_of).transpose(order)
        return {frozenset(row) for row in ids.reshape(int(match[1]), int(match[2])).tolist()}
    if re.fullmatch(r"\{(\{[\d,]+\},?)+\}", said):
        return {frozenset(map(int, row.split(","))) for row in re.findall(r"\{([\d,]+)\}", said)}
    return None


class LayerSends(NamedTuple):
    """What one layer sends of a token."""

    head_dim: int | None  # numbers that a head attends to, merged over context; None: it has no pages of tokens
    num_sums: int  # over tensor, of one row of the hidden size
    moved: tuple[int, ...] = ()  # channels, on all devices, that go to the devices of their heads


def layers_of(config: Mapping[str, Any], num_layers: int) -> list[LayerSends]:
    """The first layers of a Llama, Gemma 3, DeepSeek V3 or Qwen3-Next, from its config.json.

    An attention layer sums behind its output projection. Heads of MLA attend to latents, whatever its values are. A
    recurrent layer keeps the channels of queries, keys and values side by side, split evenly over the devices, so each
    goes to the device of its head. A dense feed-forward sums once; experts once for the shared ones, and once for the
    routed ones, whose rows each device adds up before.
    """
    text = config.get("text_config", config)
    heads = text["num_attention_heads"]
    head_dim = text.get("kv_lora_rank") or text.get("head_dim") or text["hidden_size"] // heads
    kinds, interval = text.get("layer_types"), text.get("full_attention_interval")
    layers = []
    for layer in range(num_layers):
        num_sums = 2
        if text.get("n_routed_experts", text.get("num_experts")) and layer >= text.get("first_k_dense_replace", 0):
            num_sums = 3
        is_recurrent = kinds[layer] == "linear_attention" if kinds else bool(interval and (layer + 1) % interval)
        if is_recurrent:
            keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
            values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
            layers.append(LayerSends(None, num_sums, (keys, keys, values)))
        else:
            layers.append(LayerSends(head_dim, num_sums))
    return layers


def expected_of(
    config: Mapping[str, Any],  # its config.json
    *,
    num_layers: int,
    num_tokens: int,
    num_context: int,
    num_shards: int,
    dtype: str = "bf16",
    joins_sums: bool = False,
) -> Counter[Sent]:
    """What a step sends over a mesh ("context", "tensor"), pages and weights of `dtype`.

    An attention layer: over context, of T tokens and H = heads / num_shards, the maximum float32[T, H] and the sums
    float32[T, H] and float32[T, H, D]. Over tensor what `layers_of` says: sums [T, hidden], and channels
    [T, channels / num_shards] that move. Nothing beside: every device has the whole vocabulary, and samples for itself.
    `joins_sums`: both sums over context are one row of numbers, as XLA for GPUs has it.
    """
    text = config.get("text_config", config)
    own_heads = text["num_attention_heads"] // num_shards
    rows = f"{num_tokens},{own_heads}"
    sent: Counter[Sent] = Counter()
    for head_dim, num_sums, moved in layers_of(config, num_layers):
        if num_context > 1 and head_dim is not None:
            sent[Sent("all-reduce", "context", f"f32[{rows}]")] += 1 if joins_sums else 2
            values = f"{num_tokens * own_heads * (head_dim + 1)}" if joins_sums else f"{rows},{head_dim}"
            sent[Sent("all-reduce", "context", f"f32[{values}]")] += 1
        if num_shards > 1:
            sent[Sent("all-reduce", "tensor", f"{dtype}[{num_tokens},{text['hidden_size']}]")] += num_sums
            for channels in moved:
                array = f"{dtype}[{num_tokens},{channels // num_shards}]"
                sent[Sent("collective-permute", "tensor", array)] += 1
    return sent


def bytes_over(sent: Counter[Sent], axis: str) -> int:
    """Bytes of all arrays sent over one axis."""
    return sum(count * each.num_bytes for each, count in sent.items() if each.axis == axis)
