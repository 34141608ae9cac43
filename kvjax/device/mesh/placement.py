"""Where the cache's arrays live: a mesh, and which of its axes KV heads, tokens and requests are split over.

Flow:    caller's mesh and axis names -> [Placement] -> shardings of pages and step inputs, shard_map of the ops
Source:  PartitionSpecs follow the logical axis names of pallas_kernels.layouts; docs/parallelism.md

Pages are split along whole KV heads (tensor parallelism) and along their tokens (context parallelism), states of
recurrent layers along their first dimension. Every data rank has requests and page ids of its own: the pages of all
ranks lie one after another in each array, and so do the tokens, block tables and lengths of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from kvjax.core.spec import KVCacheSpec
from kvjax.device.mesh.context_ranks import ContextRanks
from pallas_kernels.layouts import (
    HEAD_AXIS,
    PAGE_AXIS,
    TOKEN_AXIS,
    ArrayLayout,
    PageLayout,
    lane_pieces,
    tokens_per_row,
)

TENSOR_AXIS = "tensor"
CONTEXT_AXIS = "context"
DATA_AXIS = "data"


@dataclass(frozen=True)
class Placement:
    """A mesh and its axes of KV heads, the tokens of a page, and requests (None: not split). Immutable and hashable.

    Of a mesh with Explicit axes, as `jax.make_mesh` makes it, `mesh` is that of the same devices with Auto axes.
    """

    mesh: Mesh
    head_axis: str | None = None  # mesh axis that KV heads are split over
    token_axis: str | None = None  # mesh axis that the tokens of a page are split over
    data_axis: str | None = None  # mesh axis that requests and their pages are split over

    def __post_init__(self) -> None:
        axes = [axis for axis in (self.head_axis, self.token_axis, self.data_axis) if axis is not None]
        for axis in axes:
            if axis not in self.mesh.axis_names:
                raise ValueError(f"expected a mesh axis out of {self.mesh.axis_names}, got {axis!r}")
        if len(set(axes)) < len(axes):
            raise ValueError(f"expected different mesh axes of KV heads, tokens and requests, got {axes}")
        object.__setattr__(self, "mesh", with_auto_axes(self.mesh))

    @classmethod
    def create(cls, mesh: Mesh | None = None, axis_names: Mapping[str, str | None] | None = None) -> Placement:
        """Placement on `mesh` with logical axes of `pallas_kernels.layouts` mapped to mesh axes.

        Without a mesh: the first device. Without names: KV heads over the axis "tensor", the tokens of a page over
        "context" and pages, with the requests that have them, over "data", where the mesh has them.

        Raises:
            ValueError: a logical axis other than "kv_head", "page_token" and "page" is mapped, or a mesh axis is
                unknown, Manual or mapped twice.
        """
        if mesh is None:
            mesh = Mesh(np.asarray(jax.devices()[:1]), (TENSOR_AXIS,))
        if axis_names is None:
            own = (TENSOR_AXIS, CONTEXT_AXIS, DATA_AXIS)
            return cls(mesh, *(axis if axis in mesh.axis_names else None for axis in own))
        split = (HEAD_AXIS, TOKEN_AXIS, PAGE_AXIS)
        surplus = sorted(name for name, axis in axis_names.items() if name not in split and axis is not None)
        if surplus:
            raise ValueError(f"pages are split along {split} only, got mesh axes for {surplus}")
        return cls(mesh, *map(axis_names.get, split))

    @classmethod
    def over_heads(cls, num_devices: int) -> Placement:
        """KV heads split over the first `num_devices` devices.

        Raises:
            ValueError: there are fewer devices.
        """
        devices = jax.devices()
        if not 1 <= num_devices <= len(devices):
            raise ValueError(f"expected 1 to {len(devices)} devices, got {num_devices}")
        return cls(Mesh(np.asarray(devices[:num_devices]), (TENSOR_AXIS,)), TENSOR_AXIS)

    @property
    def num_shards(self) -> int:
        """Parts that the KV heads are split into."""
        return 1 if self.head_axis is None else int(self.mesh.shape[self.head_axis])

    @property
    def num_context(self) -> int:
        """Devices that share the tokens of a page."""
        return 1 if self.token_axis is None else int(self.mesh.shape[self.token_axis])

    @property
    def num_data(self) -> int:
        """Data ranks: each has requests and pages of its own."""
        return 1 if self.data_axis is None else int(self.mesh.shape[self.data_axis])

    @property
    def context_ranks(self) -> ContextRanks | None:
        """The devices that share a page's tokens; None: pages hold all their tokens."""
        return (
            None
            if self.token_axis is None or self.num_context == 1
            else ContextRanks(self.token_axis, self.num_context)
        )

    @property
    def replicated(self) -> NamedSharding:
        """Sharding of an array that every device holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def rows_of_ranks(self) -> NamedSharding:
        """Sharding of what data ranks have one after another."""
        return NamedSharding(self.mesh, self.by_rank)

    def page_spec(self, array: ArrayLayout) -> PartitionSpec:
        """PartitionSpec of one page array, its leading page axis included."""
        mesh_axes = {HEAD_AXIS: self.head_axis, TOKEN_AXIS: self.token_axis}
        return PartitionSpec(self.data_axis, *map(mesh_axes.get, array.axes))

    @property
    def by_rank(self) -> PartitionSpec:
        """PartitionSpec of what data ranks have one after another: tokens, block tables, lengths, page ids."""
        return PartitionSpec(self.data_axis)

    def token_spec(self, rank: int, head_dim: int) -> PartitionSpec:
        """PartitionSpec of an array of a step's tokens with heads in dimension `head_dim`."""
        return PartitionSpec(self.data_axis, *self.head_spec(rank, head_dim)[1:])

    def head_spec(self, rank: int, head_dim: int) -> PartitionSpec:
        """PartitionSpec of an array of `rank` dimensions with heads in dimension `head_dim`."""
        return PartitionSpec(*(self.head_axis if dim == head_dim else None for dim in range(rank)))

    def check_tokens(self, spec: KVCacheSpec, layout: PageLayout) -> None:
        """Whether every device can hold its tokens of `spec`'s pages.

        Raises:
            ValueError: the tokens of a page, or of a word of packed ones, do not split over the devices.
            NotImplementedError: entries of the pages stand for several tokens.
        """
        ranks = self.num_context
        if ranks == 1 or layout.kind == "recurrent":
            return
        if spec.tokens_per_state > 1:
            raise NotImplementedError(
                f"entries of {spec.tokens_per_state} tokens do not split over {ranks} context ranks; "
                f"use axis_names={{{TOKEN_AXIS!r}: None}}"
            )
        rows = layout.arrays[0].page_shape[0]
        if layout.page_size % ranks or rows % ranks:
            raise ValueError(
                f"pages of {layout.page_size} tokens in {rows} rows do not split over {ranks} context ranks; use a "
                f"multiple of {layout.page_size // rows * ranks}, or axis_names={{{TOKEN_AXIS!r}: None}}"
            )

    def check_ranks(self, spec: KVCacheSpec) -> None:
        """Raises NotImplementedError where data ranks cannot have layers of `spec`."""
        if self.num_data > 1 and (spec.tokens_per_state > 1 or spec.reads_encoder):
            raise NotImplementedError(
                f"{spec.kind} layers do not work over {self.num_data} data ranks; run an engine on each"
            )

    def check_heads(self, spec: KVCacheSpec, layout: PageLayout) -> None:
        """Raises ValueError unless every shard of `spec`'s pages holds whole KV heads, or as many heads of states."""
        shards = self.num_shards
        remedy = f"use fewer devices, or axis_names={{{HEAD_AXIS!r}: None}} to keep the pages whole on every device"
        if layout.kind == "recurrent":
            for rows in (array.page_shape[array.axes.index(HEAD_AXIS)] for array in layout.arrays):
                if rows % shards:
                    raise ValueError(f"states of {rows} heads or channels do not split over {shards} devices; {remedy}")
        if shards == 1 or len(spec.entry_shapes) != 2:  # K and V
            return
        heads, head_dim = spec.entry_shapes[0]
        if heads % shards:
            raise ValueError(f"{heads} KV heads do not split over {shards} devices; {remedy}")
        if layout.kind != "packed":
            return
        (array,) = layout.arrays
        (rows, packing), pieces = array.page_shape[1:3], lane_pieces(head_dim)
        tokens = tokens_per_row(heads // shards, packing)
        is_split = rows % (shards * pieces) == 0 and rows * packing == 2 * heads * tokens * pieces
        if layout.tokens_per_row != tokens or not is_split:
            raise ValueError(
                f"{heads} KV heads of {array.dtype} pack {packing} rows a word and do not split over "
                f"{shards} devices; {remedy}"
            )

    def shard_map(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`function` run once per device, as `per_device` says, on its part of the heads."""
        return per_device(function, self.mesh, in_specs, out_specs)


def with_auto_axes(mesh: Mesh) -> Mesh:
    """The mesh of the same devices whose axes are Auto: XLA places what a step computes between its inputs.

    Arrays on either mesh lie alike; a jitted function takes those of one only.

    Raises:
        ValueError: an axis is Manual.
    """
    if AxisType.Manual in mesh.axis_types:
        raise ValueError(f"expected a mesh of Auto or Explicit axes, got {mesh.axis_types}; take it outside shard_map")
    if all(kind == AxisType.Auto for kind in mesh.axis_types):
        return mesh
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def per_device(
    function: Callable[..., Any], mesh: Mesh | AbstractMesh, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` run once per device of `mesh` on its parts of the arrays; `function` itself on one device.

    XLA cannot split a kernel over devices, so kernels need this even where every device does the same.
    """
    if mesh.size == 1:
        return function
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
