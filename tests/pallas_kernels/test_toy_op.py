"""An op that is added by one folder is benchmarked, compiled, fuzzed and held to the laws."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.scripts.needs_libtpu import needs_libtpu

CASES = '''
from dataclasses import dataclass
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np

from pallas_kernels.cases.case import Arguments, Case, Results, Work
from pallas_kernels.cases.numbers import random_array


@dataclass(frozen=True)
class DoubleCase(Case):
    """Twice an array."""

    rows: int = 8
    by: float = 2.0

    op = "toy_double"
    shapes = (SimpleNamespace(name="toy-model", rows=64),)
    kinds = ("once",)

    @classmethod
    def of_shape(cls, shape, num_shards):
        if num_shards > 2:
            raise ValueError("two shards at most")
        return {"rows": shape.rows // num_shards}

    @classmethod
    def of_kind(cls, kind, step):
        return {"rows": 4} if step.small else {}

    @classmethod
    def random(cls, rng, backend):
        return cls(rows=int(rng.integers(1, 9)))

    @property
    def size(self):
        return f"{self.rows} rows"

    @property
    def work(self):
        return Work(8 * 128 * self.rows, 128 * self.rows)

    def arguments(self, seed):
        return Arguments((), random_array(np.random.default_rng(seed), (self.rows, 128), "float32"))

    def hard_arguments(self, rng):
        return self.arguments(int(rng.integers(9)))

    def call(self, backend, pages, rest):
        return Results(self.by * rest, ())

    def expected(self, arguments):
        return Results(2 * np.asarray(arguments.rest).astype(np.float64), ())


CASES = (DoubleCase,)
'''
START = """
import sys

import pallas_kernels

pallas_kernels.__path__.append(sys.argv.pop())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That has a folder with the op."""
    op = tmp_path / "toy_double"
    op.mkdir()
    (op / "__init__.py").touch()
    (op / "cases.py").write_text(CASES)
    return tmp_path


def run(folder: Path, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", START + program, *arguments, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])


def told(folder: Path, program: str, *arguments: str) -> str:
    done = run(folder, program, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_is_benchmarked(folder: Path) -> None:
    program = "from scripts.bench_tpu import main; sys.exit(main())"
    said = told(folder, program, "--dry-run", "--op", "toy_double", "--page", "16")
    assert "toy_double/once/toy-model/64 rows" in said
    assert said.rstrip().endswith("equal")


@needs_libtpu
def test_it_is_compiled(folder: Path) -> None:
    program = "from scripts.lab.tpu.compile_one import compile_case; print(compile_case(*sys.argv[1:3], sys.argv[3:]))"
    assert "'kernels': {}" in told(folder, program, "v6e", "toy_double", "model=toy-model", "shards=2")
    program = "from scripts.lab.tpu.shape_cases import shape_cases; print(shape_cases(['toy_double']))"
    said = told(folder, program)
    assert "'toy-model / 2', settings=('rows=32',)" in said
    assert "toy-model / 4" not in said


def test_it_is_fuzzed(folder: Path) -> None:
    program = "from scripts.fuzz_kernels import main; sys.exit(main(sys.argv[1:]))"
    assert "right" in told(folder, program, "--op", "toy_double", "--trials", "2", "--seed", "1")


@pytest.mark.parametrize("is_broken", [False, True])
def test_it_is_held_to_the_laws(folder: Path, is_broken: bool) -> None:
    if is_broken:
        (folder / "toy_double" / "cases.py").write_text(CASES.replace("by: float = 2.0", "by: float = 2.001"))
    program = "import pytest; sys.exit(pytest.main(['-q', 'tests/pallas_kernels/test_laws.py', '-k', 'toy_double']))"
    done = run(folder, program)
    assert ("an array of float32" in done.stdout) == is_broken
    assert bool(done.returncode) == is_broken, done.stdout
