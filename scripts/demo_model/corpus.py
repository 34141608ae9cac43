"""The demo model's training text: the Python reference manual and docstrings that every Python carries.

Flow:    pydoc_data.topics, docstrings of the standard library -> [demo_documents] -> dialogues and prose
Source:  both are part of Python, under the PSF licence (https://docs.python.org/3/license.html)
"""

from __future__ import annotations

import importlib
import inspect
import re
import warnings
from dataclasses import dataclass
from random import Random

from kvjax.demo.conversations import SYSTEM_TEXT, render_turn

# Modules that a reader knows; a small model cannot learn the docstrings of all of them.
_LIBRARY_MODULES = """
    argparse bisect builtins collections contextlib copy csv dataclasses datetime enum functools glob heapq itertools
    json logging math operator os os.path pathlib queue random re shutil string subprocess tempfile textwrap threading
    time types urllib.parse uuid zipfile
"""
_MAX_ANSWER_CHARS = 420
_SYSTEM_SHARE = 0.5


@dataclass(frozen=True)
class Section:
    """A headed part of the manual: its paragraphs as single lines, code and tables left out."""

    title: str
    paragraphs: tuple[str, ...]


def _paragraph(lines: list[str]) -> str | None:
    """The lines as one, or None for code, grammar, tables and footnotes."""
    first = lines[0]
    if first.startswith(("   ", "+", "|", "[", "-[", ">>>", ".. ")) or "::=" in " ".join(lines):
        return None
    return re.sub(r"\s+", " ", " ".join(lines)).strip()


def manual_sections(text: str) -> list[Section]:
    """Sections of one topic: a heading is a line above a row of `*`, `=`, `-` or `~`."""
    sections: list[tuple[str, list[str]]] = []
    for chunk in re.split(r"\n\s*\n", text):
        lines = [line.rstrip() for line in chunk.split("\n") if line.strip()]
        if len(lines) >= 2 and re.fullmatch(r"[*=\-~^]{3,}", lines[1]):
            sections.append((lines[0].strip(), []))
            lines = lines[2:]
        if lines and sections and (paragraph := _paragraph(lines)):
            sections[-1][1].append(paragraph)
    return [Section(title, tuple(paragraphs)) for title, paragraphs in sections if paragraphs]


def _all_sections() -> list[Section]:
    from pydoc_data.topics import topics

    seen: dict[str, Section] = {}
    for name in sorted(topics):
        for section in manual_sections(topics[name]):
            seen.setdefault(section.paragraphs[0], section)
    return list(seen.values())


def _clean_docstring(text: str | None) -> str | None:
    """The first paragraphs of a docstring as prose, up to the length of an answer; None if there is too little."""
    kept: list[str] = []
    for chunk in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        paragraph = _paragraph(chunk.split("\n")) if chunk.strip() else None
        if (
            paragraph is None
            or not re.search(r"[a-z]{3}.*[.:]$", paragraph)
            or re.match(r"\S+\(.*\)( ->|$)", paragraph)
        ):
            if kept:
                break
            continue
        if sum(map(len, kept)) + len(paragraph) > _MAX_ANSWER_CHARS:
            break
        kept.append(paragraph)
    return " ".join(kept) if kept and len(" ".join(kept)) >= 30 else None


def _public_docstrings(module_name: str) -> dict[str, str]:
    """Names of a module's functions, classes and methods with their docstrings, cleaned."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            return {}
    found: dict[str, str] = {}
    for name, value in sorted(vars(module).items()):
        if name.startswith("_") or getattr(value, "__module__", None) not in (module_name, "posix", f"_{module_name}"):
            continue
        members = {f"{module_name}.{name}": value}
        if inspect.isclass(value):
            members |= {f"{module_name}.{name}.{n}": v for n, v in sorted(vars(value).items()) if n[0] != "_"}
        for full_name, member in members.items():
            if callable(member) and (text := _clean_docstring(getattr(member, "__doc__", None))):
                found[full_name] = text
    return found


def _library() -> dict[str, str]:
    """Docstrings by name; a text that several names share is kept once."""
    entries: dict[str, str] = {}
    for module in _LIBRARY_MODULES.split():
        # The functions of os.path name the platform's module as theirs.
        found = _public_docstrings("posixpath" if module == "os.path" else module)
        seen = set(entries.values())
        entries |= {name.replace("posixpath", "os.path"): text for name, text in found.items() if text not in seen}
    return entries


def _answers(section: Section) -> list[str]:
    """The section's paragraphs, joined or cut at sentences to the length of an answer."""
    answers: list[str] = []
    for paragraph in section.paragraphs:
        for sentence in re.split(r"(?<=[.:]) (?=[A-Z\"*(])", paragraph):
            if answers and len(answers[-1]) + len(sentence) < _MAX_ANSWER_CHARS:
                answers[-1] += " " + sentence
            else:
                answers.append(sentence)
    return answers


def _system(random: Random) -> str:
    return SYSTEM_TEXT if random.random() < _SYSTEM_SHARE else ""


def _opening(section: Section, random: Random) -> str:
    return random.choice(["What does the manual say about {}?", "Tell me about {}."]).format(section.title)


def _manual_dialogues(section: Section, random: Random) -> list[str]:
    """The section as question, answer, "Go on." and so forth, a few turns a dialogue."""
    answers = _answers(section)
    dialogues = []
    for start in range(0, len(answers), 3):
        text = _system(random)
        opening = _opening(section, random) if start == 0 else f"Go on about {section.title}."
        for turn, answer in enumerate(answers[start : start + 4]):
            text += render_turn("Go on." if turn else opening, answer)
        dialogues.append(text)
    return dialogues


def _mixed_dialogues(sections: list[Section], random: Random) -> list[str]:
    """Dialogues about three sections each: how each begins, and for some how it goes on."""
    shuffled = random.sample(sections, len(sections))
    dialogues = []
    for start in range(0, len(shuffled), 3):
        text = _system(random)
        for section in shuffled[start : start + 3]:
            for turn, answer in enumerate(_answers(section)[: random.choice([1, 1, 2])]):
                text += render_turn("Go on." if turn else _opening(section, random), answer)
        dialogues.append(text)
    return dialogues


def _library_dialogues(random: Random) -> list[str]:
    """Questions about names of the library in random order, six a dialogue."""
    entries = _library()
    names = random.sample(list(entries), len(entries))
    return [
        _system(random) + "".join(render_turn(f"What does {name} do?", entries[name]) for name in names[i : i + 6])
        for i in range(0, len(names), 6)
    ]


def demo_documents(seed: int) -> list[str]:
    """All documents of one pass in random order: prose and dialogues of the manual, dialogues about the library."""
    random = Random(seed)
    sections = _all_sections()
    documents = _mixed_dialogues(sections, random) + _library_dialogues(random)
    for section in sections:
        documents += _manual_dialogues(section, random)
        prose = _answers(section)
        documents += ["\n\n".join([section.title, *prose[i : i + 4]]) for i in range(0, len(prose), 4)]
    random.shuffle(documents)
    return documents
