"""A random file of every form of traces, as those who publish them write it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

ROLES = {"conversations": ("from", "value", "human", "gpt"), "messages": ("role", "content", "user", "assistant")}


def random_walks(rng: np.random.Generator, size: int, num_prompts: int) -> list[tuple[int, list[int]]]:
    """Prompts as walks down a random tree of blocks: input length and an id per block, the last one begun."""
    max_blocks = 6
    children: dict[tuple[int, ...], list[int]] = {}
    ids = iter(rng.permutation(num_prompts * max_blocks).tolist())
    prompts = []
    for _ in range(num_prompts):
        path: tuple[int, ...] = ()
        for _ in range(rng.integers(1, max_blocks + 1)):
            known = children.setdefault(path, [])
            if not known or rng.random() < 0.3:
                known.append(next(ids))
            path = (*path, int(rng.choice(known)))
        prompts.append((size * (len(path) - 1) + int(rng.integers(1, size + 1)), list(path)))
    return prompts


def request_rows(rng: np.random.Generator, size: int, num_rows: int = 12) -> list[dict]:
    """Mooncake's: milliseconds, blocks of `size` tokens, the last one counted."""
    times = np.sort(rng.integers(0, 100_000, num_rows)).tolist()
    return [
        {"timestamp": time, "input_length": length, "output_length": int(rng.integers(0, 50)), "hash_ids": ids}
        for time, (length, ids) in zip(times, random_walks(rng, size, num_rows), strict=True)
    ]


def lines_of(rows: Sequence[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def mooncake(rng: np.random.Generator) -> str:
    return lines_of(request_rows(rng, 512))


def qwen_bailian(rng: np.random.Generator) -> str:
    """Seconds with fractions, blocks of 16 tokens, and who continues whom."""
    rows = request_rows(rng, 16)
    return lines_of(
        [
            {"chat_id": i, "parent_chat_id": -1, **row, "timestamp": row["timestamp"] / 1e3, "type": "text", "turn": 1}
            for i, row in enumerate(rows)
        ]
    )


def lengths_alone(rng: np.random.Generator) -> str:
    return lines_of([{key: row[key] for key in ("timestamp", "input_length")} for row in request_rows(rng, 512)])


def azure_2023(rng: np.random.Generator) -> str:
    rows = request_rows(rng, 512)
    return "TIMESTAMP,ContextTokens,GeneratedTokens\r\n" + "".join(
        f"2023-11-16 18:{row['timestamp'] // 60_000:02}:{row['timestamp'] % 60_000 / 1e3:010.7f},"
        f"{row['input_length']},{row['output_length']}\r\n"
        for row in rows
    )


def azure_2024(rng: np.random.Generator) -> str:
    """With a time zone, and with images as that of 2025 has."""
    rows = request_rows(rng, 512)
    return "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens\n" + "".join(
        f"2024-05-10 00:{row['timestamp'] // 60_000:02}:{row['timestamp'] % 60_000 / 1e3:09.6f}+00:00,0,"
        f"{row['input_length']},{row['output_length']}\n"
        for row in rows
    )


def burstgpt(rng: np.random.Generator) -> str:
    """A failed request has no tokens."""
    rows = request_rows(rng, 512)
    head = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    return (
        head
        + "".join(
            f"{5 + row['timestamp'] // 1_000},ChatGPT,{row['input_length']},{row['output_length']},"
            f"{row['input_length'] + row['output_length']},Conversation log\n"
            for row in rows
        )
        + "99999,GPT-4,0,0,0,API log\n"
    )


def burstgpt_sessions(rng: np.random.Generator) -> str:
    rows = request_rows(rng, 512)
    head = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    return head + "".join(
        f"{19_440_110 + row['timestamp'] / 1e3},1722ac82-0a46-4bf0-aa08-89794e7a2b3f,43,GPT-4,{row['input_length']},"
        f"{row['output_length']},0,API log\n"
        for row in rows
    )


def words(rng: np.random.Generator, most: int = 40) -> str:
    """A text of letters of one to four bytes."""
    return "".join(rng.choice(list("abc déß漢🙂 "), rng.integers(0, most)))


def conversations(rng: np.random.Generator, key: str = "conversations", num: int = 6) -> list[dict]:
    """Of which some begin with the same texts."""
    who, what, asks, answers = ROLES[key]
    openings = [words(rng) for _ in range(2)]
    found = []
    for _ in range(num):
        num_messages = int(rng.integers(0, 7))
        texts = [str(rng.choice(openings)) if i < 1 else words(rng) for i in range(num_messages)]
        found.append({"id": "x", key: [{who: (asks, answers)[i % 2], what: text} for i, text in enumerate(texts)]})
    return [*found, {"id": "last", key: [{who: asks, what: "hello there"}, {who: answers, what: "yes"}]}]


def sharegpt(rng: np.random.Generator) -> str:
    return json.dumps(conversations(rng), indent=2)


def chat_messages(rng: np.random.Generator) -> str:
    return lines_of(conversations(rng, "messages"))


def prompts(rng: np.random.Generator) -> str:
    return lines_of([{"prompt": "p" + words(rng), "output_tokens": int(rng.integers(1, 90))} for _ in range(10)])


def agent_sessions(rng: np.random.Generator, num_sessions: int = 4, size: int = 64) -> list[dict]:
    """With runs; ids count within a session, a tail has none. `out` tells session and request."""
    sessions = []
    for number in range(num_sessions):
        requests, time_s = [], 0.0
        for length, ids in random_walks(rng, size, int(rng.integers(1, 7))):
            think, api = round(float(rng.exponential(5)), 2), round(float(rng.exponential(5)), 2)
            time_s += think
            runs = [[hash_id, 1] for hash_id in ids[: length // size]]
            agent = None if rng.random() < 0.7 else "agent_001"
            requests.append(
                {
                    "t": time_s,
                    "agent": agent,
                    "in": length,
                    "out": 20 * number + len(requests),
                    "think": think,
                    "api": api,
                    "runs": runs,
                }
            )
            time_s += api
        sessions.append({"session": f"s{number}", "block_size": size, "tool_tokens": 5, "requests": requests})
    return sessions


def agents(rng: np.random.Generator) -> str:
    return lines_of(agent_sessions(rng))


FORMS: dict[str, Callable[[np.random.Generator], str]] = {
    form.__name__: form
    for form in (
        mooncake,
        qwen_bailian,
        lengths_alone,
        azure_2023,
        azure_2024,
        burstgpt,
        burstgpt_sessions,
        sharegpt,
        chat_messages,
        prompts,
        agents,
    )
}
