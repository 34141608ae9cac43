"""`kvjax check`: what is wrong is a row and exit status 1, whatever went wrong."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from kvjax.cli.commands import check
from kvjax.cli.main import main
from pallas_kernels import ran_on
from pallas_kernels.cases.case import Arguments, Results
from pallas_kernels.cases.find import case_types
from pallas_kernels.cases.verdict import check_op
from pallas_kernels.merge_states.cases import MergeCase
from pallas_kernels.page_ops.cases import MoveCase


class Wrong(MergeCase):
    """Its oracle says something else."""

    def expected(self, arguments: Arguments) -> Results:
        out, lse = super().expected(arguments).outs
        return Results((out + 1, lse), ())


class Refused(MergeCase):
    """Its kernel cannot do the case."""

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        raise NotImplementedError("so many heads")


class Broken(MergeCase):
    """It does not compile."""

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        raise RuntimeError("the compiler\nfell over")


class Hanging(MergeCase):
    """It ends when the process would have."""

    ended = threading.Event()

    def call(self, backend: str, pages: tuple[Any, ...], rest: Any) -> Results:
        self.ended.wait(60)
        return super().call(backend, pages, rest)


def rows_of(
    types: dict[str, type[MergeCase]], monkeypatch: pytest.MonkeyPatch, path: Path, *options: str
) -> tuple[int, list[Any]]:
    """(exit status, rows of the JSON) of a run over these ops."""
    monkeypatch.setattr(check, "case_types", lambda: types)
    status = main(["check", *options, "--json", str(path / "check.json")])
    return status, json.loads((path / "check.json").read_text())["rows"]


def test_an_op_that_is_right_is_within_its_tolerance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, [row] = rows_of({"merge_states": MergeCase}, monkeypatch, tmp_path)
    assert (status, row["outcome"], row["reason"]) == (0, "ok", "")
    assert 0 < row["difference"] <= row["tolerance"]
    assert row["case"]["heads"] == 3


@pytest.mark.parametrize(
    ("case_type", "status", "words"),
    [
        (Wrong, 1, "failed: AssertionError: an array of"),
        (Broken, 1, "failed: RuntimeError: the compiler fell over"),
        (Refused, 0, "cannot: so many heads"),
    ],
)
def test_what_is_not_right_is_told_and_the_next_op_is_checked(
    case_type: type[MergeCase],
    status: int,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, rows = rows_of({"first": case_type, "second": MergeCase}, monkeypatch, tmp_path)
    assert found == status
    assert words in capsys.readouterr().out
    assert [row["outcome"] for row in rows] == [words.split(":")[0], "ok"]


def test_a_case_that_hangs_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []

    def end(status: int) -> None:
        statuses.append(status)
        Hanging.ended.set()

    monkeypatch.setattr(os, "_exit", end)
    _, rows = rows_of({"hangs": Hanging}, monkeypatch, tmp_path, "--hang", "0.01")
    assert statuses == [1]
    assert rows[0]["outcome"] == "failed"
    assert rows[0]["reason"] == "no end after 0.01 s"


def test_kernels_of_other_chips_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    verdict = check_op(MoveCase, "tpu", 0)
    assert (verdict.outcome, verdict.reason) == ("cannot", "it needs a TPU, jax's devices are gpu")


def test_a_record_names_the_functions_that_ran_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What failed is not recorded; what an earlier run recorded stays."""
    monkeypatch.setattr(ran_on, "RECORD", tmp_path / "ran_on.json")
    ran_on.record({"gpu": ["kv_write"]})
    ran_on.record(
        check.Report({}, None, [check_op(MoveCase, "gpu", 0), check_op(Wrong, "gpu", 0)]).ran_right(case_types())
    )
    found = json.loads((tmp_path / "ran_on.json").read_text())
    assert found == {"cpu": {"gpu": ["copy_pages", "gather_pages", "kv_write", "scatter_pages", "zero_pages"]}}


def test_every_op_is_checked_on_each_of_its_backends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The command has no list of ops."""
    seen: list[tuple[str, str]] = []

    def note(case_type: type[MergeCase], backend: str, seed: int) -> Any:
        seen.append((case_type.op, backend))
        return check.Verdict(case_type.op, backend, {})

    monkeypatch.setattr(check, "check_op", note)
    assert main(["check"]) == 0
    assert seen == [(op, backend) for op, case_type in case_types().items() for backend in case_type.backends]
    assert np.unique([op for op, _ in seen]).size >= 9
