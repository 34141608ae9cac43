"""Puts a changed module into a running process: new code into its functions, or a changed import.

Flow:    Change -> mutated source -> [patch_functions] in a process that has imported all, [import_changed] before it

A function keeps its identity and its module's globals; only `__code__` is another. That serves whatever refers to it,
and costs a compile instead of the import of every test.
"""

from __future__ import annotations

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType

FunctionsByCode = dict[tuple[str, str, int], list[FunctionType]]  # (file, qualified name, first line)


class CannotPatchError(Exception):
    """The change is not inside functions that exist: import the module anew."""


def functions_by_code(folder: Path) -> FunctionsByCode:
    """Every function of the folder's modules that lives in this process."""
    found: FunctionsByCode = defaultdict(list)
    for value in gc.get_objects():
        if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(f"{folder}/"):
            found[_place(value.__code__)].append(value)
    return found


def patch_functions(path: Path, source: str, mutated: str, functions: FunctionsByCode) -> None:
    """Gives the functions that differ in `mutated` their new code."""
    olds = list(_outer_functions(compile(source, str(path), "exec", dont_inherit=True)))
    news = list(_outer_functions(compile(mutated, str(path), "exec", dont_inherit=True)))
    if [old.co_qualname for old in olds] != [new.co_qualname for new in news]:
        raise CannotPatchError("expected the same functions, got others")
    patched = 0
    for old, new in zip(olds, news, strict=True):
        if old == new:
            continue
        for function in functions.get(_place(old), []):
            if function.__code__.co_freevars != new.co_freevars:
                raise CannotPatchError(f"{old.co_qualname} closes over other names")
            function.__code__ = new
            patched += 1
    if not patched:
        raise CannotPatchError("no function differs")


def import_changed(name: str, path: Path, mutated: str) -> None:
    """Has the next import of module `name` run `mutated`."""
    sys.meta_path.insert(0, _ChangedModule(name, path, mutated))


class _ChangedModule(importlib.abc.MetaPathFinder, importlib.machinery.SourceFileLoader):
    """Finds and loads one module, from text in place of its file."""

    def __init__(self, name: str, path: Path, mutated: str) -> None:
        super().__init__(name, str(path))
        self._mutated = mutated

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self)

    def get_code(self, fullname: str) -> CodeType:
        return compile(self._mutated, self.path, "exec", dont_inherit=True)


def _outer_functions(code: CodeType) -> Iterator[CodeType]:
    """Functions of the module and methods of its classes; inner functions are part of these."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_OPTIMIZED:
                yield constant
            else:
                yield from _outer_functions(constant)


def _place(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno
