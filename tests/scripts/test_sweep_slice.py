"""The slice of the sweep that a seed chooses, and what it says of itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.sweep_slice import SHARE, in_slice

ROOT = Path(__file__).parents[2]
CASES = [f"tests/test_a.py::test_law[{number}]" for number in range(995)]


def test_a_seed_names_a_tenth_whatever_the_order() -> None:
    kept = in_slice(CASES, "3f2a")
    assert len(set(kept)) == len(kept) == 100
    assert in_slice(CASES[::-1], "3f2a") == kept
    assert set(kept) <= set(CASES)


def test_seeds_cover_all_cases_in_time() -> None:
    """Each case is in a slice with a chance of one in ten: hardly any is in none of 60."""
    seen = {case for seed in range(60) for case in in_slice(CASES, str(seed))}
    assert len(CASES) - len(seen) < 20
    assert in_slice(CASES, "0") != in_slice(CASES, "1")


def test_what_there_is_no_time_for_is_left_out_and_counted() -> None:
    options = ["-q", "-p", "no:cacheprovider", "-m", "sweep", "--sweep-slice", "3f2a", "--sweep-seconds", "0"]
    command = [sys.executable, "-m", "pytest", *options, "tests/tiers/stores/test_host_store.py"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    count = 400 // SHARE
    assert f"sweep slice of 3f2a: 0 cases in 0 s of all processes, {count} left out after 0 s" in run.stdout
