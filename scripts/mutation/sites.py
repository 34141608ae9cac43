"""All single-operator changes of modules, and a random sample of them.

Flow:    modules -> operators -> [sites] -> sample(seed, count) -> the server that runs tests

A site is a place and its kind of change; a site with several changes (`<` to `<=`, `>`, ...) counts once in the sample,
which takes one of them. The sample orders sites by a hash of the seed, the module, the function and the line's text, so
that a change elsewhere in the tree leaves it as it was. Left out, since no test should hold them: annotations, blocks
under TYPE_CHECKING, aliases of types, what is raised or warned with (message texts), `__repr__`, `__str__`, `describe`,
and `strict=True` of `zip`, which is a check of its own.
"""

from __future__ import annotations

import ast
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from mutation.operators import CHANGED_NAMES, operators

Span = tuple[tuple[int, int], tuple[int, int]]  # (first line, column), (last line, end column)

TEXT_FUNCTIONS = ("__repr__", "__str__", "describe")  # and functions whose name begins so
PUNCTUATION = frozenset("()[]{}.,:=")
NOT_BINARY = frozenset({"parameters", "lambdef", "dictorsetmaker"})  # the bare `*` of a signature, `**` of a display
MESSAGE_CALLS = frozenset({"warn", "debug", "info", "warning", "error", "exception"})


@dataclass(frozen=True)
class Change:
    """One change of one module."""

    path: str  # of the module, relative to the repository
    line: int
    column: int
    operator: str
    occurrence: int  # which of the operator's changes in this module
    function: str  # qualified name; "" outside functions
    text: str  # the line, stripped
    key: str  # hash of seed, place and change: equal in every run while the line stands
    at_import: bool  # the change lies outside function bodies
    lines: tuple[int, ...]  # of the statement: a test that runs one of them may notice

    def mutated(self, source: str) -> str:
        """The module's source with the change made."""
        code = mutate_code(source, operators()[self.operator](), self.occurrence)
        assert code is not None, f"{self.operator} has no occurrence {self.occurrence} in {self.path}"
        return code


def modules_in(root: Path, places: Sequence[str]) -> list[Path]:
    """The modules that `places` are, or that lie in these folders."""
    paths = [path for place in places for path in (root / place, *(root / place).rglob("*.py"))]
    return sorted(path for path in paths if path.suffix == ".py")


def sample(root: Path, places: Sequence[str], seed: int, count: int) -> list[Change]:
    """The first `count` changes of the modules in `places` by hash order, in that order."""
    sites: dict[str, list[Change]] = defaultdict(list)
    for path in modules_in(root, places):
        for site, change in _changes_of(root, path, seed):
            sites[site].append(change)
    chosen: list[Change] = []
    for site in sorted(sites)[:count]:
        chosen.append(min(sites[site], key=lambda change: change.key))
    return chosen


def _changes_of(root: Path, path: Path, seed: int) -> list[tuple[str, Change]]:
    """(hash of the site, change) of every change of a module."""
    module = _Module(path.read_text())
    name = str(path.relative_to(root))
    nodes = [node for node in ast_nodes(get_ast(module.source)) if not _is_punctuation(node)]
    found: list[tuple[str, Change]] = []
    for operator, make in operators().items():
        family = operator.rsplit("_", 1)[0]  # `<` to `<=` and `<` to `>` are changes of one site
        occurrence = -1
        for node in nodes:
            for position_use, position in enumerate(make().mutation_positions(node)):
                occurrence += 1
                line, column = position[0]
                if module.is_left_out(line, column):
                    continue
                function, at_import = module.function_at(line, column)
                text = module.lines[line - 1].strip()
                indent = module.lines[line - 1].index(text)
                parts = (str(seed), name, function, text, str(module.twin(line, function)), str(column - indent))
                change = Change(
                    path=name,
                    line=line,
                    column=column,
                    operator=operator,
                    occurrence=occurrence,
                    function=function,
                    text=text,
                    key=_hash(*parts, operator, str(position_use)),
                    at_import=at_import,
                    lines=module.statement_lines(line, column),
                )
                found.append((_hash(*parts, family), change))
    return found


def _is_punctuation(node: Any) -> bool:
    """Leaves that no operator changes; most leaves are."""
    if node.parent is not None and node.parent.type in NOT_BINARY and getattr(node, "value", "") in ("*", "/", "**"):
        return True
    if node.type == "name":
        return node.value not in CHANGED_NAMES
    return (
        node.type in ("newline", "string", "fstring_string", "endmarker") or getattr(node, "value", "") in PUNCTUATION
    )


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


