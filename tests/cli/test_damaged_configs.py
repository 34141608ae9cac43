"""Model and deployment files with values that cannot be: one line each, in little time, whatever was changed."""

from __future__ import annotations

import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from kvjax.cli.main import main
from kvjax.configs import config_root
from tests.damage import damaged
from tests.plain_trees import places_of

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 7, 10**6, 2**31 - 1, 2**31, 2**63, 10**30, 0.5, -0.5, 1e300, 1e400, float("nan")),
    *("", "a", "full_attention", "bfloat16", [], [0], [1, 2], ["a"], [None], ["full_attention"], [["a"]], [{}], {}),
    *({"a": 1}, {"rope_type": "yarn"}, {"rope_type": "default", "factor": 0}),
)
FILES = sorted((config_root() / "models").glob("*.json"))


def is_refused(capsys: pytest.CaptureFixture[str], *argv: str) -> bool:
    """Whether it is, by one line; it is planned otherwise."""
    start_s = time.monotonic()
    status = main(["plan", *argv])
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("kvjax: warning")]
    assert (status, len(lines)) in [(0, 0), (2, 1)], lines
    assert sum(map(len, lines)) < 3_000
    assert time.monotonic() - start_s < 30.0
    return status == 2


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("seed", range(10))
def test_models(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 configs with one or two other values, or without a key."""
    rng, num_refused = random.Random(seed), 0
    path = tmp_path / "config.json"
    for _ in range(100):
        plain = json.loads(rng.choice(FILES).read_text(encoding="utf-8"))
        for _ in range(rng.choice([1, 1, 2])):
            container, key = rng.choice(places_of(plain))
            if rng.random() < 0.1:
                del container[key]
            else:
                container[key] = copy.deepcopy(rng.choice(VALUES))
        path.write_text(json.dumps(plain), encoding="utf-8")
        num_refused += is_refused(capsys, str(path), "--memory", "40GB")
    assert num_refused > 30


@pytest.mark.parametrize("seed", range(4))
def test_bytes(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 damaged files: few of them are still a model's."""
    rng, num_refused = random.Random(seed), 0
    path = tmp_path / "config.json"
    for _ in range(250):
        path.write_bytes(damaged(rng.choice(FILES).read_bytes(), rng))
        num_refused += is_refused(capsys, str(path), "--memory", "40GB")
    assert num_refused > 150


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 1_000_000, "expected JSON"),
        ('{"a":' * 1_000_000, "expected JSON"),
        ("9" * 5_000, "expected JSON"),
        ("\ufeff{}", "expected JSON"),
        ("[]", "expected a JSON object, got list"),
    ],
    ids=["deep list", "deep object", "long number", "mark", "list"],
)
def test_json_that_is_none(text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    assert main(["plan", str(path), "--memory", "40GB"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", [path.stem for path in FILES])
def test_a_million_layers_are_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = json.loads((config_root() / "models" / f"{name}.json").read_text(encoding="utf-8"))
    inner = next((plain[key] for key in ("text_config",) if key in plain), plain)
    changed = [key for key in ("decoder_layers", "num_hidden_layers", "n_layer") if key in inner]
    inner[changed[0]] = 10**6
    path = tmp_path / "config.json"
    path.write_text(json.dumps(plain), encoding="utf-8")
    assert main(["plan", str(path), "--memory", "40GB"]) == 2
    assert "1000000" in capsys.readouterr().err


@pytest.mark.parametrize("seed", range(2))
def test_deployments(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1,000 TOML files with values of other types, signs and sizes, or with damaged bytes."""
    rng, num_refused = random.Random(seed), 0
    files = sorted((config_root() / "deployments").glob("*.toml"))
    values = ["-1", "0", "1", "7", "2147483648", "9223372036854775808", "1e300", "nan", "inf", '""', '"a"', '"40GB"']
    values += ["true", "[]", "[1]", "{}", "1979-05-27", '"\\u0000"', '"1e400GB"', '"-5GB"', '"9999999999TB"']
    path = tmp_path / "one.toml"
    for _ in range(500):
        lines = rng.choice(files).read_text(encoding="utf-8").splitlines()
        places = [i for i, line in enumerate(lines) if "=" in line and not line.startswith("#")]
        place = rng.choice(places)
        if rng.random() < 0.8:
            lines[place] = f"{lines[place].partition('=')[0]}= {rng.choice(values)}"
        else:
            at = rng.randrange(len(lines[place]))
            lines[place] = lines[place][:at] + rng.choice(['"', "=", "\n", "[", "\t", "é"]) + lines[place][at + 1 :]
        path.write_text("\n".join(lines), encoding="utf-8")
        num_refused += is_refused(capsys, "--deployment", str(path))
    assert num_refused > 200
