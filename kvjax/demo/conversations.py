"""Conversations with the demo model that share prefixes: one system text, four topics, several turns each.

Flow:    [demo_requests] -> texts -> tokenizer -> requests of `kvjax generate`

The form is the one that the demo model was trained on (scripts/demo_model/corpus.py). The answers inside the prompts
are taken from the Python reference manual, so later turns of a topic repeat the text of its earlier ones.
"""

from __future__ import annotations

from dataclasses import dataclass

END_OF_TURN = "<end_of_turn>"
SYSTEM_TEXT = (
    "This is a conversation with a guide to the Python language. The guide has read the reference manual and the "
    "documentation of the standard library. It answers in plain English, names the objects, statements and methods "
    "that matter, and says what happens in the usual case first and in the special cases after that.\n\n"
)

# Per topic: (question, answer) turns; the last turns have no answer, one request each.
_TOPICS: dict[str, tuple[tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    "exceptions": (
        (
            (
                "What does the manual say about Exceptions?",
                "Exceptions are a means of breaking out of the normal flow of control of a code block in order to "
                "handle errors or other exceptional conditions. An exception is *raised* at the point where the error "
                "is detected; it may be *handled* by the surrounding code block or by any code block that directly or "
                "indirectly invoked the code block where the error occurred.",
            ),
            (
                "Go on.",
                "The Python interpreter raises an exception when it detects a run-time error (such as division by "
                'zero). A Python program can also explicitly raise an exception with the "raise" statement. Exception '
                'handlers are specified with the "try" … "except" statement.',
            ),
        ),
        ("Go on.", 'Tell me about the "try" statement.', 'Tell me about the "raise" statement.'),
    ),
    "classes": (
        (
            (
                "What does the manual say about Class definitions?",
                "A class definition defines a class object (see section The standard type hierarchy): A class "
                "definition is an executable statement. The inheritance list usually gives a list of base classes (see "
                "Metaclasses for more advanced uses), so each item in the list should evaluate to a class object which "
                "allows subclassing. Classes without an inheritance list inherit, by default, from the base class "
                '"object"; hence,',
            ),
        ),
        ("Go on.", "Tell me about Metaclasses.", "What does the manual say about Function definitions?"),
    ),
    "objects": (
        (
            (
                "What does the manual say about Objects, values and types?",
                "*Objects* are Python’s abstraction for data. All data in a Python program is represented by objects "
                "or by relations between objects. (In a sense, and in conformance to Von Neumann’s model of a “stored "
                "program computer”, code is also represented by objects.) Every object has an identity, a type and a "
                "value.",
            ),
        ),
        ("Go on.", "Tell me about Value comparisons.", "What does the manual say about Truth Value Testing?"),
    ),
    "library": (
        (
            (
                "What does shutil.copytree do?",
                "Recursively copy a directory tree and return the destination directory. If exception(s) occur, an "
                "Error is raised with a list of reasons.",
            ),
        ),
        ("What does shutil.rmtree do?", "What does os.path.join do?", "What does json.dumps do?"),
    ),
}


@dataclass(frozen=True)
class DemoRequest:
    """One prompt of the demo, named by topic and turn."""

    name: str
    prompt: str


def render_turn(question: str, answer: str | None = None) -> str:
    """One turn as text; without an answer it ends where the model is to write one."""
    text = f"Question: {question}\nAnswer:"
    return text if answer is None else f"{text} {answer}{END_OF_TURN}\n\n"


def demo_requests() -> list[DemoRequest]:
    """Every turn of every topic as a request of its own, earlier turns of a topic first."""
    requests = []
    for topic, (turns, endings) in _TOPICS.items():
        text = SYSTEM_TEXT
        for number, (question, answer) in enumerate(turns, start=1):
            requests.append(DemoRequest(f"{topic}/{number}", text + render_turn(question)))
            text += render_turn(question, answer)
        for letter, question in zip("abcd", endings, strict=False):
            requests.append(DemoRequest(f"{topic}/{len(turns) + 1}{letter}", text + render_turn(question)))
    return requests
