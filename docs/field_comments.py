"""For the site: the comment beside a parameter or a dataclass's field becomes its text among the parameters.

Flow:    source of a class -> [FieldComments] -> its docstring with an `Args:` list -> mkdocstrings

A comment stands at the end of the field's line, or on the lines above it. What a docstring lists already stays.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    """An extension of griffe, which reads the sources for mkdocstrings."""

    def __init__(self) -> None:
        self.texts: dict[str, dict[str, str]] = {}  # by class: the comment of each field or parameter

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        """Notes the comments of a class while its source is at hand."""
        comments = comments_of(cls)
        fields = [part for part in node.body if is_parameter(part)]
        texts = {part.target.id: comment_at(comments, part.lineno, part.end_lineno) for part in fields}
        for part in node.body:
            if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                for arg in (*part.args.args, *part.args.kwonlyargs):
                    texts[arg.arg] = comment_at(comments, arg.lineno, arg.end_lineno)
        self.texts[cls.path] = {name: text for name, text in texts.items() if text}

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Adds to every constructor's docstring what the class and its bases say of the parameters."""
        classes = {
            path: pkg[path.removeprefix(f"{pkg.path}.")] for path in self.texts if path.startswith(f"{pkg.path}.")
        }
        for cls in classes.values():
            _add(self._texts_of(cls, classes), cls)

    def _texts_of(self, cls: griffe.Class, classes: dict[str, griffe.Class]) -> dict[str, str]:
        """The text of each parameter: of the class that `others:` names, of bases, comments, then docstrings."""
        said = owner_of(cls).docstring.value if owner_of(cls).docstring else ""
        named = re.search(r"^ +others: .*`(\w+)`", said, re.MULTILINE)
        others = [one for one in classes.values() if named and one.name == named[1]]
        texts = self._texts_of(others[0], classes) if others else {}
        for base in reversed([cls, *cls.mro()]):
            texts |= self.texts.get(base.path, {})
        return texts | listed(said)


def owner_of(cls: griffe.Class) -> griffe.Class | griffe.Function:
    """What has the docstring of the constructor."""
    init = cls.members.get("__init__")
    return init if isinstance(init, griffe.Function) and init.docstring else cls


def listed(docstring: str) -> dict[str, str]:
    """What the `Args:` of a docstring say, each in one line."""
    found = re.search(r"^Args:\n((?: .*\n?|\n(?= ))*)", docstring, re.MULTILINE)
    parts = re.findall(r"^ {4}(\w+): (.*(?:\n {5,}.*)*)", found[1] if found else "", re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in parts if name != "others"}


def _add(texts: dict[str, str], cls: griffe.Class) -> None:
    owner = owner_of(cls)
    is_made_by_fields = "__init__" not in cls.members
    names = list(texts) if is_made_by_fields else [parameter.name for parameter in cls.parameters]
    said = owner.docstring.value if owner.docstring else ""
    if owner.docstring is None:
        owner.docstring = griffe.Docstring("", parent=owner, parser="google")
    rest = re.sub(r"^Args:\n(?: .*\n?|\n(?= ))*", "", said, flags=re.MULTILINE).strip()
    lines = [f"    {name}: {texts[name]}" for name in names if texts.get(name)]
    if lines:
        head, found, tail = rest.partition("\nRaises:\n")
        owner.docstring.value = head.rstrip() + "\n\nArgs:\n" + "\n".join(lines) + "\n" + (found + tail)


def is_parameter(part: ast.stmt) -> bool:
    """Whether a statement in a class body is a field that a dataclass's constructor takes."""
    if not (isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)):
        return False
    return "ClassVar" not in ast.unparse(part.annotation) and "init=False" not in ast.unparse(part)


def comments_of(cls: griffe.Class) -> dict[int, tuple[str, bool]]:
    """By line of the class's file: its comment, and whether the line has nothing else."""
    source = "\n".join(cls.lines_collection[cls.filepath])
    found = {}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            is_alone = token.line.lstrip().startswith("#")
            found[token.start[0]] = (token.string.lstrip("# "), is_alone)
    return found


def comment_at(comments: dict[int, tuple[str, bool]], first: int, last: int) -> str:
    """The comment at the end of line `last`, else the comment lines above `first`, in one line; "" without any."""
    text, is_alone = comments.get(last, ("", True))
    if not is_alone:
        return text
    lines: list[str] = []
    while comments.get(first - 1, ("", False))[1]:
        first -= 1
        lines.insert(0, comments[first][0])
    return " ".join(lines)
