"""Tuned files: what the loader takes and refuses, what the shipped ones hold, and that kernels read them."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gpu import mosaic as gpu_mosaic
from pallas_kernels.layouts import attention_layout
from pallas_kernels.mask import MaskRule
from pallas_kernels.ragged_paged_attention import kernel_gpu, kernel_tpu, tpu_tuning, tuning
from pallas_kernels.ragged_paged_attention.tuning import TunedShape
from pallas_kernels.tpu import mosaic
from pallas_kernels.tuned import Table, key_of, read_table, tuned_sizes

SHAPE = TunedShape(32, 8, 128, 128, "bfloat16", "bfloat16", None, None)
NAMES = kernel_tpu.Tuning._fields
ENTRY = {"shape": SHAPE._asdict(), "sizes": {"queries": 64, "tile_block": 1024, "decode_block": 2048}}
GOOD = {"version": 1, "op": tuning.OP, "device": "v6e", "by": "static score", "entries": [ENTRY]}


def read(folder: Path, data: object, name: str = "v6e") -> Table:
    path = folder / f"{name}.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return read_table(path, tuning.OP, TunedShape._fields, NAMES)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = read(tmp_path, GOOD)
    assert read(tmp_path, table.text()) == table
    assert read(tmp_path, Table(tuning.OP, "v6e", "time").text()).entries == {}
    assert table.sizes(dict(reversed(SHAPE._asdict().items()))) == ENTRY["sizes"]
    assert table.sizes(SHAPE._replace(page_size=16)._asdict()) == {}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("{", r"v6e\.json: expected JSON, got Expecting .*; tune again .* or delete the file"),
        ([GOOD], "expected version 1, got None; tune again"),
        ({**GOOD, "version": 2}, "expected version 1, got 2"),
        ({**GOOD, "op": "kv_write"}, "expected op 'ragged_paged_attention', got 'kv_write'"),
        ({**GOOD, "device": "v7x"}, "expected device 'v6e', got 'v7x'"),
        ({**GOOD, "by": None}, "expected a text 'by' and a list 'entries', got"),
        ({**GOOD, "entries": {}}, "expected a text 'by' and a list 'entries', got"),
        ({**GOOD, "entries": [3]}, "expected entries of a 'shape' and 'sizes', got 3"),
        ({**GOOD, "entries": [{**ENTRY, "shape": {"page_size": 16}}]}, r"expected a shape of .*, got \['page_size'\]"),
        ({**GOOD, "entries": [{**ENTRY, "sizes": {}}]}, "expected sizes out of .*, positive integers, got {}"),
        ({**GOOD, "entries": [{**ENTRY, "sizes": {"block": 8}}]}, "expected sizes out of .*'decode_block'.*'block': 8"),
        ({**GOOD, "entries": [{**ENTRY, "sizes": {"queries": 0}}]}, "positive integers, got {'queries': 0}"),
        ({**GOOD, "entries": [{**ENTRY, "sizes": {"queries": True}}]}, "positive integers, got {'queries': True}"),
        ({**GOOD, "entries": [ENTRY, ENTRY]}, "expected one entry for each shape, got two for"),
    ],
)
def test_broken_files(tmp_path: Path, data: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(tmp_path, data)


def test_devices_and_shapes_without_an_entry(tmp_path: Path) -> None:
    read(tmp_path, GOOD)
    asked = (tuning.OP, SHAPE._asdict(), NAMES)
    assert tuned_sizes(tmp_path, "v6e", *asked) == ENTRY["sizes"]
    assert tuned_sizes(tmp_path, "v9", *asked) == tuned_sizes(tmp_path, None, *asked) == {}
    assert tuned_sizes(tmp_path, "v6e", tuning.OP, SHAPE._replace(sliding_window=4)._asdict(), NAMES) == {}


def test_shipped_files() -> None:
    """They are of the format, and their blocks are what the kernels take."""
    for path in tuning.FOLDER.glob("*.json"):
        is_tpu = path.stem.startswith("v")
        names = NAMES if is_tpu else kernel_gpu.Tuning._fields
        table = read_table(path, tuning.OP, TunedShape._fields, names)
        assert table.text() == path.read_text()
        for _, sizes in table.entries.values():
            assert all(size & (size - 1) == 0 for size in sizes.values()) or not is_tpu
            assert all(size % 64 == 0 for name, size in sizes.items() if name.endswith("_block"))


def given(monkeypatch: pytest.MonkeyPatch, folder: Path, chip: str | None = "v6e") -> None:
    """Kernels find `GOOD` for `chip`."""
    read(folder, GOOD)
    monkeypatch.setattr(tuning, "FOLDER", folder)
    monkeypatch.setattr(tpu_tuning, "chip_name", lambda: chip)


def sizes_of(num_columns: int, q_dtype: str = "bfloat16") -> kernel_tpu.Tuning:
    q = jax.ShapeDtypeStruct((512, 32, 128), jnp.dtype(q_dtype))
    layout = attention_layout(num_kv_heads=8, head_dim=128, page_size=128, dtype="bfloat16", platform="tpu")
    (array,) = layout.arrays
    pages = jax.ShapeDtypeStruct(array.shape(9), array.dtype)
    return tpu_tuning.tuned(q, pages, 8, MaskRule(True, None, None), num_columns)


def test_the_kernel_takes_the_chips_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Blocks are cut to what the tables can hold; what is not in the file is left to the formula."""
    given(monkeypatch, tmp_path)
    assert sizes_of(64) == kernel_tpu.Tuning(64, 2048, 1024)
    assert sizes_of(3) == kernel_tpu.Tuning(64, 512, 512)
    assert sizes_of(64, "float32") == kernel_tpu.Tuning()
    given(monkeypatch, tmp_path, chip=None)
    assert sizes_of(64) == kernel_tpu.Tuning()


