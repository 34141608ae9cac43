"""Writes tests/quick_cases.json: of which parametrized tests the test command runs a few cases, the others are sweeps.

Usage:   scripts/test.sh --junitxml run.xml, then python scripts/quick_cases.py run.xml [--seconds 1] [--share 8]
Flow:    seconds of every case of a whole run -> tests whose cases take long together -> how many cases are kept

A test keeps one case in `--share`, at least one; cases are spread evenly over their order. Tests that are named in
`WHOLE` keep all, in `SHARES` one in so many, out of step with the levels of their parameters. `pytest -m sweep` runs
the others.
"""

from __future__ import annotations

import argparse
import json
import math
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

OUT = Path(__file__).parent.parent / "tests" / "quick_cases.json"
# By the beginning of a node id: cases that are cheap one by one and are the law: every pool size, every block of code.
WHOLE = ("tests/core/", "tests/replay/", "tests/test_architecture.py", "tests/test_docs.py")
SHARES = {
    "tests/core/eviction/test_bulk_equivalence.py::test_a_planned_step_equals_its_calls": 3,
    "tests/core/eviction/test_policies.py::test_agrees_with_its_naive_model": 2,
    "tests/core/kinds/test_contract.py::test_needed_blocks_are_taken_and_a_refusal_lacks_them": 3,
    "tests/core/kinds/test_retention.py::test_a_prompt_that_comes_again_hits_as_much_as_ever": 3,
    "tests/core/manager/test_answer_states.py::test_the_last_state_of_an_answer_stays_and_those_of_the_interval": 3,
    "tests/core/manager/test_can_admit.py::test_it_tells_what_an_admission_would_leave": 3,
    "tests/core/manager/test_exhaustion.py::test_a_refused_call_changes_nothing_at_any_pool_size": 2,
    "tests/core/manager/test_fork.py::test_everyone_reads_back_its_own_tokens": 3,
    "tests/core/manager/test_loads.py::test_everyone_attends_to_what_was_loaded": 2,
    "tests/core/manager/test_lookups_of_every_policy.py::test_a_lookup_finds_what_is_registered": 2,
    "tests/core/manager/test_reservations.py::test_every_admitted_request_finishes": 2,
    "tests/core/manager/test_settle_drafts.py::test_caches_what_a_manager_caches_that_never_drafted": 2,
    "tests/core/manager/test_settle_drafts.py::test_every_pool_size_ends_all_requests_or_refuses_them": 2,
    "tests/core/manager/test_shared_prompts.py::test_all_but_the_first_two_hit_what_they_share": 3,
    "tests/core/manager/test_step_planner.py::test_a_planned_step_equals_its_calls": 2,
    "tests/core/manager/test_sub_block_hits.py::test_everyone_reads_back_its_own_tokens": 2,
    "tests/core/manager/test_take_back_step.py::test_whatever_is_a_hit_is_written": 2,
    "tests/core/record/test_call_recorder.py::test_recorded_runs_replay_to_the_same_ids": 3,
    "tests/core/save/test_manager_state.py::test_deployments_with_reservations_and_more_continue_alike": 3,
    "tests/core/save/test_manager_state.py::test_restored_and_continued_equals_continued": 2,
    "tests/device/pages/test_idle_states.py::test_moves_agree_with_numpy_and_touch_nothing_else": 2,
    "tests/device/steps/test_flags.py::test_a_step_computes_the_same": 2,
    "tests/engine/requests/test_given_arrays.py::test_prompts_and_inputs_are_what_they_were_when_they_were_given": 3,
    "tests/models/test_families.py::test_prefill_and_decoding_are_hugging_faces": 3.5,
    "tests/pallas_kernels/test_flags.py::test_an_op_computes_the_same": 330,
    "tests/pallas_kernels/test_flags.py::test_an_op_is_the_same_program": 96,
    "tests/pallas_kernels/test_slab_pages.py::test_pages_are_written_and_read_as_in_arrays_of_their_own": 2,
}


def seconds_of_cases(path: Path) -> dict[str, list[float]]:
    """Seconds of each case, by the test's node id, of a run that pytest wrote as JUnit XML."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        module = case.get("classname", "").replace(".", "/") + ".py"
        seconds[f"{module}::{case.get('name', '').split('[')[0]}"].append(float(case.get("time", 0)))
    return seconds


def kept_cases(seconds: dict[str, list[float]], least_seconds: float, share: int) -> dict[str, int]:
    """Cases that a test keeps, for those that take `least_seconds` together."""
    kept = {
        test: max(1, math.ceil(len(cases) / share))
        for test, cases in seconds.items()
        if len(cases) > 1 and sum(cases) >= least_seconds and not test.startswith(WHOLE)
    }
    kept |= {test: _out_of_step(len(seconds[test]), own) for test, own in SHARES.items() if test in seconds}
    return dict(sorted(kept.items()))


def _out_of_step(num_cases: int, share: float) -> int:
    """One case in `share`, and one more where these would stand a whole number apart, perhaps all of one level."""
    count = math.ceil(num_cases / share)
    return count + (num_cases % count == 0)


def main() -> None:
    """Writes the file, and says what it saves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path, help="JUnit XML of a run of all cases")
    parser.add_argument("--seconds", type=float, default=1.0, help="tests of so many in all (default: 1)")
    parser.add_argument("--share", type=int, default=8, help="one case in so many is kept (default: 8)")
    args = parser.parse_args()
    seconds = seconds_of_cases(args.junit)
    kept = kept_cases(seconds, args.seconds, args.share)
    OUT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    before = sum(map(sum, seconds.values()))
    saved = sum(sum(seconds[test]) * (1 - count / len(seconds[test])) for test, count in kept.items())
    print(f"{before:,.0f} s of all cases; {before - saved:,.0f} s with {len(kept)} tests cut to a few")


if __name__ == "__main__":
    main()
