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
        for path in self.texts:
            if path.startswith(f"{pkg.path}."):
                self._add_to(pkg[path.removeprefix(f"{pkg.path}.")])

    def _add_to(self, cls: griffe.Class) -> None:
        texts: dict[str, str] = {}
        for base in reversed([cls, *cls.mro()]):
            texts |= self.texts.get(base.path, {})
        init = cls.members.get("__init__")
        owner = init if isinstance(init, griffe.Function) and init.docstring else cls
        names = list(texts) if init is None else [parameter.name for parameter in cls.parameters]
        said = owner.docstring.value if owner.docstring else ""
        left = [name for name in names if name in texts and not re.search(rf"^ +{name}:", said, re.MULTILINE)]
        new = [f"    {name}: {texts[name]}" for name in left]
        if not new:
            return
        if owner.docstring is None:
            owner.docstring = griffe.Docstring("", parent=owner, parser="google")
        head, found, tail = said.partition("\nArgs:\n")
        text = f"{head}\nArgs:\n" + "\n".join(new) + "\n" + tail if found else f"{said}\n\nArgs:\n" + "\n".join(new)
        owner.docstring.value = text


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