class _Module:
    """Where functions, statements and parts that are left out lie in a source."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.lines = source.splitlines()
        self._tree = ast.parse(source)

    def is_left_out(self, line: int, column: int) -> bool:
        return any(start <= (line, column) < end for start, end in self._left_out)

    def function_at(self, line: int, column: int) -> tuple[str, bool]:
        """(qualified name of the innermost function or class, whether the place runs when the module is imported)."""
        name, at_import = "", True
        for qualname, whole, body in self._scopes:
            if whole[0] <= (line, column) < whole[1]:
                name = qualname
                at_import = at_import and not (body is not None and body[0] <= (line, column) < body[1])
        return name, at_import

    def twin(self, line: int, function: str) -> int:
        """How many lines of the function above this one have the same text."""
        text = self.lines[line - 1].strip()
        start = max((scope[1][0][0] for scope in self._scopes if scope[0] == function), default=1)
        return sum(other.strip() == text for other in self.lines[start - 1 : line - 1])

    def statement_lines(self, line: int, column: int) -> tuple[int, ...]:
        """Lines of the innermost statement's own expressions: of an `if` its condition."""
        spans = [span for span in self._statements if span[0] <= (line, column) < span[1]]
        start, end = max(spans, default=((line, 0), (line, 0)))
        return tuple(range(start[0], end[0] + 1))

    def _span(self, node: ast.AST, last: ast.AST | None = None) -> Span:
        last = last or node
        assert isinstance(node, ast.stmt | ast.expr)
        assert isinstance(last, ast.stmt | ast.expr)
        assert last.end_lineno is not None
        assert last.end_col_offset is not None
        return (
            (node.lineno, self._column(node.lineno, node.col_offset)),
            (last.end_lineno, self._column(last.end_lineno, last.end_col_offset)),
        )

    def _column(self, line: int, offset: int) -> int:
        """ast counts bytes, parso characters."""
        return len(self.lines[line - 1].encode()[:offset].decode())

    @cached_property
    def _scopes(self) -> list[tuple[str, Span, Span | None]]:
        """(qualified name, span, span of the body or None for a class), outer before inner."""
        found: list[tuple[str, Span, Span | None]] = []

        def visit(node: ast.AST, outer: str) -> None:
            for child in ast.iter_child_nodes(node):
                if isinstance(child, ast.FunctionDef | ast.ClassDef):
                    name = f"{outer}.{child.name}" if outer else child.name
                    body = self._span(child.body[0], child.body[-1])
                    found.append((name, self._span(child), body if isinstance(child, ast.FunctionDef) else None))
                    visit(child, name)
                elif isinstance(child, ast.Lambda):
                    found.append((outer, self._span(child), self._span(child.body)))
                    visit(child, outer)
                else:
                    visit(child, outer)

        visit(self._tree, "")
        return found

    @cached_property
    def _statements(self) -> list[Span]:
        """Spans of statements; of a compound one, each expression before its body."""
        spans: list[Span] = []
        for node in ast.walk(self._tree):
            if isinstance(node, ast.stmt):
                if hasattr(node, "body"):
                    start = (node.lineno, self._column(node.lineno, node.col_offset))
                    spans.append((start, self._span(node.body[0])[0]))
                elif isinstance(node, ast.Match):
                    spans.append(self._span(node.subject))
                else:
                    spans.append(self._span(node))
            elif isinstance(node, ast.ExceptHandler) and node.type is not None:
                spans.append(self._span(node.type))
            elif isinstance(node, ast.match_case) and node.guard is not None:
                spans.append(self._span(node.guard))
        return spans or [((1, 0), (len(self.lines) + 1, 0))]

    @cached_property
    def _left_out(self) -> list[Span]:
        spans: list[Span] = []
        for node in ast.walk(self._tree):
            match node:
                case ast.FunctionDef(name=name) if name.startswith(TEXT_FUNCTIONS):
                    spans.append(self._span(node))
                case ast.FunctionDef(returns=ast.expr() as returns):
                    spans.append(self._span(returns))
                case ast.arg(annotation=ast.expr() as annotation) | ast.AnnAssign(annotation=annotation):
                    spans.append(self._span(annotation))
                case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                    spans.append(self._span(node))
                case ast.Raise(exc=ast.Call(args=args, keywords=keywords)):
                    spans += [self._span(argument) for argument in (*args, *(word.value for word in keywords))]
                case ast.Call(func=ast.Attribute(attr=attr), args=args) if attr in MESSAGE_CALLS:
                    spans += [self._span(argument) for argument in args]
                case ast.keyword(arg="strict", value=value):  # zip asserts with it what holds by construction
                    spans.append(self._span(value))
                case ast.Assert(msg=ast.expr() as message):
                    spans.append(self._span(message))
        for statement in self._tree.body:
            if isinstance(statement, ast.Assign) and _is_alias_of_types(statement.value):
                spans.append(self._span(statement))
        return spans


def _is_alias_of_types(value: ast.expr) -> bool:
    """`A | B`, `dict[str, int]`, `Callable[[int], None]`, outside functions."""
    if isinstance(value, ast.BinOp):
        return isinstance(value.op, ast.BitOr)
    return isinstance(value, ast.Subscript)
