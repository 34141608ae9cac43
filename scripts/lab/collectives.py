"""What devices send each other in a compiled step, against what its mesh makes necessary.

Flow:    text of an optimised module, mesh -> [collectives] -> arrays by opcode and mesh axis <- [expected_of]

XLA may combine several collectives into one of many operands, or start and end one apart, so arrays are counted and not
operations: two all-reduces of one array each and one of both send the same.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

JOINED_BYTES = 30 << 20  # most that XLA for GPUs joins into one all-reduce by default
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
    axis: (
        str  # of the mesh, several joined by "+"; of a permute with "0>1", from where to where; else as the module says
    )
    array: str  # "f32[256,16]"

    @property
    def num_bytes(self) -> int:
        """Bytes of the array on one device."""
        match = _ARRAY.fullmatch(self.array)
        assert match is not None  # as it was made
        return math.prod(int(size) for size in match[2].split(",") if size) * _bytes_of(match[1])


def _bytes_of(dtype: str) -> int:  # "bf16"; one of less than a byte counts as one
    bits = _BITS.search(dtype)
    return 1 if bits is None else max(int(bits[0]) // 8, 1)


def collectives(module: str, mesh_shape: Mapping[str, int]) -> Counter[Sent]:
    """How often each array is sent in an optimised module's text; loops' bodies count once.

    `mesh_shape`: size by axis, in the order of the devices that the module runs on.
    """
    found: Counter[Sent] = Counter()
    for line in module.splitlines():
        if (match := _OPERATION.match(line)) is None:
            continue
        axes = _axes(match["opcode"], match["rest"], mesh_shape)
        made = _ARRAY.findall(_OPERANDS.sub("(", match["made"]))
        if match["start"] and match["opcode"] in _NAMES_OPERAND and not match["made"].startswith("(("):
            made = made[1:2]  # (operand, result), of a permute two flags beside
        found.update(Sent(match["opcode"], axis, f"{dtype}[{shape}]") for axis in axes for dtype, shape in made)
    return found


def _axes(opcode: str, rest: str, mesh_shape: Mapping[str, int]) -> list[str]:
    """Axes along which the devices of each group lie, or those of a permute's moves; else what the operation says."""
    match = re.search(r"(?:replica_groups|source_target_pairs)=(.*?)(?:, [a-z_]+=|$)", rest)
    said = match[1] if match is not None else "every device"
    if opcode == "collective-permute":
        return _moves(said, mesh_shape) or [said]
    return [_axis(said, mesh_shape)]


