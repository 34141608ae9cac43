"""Lists every setting of every family, and how its values are accounted for (scripts/goldens/setting_goldens.py).

Usage:   python scripts/list_settings.py [ARCHITECTURE ...] [--refusals]

A line is a key of transformers' configuration class, then how many of its values are a case (logits equal those of
transformers), change nothing, are refused by name, or do not run in transformers; `missing` is what nobody accounts
for. The exit status is 1 where there are any.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.goldens.setting_goldens import ACCOUNTS, ARCHITECTURES, Case, cases_of


def words(cases: list[Case]) -> str:
    """How the values of one key are accounted for."""
    counts = Counter(case.account for case in cases)
    return ", ".join(f"{name} {counts[name]}" for name in ACCOUNTS if counts[name])


def list_settings(architecture: str, *, with_refusals: bool) -> Counter[str]:
    """Prints one architecture's settings; counts of its accounts."""
    cases = [case for case in cases_of(architecture) if case.key]
    print(f"\n{architecture}: {words(cases)}")
    for key in dict.fromkeys(case.key for case in cases):
        own = [case for case in cases if case.key == key]
        print(f"    {key:36} {words(own)}")
        for case in own:
            if case.account == "missing" or (with_refusals and case.account == "refused"):
                print(f"        {case.change}: {case.config if isinstance(case.config, str) else case.effect}")
    return Counter(case.account for case in cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", metavar="ARCHITECTURE", help=f"out of {', '.join(ARCHITECTURES)}")
    parser.add_argument("--refusals", action="store_true", help="print what is refused, and the words of it")
    args = parser.parse_args()
    total: Counter[str] = Counter()
    for architecture in args.architectures or ARCHITECTURES:
        total += list_settings(architecture, with_refusals=args.refusals)
    print(f"\nAll: {', '.join(f'{name} {total[name]}' for name in ACCOUNTS)}")
    sys.exit(1 if total["missing"] else 0)


if __name__ == "__main__":
    main()
