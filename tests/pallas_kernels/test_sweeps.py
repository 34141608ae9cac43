"""The sweeps of all ops, a seed of each marked `sweep`, and the script that runs more of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts import sweep_kernels
from tests.pallas_kernels.sweeps import choices, find_sweeps, naming


@pytest.mark.sweep
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize(("op", "backend"), find_sweeps())
def test_sweep(op: str, backend: str) -> None:
    assert sum(1 for _ in find_sweeps()[op, backend](0)) > 20


def test_sweeps_are_found() -> None:
    attention = {f"{name}_attention" for name in ("ragged_paged", "mla_paged", "sparse_mla")}
    assert attention <= {op for op, backend in find_sweeps() if backend == "gpu"}


def test_numbers_differ_between_seeds() -> None:
    factors = {"a": (1, 2), "b": (3, 4)}
    numbers = [number for seed in range(3) for number, _ in choices(factors, seed)]
    assert len(set(numbers)) == len(numbers)


def fake(seed: int) -> Iterator[None]:
    """Two right cases; the third is wrong from seed 1 on."""
    yield
    yield
    with naming({"feature": "x"}, 2):
        assert seed == 0, "off by one"
    yield


def test_the_script_tells_what_was_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sweep_kernels, "find_sweeps", lambda: {("op", "tpu"): fake, ("op", "gpu"): fake})
    assert sweep_kernels.main(["--op", "op"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[:4] for line in lines] == [["op", "tpu", "0", "3"], ["op", "gpu", "0", "3"]]
    assert sweep_kernels.main(["--backend", "tpu", "--seeds", "0", "2"]) == 1
    told = capsys.readouterr()
    assert told.out.splitlines()[-1].split()[2:4] == ["1", "2"]
    assert "off by one" in told.err
    assert "of {'feature': 'x'}, case 2" in told.err


def test_no_seed_is_begun_after_the_minutes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_kernels, "find_sweeps", lambda: {("op", "tpu"): fake})
    assert sweep_kernels.main(["--minutes", "-1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
