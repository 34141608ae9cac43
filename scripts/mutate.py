"""Changes one operator, number, condition or loop of kvjax at a time and says which changes no test notices.

    scripts/mutate.py --of kvjax/core/pool --tests tests/core/pool --count 40 --results pool.jsonl

Flow:    sites of operators -> [draw by seed] -> pytest on a copy of the tree -> JSON lines -> diffs of survivors, table
Source:  cosmic-ray (https://cosmic-ray.readthedocs.io): operators, and how they change the text of a module

Needs `pip install -e .[test,mutation]`. The working tree is copied once and never written. A call that was interrupted
goes on from its results when it is repeated. What survivors were: docs/mutants.md.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import difflib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.provider import OperatorProvider

Mutant = tuple[dict[str, Any], str]  # its file, line, operator and diff; the module's text
ROOT = Path(__file__).resolve().parents[1]
NOT_COPIED = shutil.ignore_patterns(".git", ".venv*", ".*cache", ".hypothesis", "__pycache__")
PYTEST = (sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=0")
# Slips of the pen. Of other changes, the first test that runs `%` for `+` fails; `is` for `==` is a matter of style.
SLIPS = re.compile(
    r".*_(Add_Sub|Sub_Add|Mul_FloorDiv|(Div|FloorDiv|Pow)_Mul|Mod_FloorDiv|[RL]Shift_[RL]Shift|Bit(Or|Xor)_BitAnd"
    r"|BitAnd_BitOr|Delete_\w+|Is_IsNot|IsNot_Is|(Eq|NotEq|[LG]tE?)_(Eq|NotEq|[LG]tE?))|(?!Remove|Variable)[^_]+"
)
OPERATORS = {name: OperatorProvider()[name] for name in OperatorProvider() if SLIPS.fullmatch(name)}


def files_in(root: Path, places: list[str], pattern: str) -> list[str]:
    """The files among `places`, and the files of this pattern in the folders among them."""
    paths = [path for place in places for path in (root / place, *(root / place).rglob(pattern)) if path.is_file()]
    if not paths:
        raise SystemExit(f"expected {pattern} in {' '.join(places)}, found none: name paths of the repository")
    return sorted({str(path.relative_to(root)) for path in paths})


def is_left_out(node: Any) -> bool:
    """Whether no test should hold the text: annotations, `strict=`, what is raised, what describes an object."""
    while node.parent is not None:
        before, kind = node.get_previous_sibling(), node.parent.type
        if before == "->" or (before == ":" and kind in ("tfpdef", "annassign")) or kind == "raise_stmt":
            return True
        if before == "=" and node.parent.get_first_leaf().value == "strict":
            return True
        if node.type == "funcdef" and node.name.value in ("__repr__", "__str__", "describe"):
            return True
        node = node.parent
    return False


def mutants(root: Path, places: list[str], seed: int) -> Iterator[Mutant]:
    """One mutant of each site of these modules, in the order that the seed draws."""
    sites: dict[tuple[str, int, int], list[tuple[str, int]]] = defaultdict(list)  # operators, which of their changes
    for file in files_in(root, places, "*.py"):
        nodes = list(ast_nodes(get_ast((root / file).read_text())))
        for name, operator in OPERATORS.items():
            positions = [(start, node) for node in nodes for start, _ in operator().mutation_positions(node)]
            for occurrence, (start, node) in enumerate(positions):
                if not is_left_out(node):
                    sites[file, *start].append((name, occurrence))
    rng = random.Random(seed)
    for file, line, column in rng.sample(sorted(sites), len(sites)):
        name, occurrence = rng.choice(sites[file, line, column])
        source = (root / file).read_text()
        text = mutate_code(source, OPERATORS[name](), occurrence)
        diff = difflib.unified_diff(source.splitlines(), text.splitlines(), file, file, n=0, lineterm="")
        with contextlib.suppress(SyntaxError):
            compile(text, file, "exec", dont_inherit=True)
            yield {"file": file, "line": line, "operator": name, "diff": "\n".join(diff)}, text


def nearest_first(tests: list[str], module: str) -> list[str]:
    """Tests whose paths share the most names with the module's come first, since they fail most often."""
    return sorted(tests, key=lambda test: -len(set(re.split(r"/|\.|test_", test)) & set(re.split(r"/|\.", module))))


async def run_tests(tree: Path, tests: list[str], timeout: float | None) -> dict[str, Any]:
    """Outcome, seconds and the end of pytest's output; whatever the tests started is dead afterwards."""
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        process = await asyncio.create_subprocess_exec(
            *PYTEST, *tests, cwd=tree, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            outcome = "killed" if await asyncio.wait_for(process.wait(), timeout) else "survived"
        except TimeoutError:
            outcome = "timeout"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        out.seek(0)
        return {"outcome": outcome, "seconds": round(time.monotonic() - began, 1), "output": out.read()[-1000:]}


async def run_mutants(left: Iterator[Mutant], trees: list[Path], options: Any, rows: dict[str, Any]) -> None:
    """Adds the row of each mutant to `rows` and to the results; as many run at a time as the tree has copies."""
    tests = files_in(trees[0], options.tests, "test_*.py")
    unchanged = await run_tests(trees[0], tests, None)
    if unchanged["outcome"] != "survived":
        raise SystemExit(f"expected tests that pass before any change, got\n{unchanged['output']}")
    timeout = options.timeout or 10 * unchanged["seconds"] + 5

    async def work(tree: Path) -> None:
        for mutant, text in left:
            path = tree / mutant["file"]
            source = path.read_text()
            path.write_text(text)
            rows[mutant["diff"]] = row = mutant | await run_tests(tree, nearest_first(tests, mutant["file"]), timeout)
            path.write_text(source)
            with options.results.open("a") as results:
                results.write(json.dumps(row) + "\n")
            print("{outcome:8} {seconds:6} s  {file}:{line} {operator}".format(**row), flush=True)

    await asyncio.gather(*map(work, trees))


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--of", nargs="+", required=True, help="modules and folders that are changed")
    parser.add_argument("--tests", nargs="+", required=True, help="files and folders of tests")
    parser.add_argument("--count", type=int, default=100, help="mutants (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: %(default)s)")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines; a later call goes on from them")
    parser.add_argument("--again", action="store_true", help="run survivors once more, after tests were added")
    parser.add_argument("--timeout", type=float, help="seconds (default: 5, and 10 times those of unchanged modules)")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time (default: %(default)s)")
    options = parser.parse_args(arguments)
    options.results.touch()
    rows = {row["diff"]: row for row in map(json.loads, options.results.read_text().splitlines())}
    settled = {diff for diff, row in rows.items() if not (options.again and row["outcome"] == "survived")}
    with tempfile.TemporaryDirectory() as folder:
        trees = [shutil.copytree(root, Path(folder) / str(job), ignore=NOT_COPIED) for job in range(options.jobs)]
        drawn = list(islice(mutants(trees[0], options.of, options.seed), options.count))
        if todo := [mutant for mutant in drawn if mutant[0]["diff"] not in settled]:
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(run_mutants(iter(todo), trees, options, rows))
    found = [rows[mutant["diff"]] for mutant, _ in drawn if mutant["diff"] in rows]
    print("\n".join(row["diff"] for row in found if row["outcome"] == "survived"))
    counts = Counter((row["outcome"], file) for row in found for file in (row["file"], f"of {len(drawn)} mutants"))
    print("\n".join(f"{count:6} {outcome:8} {file}" for (outcome, file), count in sorted(counts.items())))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))  # a loop without end can fill the machine's memory
    sys.exit(main())