def _moves(said: str, mesh_shape: Mapping[str, int]) -> list[str]:
    """ "tensor 0>1" of each move along one axis that all devices make which differ in others only; else none."""
    pairs = [tuple(map(int, pair.split(","))) for pair in re.findall(r"\{(\d+,\d+)\}", said)]
    sizes, names = tuple(mesh_shape.values()), list(mesh_shape)
    found: Counter[str] = Counter()
    for pair in pairs:
        source, target = (np.unravel_index(device, sizes) for device in pair)
        along = [i for i in range(len(sizes)) if source[i] != target[i]]
        if len(along) != 1:
            return []
        found[f"{names[along[0]]} {source[along[0]]}>{target[along[0]]}"] += 1
    others = {name: math.prod(sizes) // size for name, size in mesh_shape.items()}
    return list(found) if all(count == others[move.split()[0]] for move, count in found.items()) else []


def _axis(said: str, mesh_shape: Mapping[str, int]) -> str:
    """The axes along which the devices of each group lie, or what the operation says."""
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
    has_experts: bool = False
    gates_shared: bool = False  # what the shared experts sum up is weighed, then added to what the routed ones do
    channels: tuple[int, ...] = ()  # of queries, keys and values side by side, that go to the devices of their heads

    def __str__(self) -> str:
        mixer = "recurrent" if self.head_dim is None else "attention"
        return f"{mixer} and {'experts' if self.has_experts else 'feed-forward'}"


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
        num_experts, num_dense = text.get("n_routed_experts", text.get("num_experts")), "first_k_dense_replace"
        has_experts = bool(num_experts) and layer >= text.get(num_dense, 0)
        gates_shared = has_experts and "shared_expert_intermediate_size" in text
        is_recurrent = kinds[layer] == "linear_attention" if kinds else bool(interval and (layer + 1) % interval)
        if is_recurrent:
            keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
            values = text["linear_num_value_heads"] * text["linear_value_head_dim"]
            layers.append(LayerSends(None, has_experts, gates_shared, (keys, keys, values)))
        else:
            layers.append(LayerSends(head_dim, has_experts, gates_shared))
    return layers


def expected_of(
    config: Mapping[str, Any],  # its config.json
    *,
    num_layers: int,
    num_tokens: int,
    num_context: int,
    num_shards: int,
    dtype: str = "bf16",
    compiler: str = "tpu",
) -> Counter[Sent]:
    """What a step sends over a mesh ("context", "tensor"), pages and weights of `dtype`.

    An attention layer: over context, of T tokens and H = heads / num_shards, the maximum float32[T, H] and the sums
    float32[T, H] and float32[T, H, D]. Over tensor what `layers_of` says: sums [T, hidden], and channels [T, n] that
    move. Nothing beside: every device has the whole vocabulary, and samples for itself.

    `compiler`, XLA's for "cpu", "tpu" or "gpu": but on a CPU each device adds its parts of both kinds of experts first,
    where nothing stands between. On a GPU sums that do not wait for each other, both over context or of both kinds of
    experts, are one row of numbers where they are small.
    """
    text = config.get("text_config", config)
    own_heads = text["num_attention_heads"] // num_shards
    rows = f"{num_tokens},{own_heads}"
    sent: Counter[Sent] = Counter()
    for layer in layers_of(config, num_layers):
        head_dim = layer.head_dim
        if num_context > 1 and head_dim is not None:
            count = num_tokens * own_heads * (head_dim + 1)
            is_joined = compiler == "gpu" and 4 * count <= JOINED_BYTES
            sent[Sent("all-reduce", "context", f"f32[{rows}]")] += 1 if is_joined else 2
            values = f"{count}" if is_joined else f"{rows},{head_dim}"
            sent[Sent("all-reduce", "context", f"f32[{values}]")] += 1
        if num_shards > 1:
            shapes = _sums_of(layer, (num_tokens, text["hidden_size"]), dtype, compiler)
            sent.update(Sent("all-reduce", "tensor", f"{dtype}[{shape}]") for shape in shapes)
            for source, target, width in moves_of(layer.channels, num_shards):
                move = f"tensor {source}>{target}"
                sent[Sent("collective-permute", move, f"{dtype}[{num_tokens},{width}]")] += 1
    return sent


def _sums_of(layer: LayerSends, rows: tuple[int, int], dtype: str, compiler: str) -> list[str]:
    """Shapes of a layer's sums over tensor of rows [T, hidden]: behind attention, and of the one or both others."""
    whole, count = f"{rows[0]},{rows[1]}", 2 * math.prod(rows)
    if not layer.has_experts or (compiler != "cpu" and not layer.gates_shared):
        return [whole] * 2
    is_joined = compiler == "gpu" and count * _bytes_of(dtype) <= JOINED_BYTES
    return [whole, f"{count}"] if is_joined else [whole] * 3


def moves_of(channels: Sequence[int], num_shards: int) -> list[tuple[int, int, int]]:  # (source, target, channels)
    """What moves where tensors' channels stand side by side, split evenly, and each device wants those of its heads."""
    held, moves, start = sum(channels) // num_shards, [], 0
    for width in channels:
        own = width // num_shards
        bounds = {start + own * i for i in range(num_shards + 1)} | {held * i for i in range(num_shards)}
        ordered = sorted(bound for bound in bounds if start <= bound <= start + width)
        for first, end in itertools.pairwise(ordered):
            source, target = first // held, (first - start) // own
            if source != target:
                moves.append((source, target, end - first))
        start += width
    return moves


def bytes_over(sent: Counter[Sent], axis: str) -> int:
    """Bytes of all arrays sent over one axis; of permutes those of every move."""
    return sum(count * each.num_bytes for each, count in sent.items() if each.axis.split()[0] == axis)
