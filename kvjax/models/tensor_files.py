"""The tensors of a checkpoint's safetensors files, each read when it is wanted and never mapped into memory.

Flow:    folder -> [open_tensors] -> StoredTensor by name -> (quantised) -> load_model
Source:  the format, https://huggingface.co/docs/safetensors: eight bytes of length, a JSON header, then the data

A mapped file counts as resident memory for as long as it is open: a model beside a file of its own size.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from kvjax.errors import CheckpointError
from kvjax.extras import require_extra

FLOATS = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # dtype -> as safetensors names it
_DTYPES = {name: np.dtype(jnp.dtype(dtype)) for dtype, name in FLOATS.items()} | {
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U64": np.dtype("uint64"),
    "U32": np.dtype("uint32"),
    "U16": np.dtype("uint16"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
    "F8_E4M3": np.dtype(jnp.float8_e4m3fn),
    "F8_E5M2": np.dtype(jnp.float8_e5m2),
    "F8_E8M0": np.dtype(jnp.float8_e8m0fnu),
}
PLAIN_DTYPES = ("F64", "F32", "BF16", "F16", "I64", "I32")  # of weights that are not quantised, and of tables


class CheckpointTensor(Protocol):
    """One tensor of a checkpoint, in memory only while somebody holds what `read` gave."""

    @property
    def name(self) -> str:
        """As the checkpoint has it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Without reading it."""

    @property
    def problem(self) -> str | None:
        """Why it cannot be a weight, as the end of a sentence: "expected ..., got ..."."""

    def read(self) -> np.ndarray:
        """The numbers.

        Raises:
            CheckpointError: they cannot be, or the file ends before them.
        """


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of an open file."""

    file: BufferedReader
    name: str
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it
    offset_bytes: int  # in the file

    @property
    def problem(self) -> str | None:
        """A dtype of few bits."""
        if self.dtype in PLAIN_DTYPES:
            return None
        return f"expected one of {', '.join(PLAIN_DTYPES)}, got {self.dtype} without scales beside it"

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of what is read."""
        if self.dtype not in _DTYPES:
            raise CheckpointError(f"{self.name}: expected one of {', '.join(_DTYPES)}, got {self.dtype}")
        return _DTYPES[self.dtype]

    def read(self) -> np.ndarray:
        """The tensor."""
        dtype = self.numpy_dtype
        num_bytes = int(np.prod(self.shape, dtype=np.int64)) * dtype.itemsize
        self.file.seek(self.offset_bytes)
        data = np.fromfile(self.file, np.uint8, num_bytes)
        if data.size != num_bytes:
            raise CheckpointError(f"{self.file.name}: expected {num_bytes} bytes of {self.name}, got {data.size}")
        return data.view(dtype).reshape(self.shape)


def open_tensors(folder: Path, own_name: Callable[[str], str], stack: ExitStack) -> dict[str, StoredTensor]:
    """Every tensor by the name that the model has for it; `stack` closes their files.

    With an index they are those that it names, each from the file that it names; files may hold others.

    Raises:
        CheckpointError: a file is missing, no safetensors file, or lacks a tensor that the index says it has.
    """
    weight_map = _weight_map(folder)
    names = ["model.safetensors"] if weight_map is None else sorted(set(weight_map.values()))
    files = {name: _open_file(folder / name, stack) for name in names}
    if weight_map is None:
        weight_map = dict.fromkeys(files[names[0]], names[0])
    tensors: dict[str, StoredTensor] = {}
    for tensor, name in weight_map.items():
        if tensor not in files[name]:
            raise CheckpointError(
                f"{folder / name}: expected the tensor {tensor}, as the index says, got a file without it: the index "
                "and the file are of different checkpoints, or the file is cut off"
            )
        stored = tensors.setdefault(own_name(tensor), files[name][tensor])
        if stored.name != tensor:
            raise CheckpointError(f"{folder}: expected one tensor of {stored.name} and {tensor}, which mean the same")
    return tensors


def _weight_map(folder: Path) -> dict[str, str] | None:
    """The file of each tensor, as the checkpoint's index says; None: there is no index, and one file has them all.

    Raises:
        CheckpointError: an index of another form, or one that names a file outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return None
    try:
        files = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{index}: expected a JSON object with a weight_map, got {error!r}") from error
    for name, file in files.items():
        if not isinstance(file, str) or PurePosixPath(file).name != file or PureWindowsPath(file).name != file:
            raise CheckpointError(f"{index}: expected {name} in a file beside the index, got {file!r}")
    return files


def _open_file(path: Path, stack: ExitStack) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, which `stack` closes.

    Raises:
        CheckpointError: it is missing, or no safetensors file.
    """
    safetensors = require_extra("safetensors", "hf", "loading a model")
    if not path.is_file():
        raise CheckpointError(f"expected weights in safetensors files, found no {path}")
    try:
        with safetensors.safe_open(path, framework="numpy"):
            pass  # its reader has checked the header and that the tensors fill the file
    except safetensors.SafetensorError as error:
        raise CheckpointError(f"{path}: expected a safetensors file, got one that cannot be read: {error}") from error
    file = stack.enter_context(path.open("rb"))
    header_bytes = int.from_bytes(file.read(8), "little")
    header: Mapping[str, Any] = json.loads(file.read(header_bytes))
    return {
        name: StoredTensor(
            file, name, tuple(entry["shape"]), entry["dtype"], 8 + header_bytes + entry["data_offsets"][0]
        )
        for name, entry in header.items()
        if name != "__metadata__"
    }


__all__ = ["FLOATS", "PLAIN_DTYPES", "CheckpointTensor", "StoredTensor", "open_tensors"]
