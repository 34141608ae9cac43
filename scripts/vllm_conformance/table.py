"""The table of docs/vllm.md: per file of vLLM's tests what passed with kvjax, what does not apply and why, what failed.

Usage:   python table.py FOLDER, with the own.xml, kvjax.xml and touched.txt that vllm_conformance.sh leaves there
Flow:    junit files of two passes, reasons.json -> [table] -> Markdown; the exit status is 1 if anything failed

A test counts as failed if it passes with vLLM's manager, fails with kvjax's, and no reason below covers it.
"""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

REASONS = json.loads((Path(__file__).parent / "reasons.json").read_text())


def outcomes(path: Path) -> dict[str, tuple[str, str]]:
    """By test: passed, skipped or failed, and the message."""
    found = {}
    for case in ET.parse(path).iter("testcase"):
        parts = (case.get("classname") or "").split(".")
        file = max(i for i, part in enumerate(parts) if part.startswith("test"))
        name = "::".join([f"{parts[file]}.py", *parts[file + 1 :], case.get("name") or ""])
        result, message = "passed", ""
        for child in case:
            if child.tag in ("failure", "error"):
                result, message = "failed", f"{child.get('message') or ''} {child.text or ''}"
            elif child.tag == "skipped":
                result = "skipped"
        found[name] = (result, message)
    return found


def reason_of(version: str, name: str, message: str) -> str | None:
    """Why a test does not apply: what it makes has no counterpart, or a rule is another on purpose."""
    if "has no counterpart in kvjax.core" in message or "no kind of kvjax.core is what" in message:
        what = re.search(r"(\w+(?:\.\w+)?)=\S+(?: with [\w=]+(?: \w+)?)? has no counterpart|what (\w+) is", message)
        return f"refused by name: `{what[1] or what[2]}`" if what else None
    for reason in REASONS:
        if version.startswith(tuple(reason["releases"])) and re.search(reason["tests"], name):
            return str(reason["why"])
    return None


def main() -> int:
    """Prints the table and the reasons."""
    home = Path(sys.argv[1])
    own, ours = outcomes(home / "own.xml"), outcomes(home / "kvjax.xml")
    touched = {
        Path(line.split("::")[0]).name + "::" + line.split("::", 1)[1]
        for line in (home / "touched.txt").read_text().splitlines()
        if "::" in line
    }
    rows: dict[str, Counter[str]] = {}
    reasons: Counter[tuple[str, str]] = Counter()
    failed = []
    for name, (result, message) in sorted(ours.items()):
        file = name.split("::")[0]
        row = rows.setdefault(file, Counter())
        row["own"] += own.get(name, ("", ""))[0] == "passed"
        row["through kvjax"] += result == "passed" and name in touched
        row["other"] += result == "passed" and name not in touched
        if result == "failed" and own.get(name, ("", ""))[0] == "passed":
            why = reason_of(home.name, name, message)
            row["not applicable" if why else "failed"] += 1
            if why:
                reasons[file, why] += 1
            else:
                failed.append(name)
        elif result == "failed":
            row["fails with vLLM's own"] += 1
    columns = ("own", "through kvjax", "other", "not applicable", "failed", "fails with vLLM's own")
    print(
        "| file | passed with vLLM's | with kvjax's | no manager made | not applicable | failed |"
        " fails either way |\n|---|---|---|---|---|---|---|"
    )
    for file, row in rows.items():
        print(f"| `{file}` | " + " | ".join(str(row[column]) for column in columns) + " |")
    print("\n| file | tests | why not applicable |\n|---|---|---|")
    for (file, why), count in sorted(reasons.items()):
        print(f"| `{file}` | {count} | {why} |")
    print("\n".join(["", *(f"failed: {name}" for name in failed)]))
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