def kernel_names(**options: object) -> str:
    """The program of a call: launches are named after their sizes."""
    q = jax.ShapeDtypeStruct((512, 32, 128), jnp.bfloat16)
    layout = attention_layout(num_kv_heads=8, head_dim=128, page_size=128, dtype="bfloat16", platform="tpu")
    pages = tuple(jax.ShapeDtypeStruct(array.shape(9), array.dtype) for array in layout.arrays)
    ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 64), (4,), (5,), (3,))]
    keywords = dict.fromkeys(("soft_cap", "sinks", "k_scale", "v_scale"))
    call = kernel_tpu.ragged_paged_attention.__wrapped__

    def traced(*arrays: jax.Array) -> object:
        return call(*arrays, mask=MaskRule(), num_kv_heads=8, sm_scale=0.1, return_lse=False, **keywords, **options)

    return str(jax.make_jaxpr(traced)(q, pages, *ints))


def test_an_explicit_tuning_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given(monkeypatch, tmp_path)
    tuned = kernel_names()
    assert "rpa_q1_b2048" in tuned
    assert "rpa_q64_b1024" in tuned
    formula = kernel_names(tuning=kernel_tpu.Tuning())
    assert "rpa_q1_b512" in formula
    assert "rpa_q64_b512" in formula


def test_the_gpu_kernel_takes_the_cards_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where values are as wide as keys, which the file does not tell apart."""
    shape = TunedShape(32, 8, 128, 16, "bfloat16", "bfloat16", None, None)._asdict()
    table = {**GOOD, "device": "h100", "by": "time", "entries": [{"shape": shape, "sizes": {"decode_stages": 3}}]}
    (tmp_path / "h100.json").write_text(json.dumps(table))
    monkeypatch.setattr(tuning, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_mosaic, "card_name", lambda: "h100")
    q, k, v = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((9, 32, 128), (9, 16, 8, 128), (9, 16, 8, 64)))
    assert kernel_gpu.tuned(q, (k, k), 8, MaskRule()) == kernel_gpu.Tuning(decode_stages=3)
    assert kernel_gpu.tuned(q, (k, v), 8, MaskRule()) == kernel_gpu.Tuning()
    assert kernel_gpu.tuned(q, (k, k), 8, MaskRule(sliding_window=9)) == kernel_gpu.Tuning()


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA GH200 480GB", "gh200"), ("gfx942", None)],
)
def test_names_of_cards(monkeypatch: pytest.MonkeyPatch, kind: str, name: str | None) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    assert gpu_mosaic.card_name() == name


def test_no_chip_here() -> None:
    if jax.default_backend() == "cpu":
        assert mosaic.chip_name() is None
        assert gpu_mosaic.card_name() is None


def test_keys_do_not_depend_on_order() -> None:
    assert key_of({"a": 1, "b": None}) == key_of({"b": None, "a": 1})
