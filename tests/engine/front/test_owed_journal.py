"""A journal says what is owed at any moment, wherever a crash cuts it."""

from __future__ import annotations

import random
import stat
from pathlib import Path

import numpy as np
import pytest

from kvjax.engine import GenerationResult, OwedRequest, SamplingParams, StepOutputs
from kvjax.engine.front import owed_journal
from kvjax.engine.front.owed_journal import Journal, OwedJournal, newest, read_journal

PARAMS = SamplingParams(max_tokens=1000, seed=1)
RESULT = GenerationResult.__new__(GenerationResult)


def request(name: str) -> OwedRequest:
    return OwedRequest(request_id=name, prompt_token_ids=(1, 2, 3), params=PARAMS)


def outputs(tokens: dict[str, int], ends: set[str]) -> StepOutputs:
    results = {place: RESULT for place, name in enumerate(tokens) if name in ends}
    ids, made = np.array([*tokens], np.object_), np.array([*tokens.values()], np.int32)
    return StepOutputs(ids, made, made.astype(np.float32) / 2, results)


def plain(owed: dict[str, OwedRequest]) -> dict[str, list[int]]:
    for one in owed.values():
        assert one.logprobs == tuple(token / 2 for token in one.output_token_ids)
    return {name: [*one.output_token_ids] for name, one in owed.items()}


@pytest.mark.parametrize("seed", range(8))
def test_the_file_says_what_a_model_says(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model: a dict of lists. At every moment the file cut anywhere says what it was at some moment before."""
    monkeypatch.setattr(owed_journal, "LEAST_BYTES", 2000 if seed % 2 else 10**9)
    luck, path, now_s = random.Random(seed), tmp_path / "owed", 0.0
    journal = OwedJournal(path, 7, [request("old")], clock=lambda: now_s)
    model: dict[str, list[int]] = {"old": []}
    moments = [{name: [*made] for name, made in model.items()}]
    for number in range(120):
        action = luck.random()
        now_s += luck.choice([0.0, 1.0])
        if action < 0.2:
            names = [f"r{number}", f"r{number}.1"][: luck.randint(1, 2)]
            journal.accept([request(name) for name in names])
            model |= {name: [] for name in names}
        elif action < 0.8:
            tokens = {name: luck.randrange(100) for name in [*model, "a stranger"]}
            ends = {name for name in model if luck.random() < 0.1}
            journal.note(outputs(tokens, ends))
            for name in model.keys() - ends:
                model[name].append(tokens[name])
        elif model:
            name = luck.choice([*model])
            journal.end([name])
            del model[name]
        moments.append({name: [*made] for name, made in model.items()})
        if luck.random() < 0.3:
            journal.flush()
            assert plain(read_journal(path).owed) == model
            assert journal.num_owed == len(model)
    data = path.read_bytes()
    for size in luck.sample(range(data.index(b"\n") + 1, len(data)), 40):
        (tmp_path / "cut").write_bytes(data[:size])
        found = plain(read_journal(tmp_path / "cut").owed)
        assert any(
            all(name in moment and made == moment[name][: len(made)] for name, made in found.items())
            for moment in moments
        )
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_journal_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "owed"
    OwedJournal(path, 1).accept([request("a")])
    (tmp_path / "owed.new").write_text("what a crash left")
    second = OwedJournal(path, 2, read_journal(path).owed.values())
    assert (read_journal(path).run, [*read_journal(path).owed]) == (2, ["a"])
    assert second.owes("a")
    second.end(["a"])
    assert read_journal(path) == Journal(2, 0, {})
    assert read_journal(tmp_path / "none") == Journal()


@pytest.mark.parametrize(
    "text", ["", "{}\n", "[]\n", '{"kvjax":"owed requests","version":2,"run":1,"turn":0}\n', "\0\n"]
)
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "owed").write_text(text)
    with pytest.raises(ValueError, match="expected a file of owed requests at"):
        read_journal(tmp_path / "owed")


def test_damage_before_the_last_line_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "owed"
    OwedJournal(path, 1, [request("a"), request("b")])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:20], *lines[2:]]))
    with pytest.raises(ValueError, match="expected a file of owed requests at"):
        read_journal(path)


def test_the_journal_of_process_0_counts_if_it_is_of_the_last_run() -> None:
    long = {"a": request("a").with_output((1, 2), (0.5, 1.0))}
    short = {"a": request("a"), "b": request("b")}
    assert newest([Journal(3, 9, short), Journal(3, 8, long)]) == Journal(3, 9, short | long)
    assert newest([Journal(3, 9, {}), Journal(3, 8, long)]) == Journal(3, 9, {})
    assert newest([Journal(), Journal(3, 8, long), Journal(3, 9, short)]) == Journal(3, 9, short | long)
    assert newest([Journal(2, 99, long), Journal(3, 8, short)]) == Journal(3, 8, short)
    assert newest([Journal(), Journal()]) == Journal()
