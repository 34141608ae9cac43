"""Arguments of tiers, of `kvjax generate` and `kvjax replay`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from kvjax.cli.main import main
from kvjax.cli.options.replay import add_tier_arguments as add_replay_tiers
from kvjax.cli.options.replay import tiers_of
from kvjax.cli.options.tiers import add_tier_arguments, read_tiers
from kvjax.tiers.config import TierConfig
from kvjax.tiers.shared.config import SharedTierConfig
from tests.models.golden_models import model_folder


def parse(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_tier_arguments(parser.add_argument_group())
    return parser.parse_args(words)


def test_sizes_and_folder_make_a_config(tmp_path: Path) -> None:
    assert read_tiers(parse()) is None
    assert read_tiers(parse("--host-memory", "1MiB")) == TierConfig(host_bytes=1 << 20, write_through=True)
    tiers = read_tiers(parse("--disk-cache", str(tmp_path), "--disk-memory", "2MiB"))
    assert tiers is not None
    assert (tiers.disk_folder, tiers.disk_bytes, tiers.host_bytes) == (str(tmp_path), 2 << 20, 0)
    with pytest.raises(ValueError, match="expected --disk-cache DIR with --disk-memory"):
        read_tiers(parse("--disk-memory", "2MiB"))


def test_a_shared_store_is_said_by_an_address_or_a_file_that_has_it(tmp_path: Path) -> None:
    address, secret = tmp_path / "address", tmp_path / "secret"
    address.write_text("redis://:pass@host\n")
    secret.write_text("correct horse battery staple\n")
    tiers = read_tiers(parse("--shared-cache", "s3://bucket/a", "--shared-prefix", "team/b"))
    assert tiers is not None
    assert tiers.shared == SharedTierConfig(store="s3://bucket/a", prefix="team/b")
    assert (tiers.host_bytes, tiers.write_through) == (0, True)
    tiers = read_tiers(parse("--shared-cache", f"@{address}", "--shared-secret", str(secret), "--host-memory", "1MiB"))
    assert tiers is not None
    assert tiers.shared == SharedTierConfig(store="redis://:pass@host", secret=b"correct horse battery staple")
    for words in (("--shared-prefix", "a"), ("--shared-secret", str(secret))):
        with pytest.raises(ValueError, match="expected --shared-cache URL with --shared-prefix or --shared-secret"):
            read_tiers(parse(*words))


def test_a_run_finds_what_another_put_into_a_shared_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": list(range(1, 40)), "name": "a"}) + "\n")
    command = ["generate", "--model", str(model_folder("gemma3")), "--block-size", "8", "-q"]
    command += ["--prompts", str(prompts), "--max-tokens", "4", "--shared-cache", (tmp_path / "store").as_uri()]
    cached = []
    for number in range(2):
        out = tmp_path / f"{number}.json"
        assert main([*command, "--json", str(out)]) == 0
        cached.append(json.loads(out.read_text())["requests"][0]["num_cached_tokens"])
    assert cached == [0, 32]


def test_a_run_beside_a_dead_store_says_so_and_generates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": list(range(1, 40)), "name": "a"}) + "\n")
    command = ["generate", "--model", str(model_folder("gemma3")), "--block-size", "8", "-q"]
    command += ["--prompts", str(prompts), "--max-tokens", "4", "--shared-cache", "redis://:secret@127.0.0.1:1"]
    assert main(command) == 0
    captured = capsys.readouterr()
    assert "units did not go to the shared store" in captured.err
    assert "secret" not in captured.err + captured.out


def test_a_folder_is_refused_where_another_length_turns_keys_otherwise(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Long rope has other factors from its original length on, here 32."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt_token_ids": list(range(1, 20)), "name": "a"}) + "\n")
    command = ["generate", "--model", str(model_folder("phi3_longrope"))]
    command += ["--prompts", str(prompts), "--max-tokens", "4", "--disk-cache", str(tmp_path / "disk")]
    codes = [main([*command, "--max-model-len", length]) for length in ("32", "128")]
    assert codes == [0, 2]
    error = capsys.readouterr().err
    assert "is of another cache: module" in error
    assert "rope.long_factor" in error


def test_speeds_of_a_replay() -> None:
    parser = argparse.ArgumentParser()
    add_replay_tiers(parser.add_argument_group())
    assert tiers_of(parser.parse_args([])) is None
    tiers = tiers_of(parser.parse_args(["--host-memory", "1GiB", "--host-gb-per-s", "10", "--disk-latency-us", "5"]))
    assert tiers is not None
    assert (tiers.host_bytes, tiers.host_bytes_per_s, tiers.disk_latency_s) == (1 << 30, 1e10, 5e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "expected host_bytes > 0, a disk_folder or a shared tier, got none"),
        ({"host_bytes": -1}, "expected host_bytes >= 0, got -1"),
        ({"host_bytes": 1, "num_threads": 0}, "expected num_threads > 0, got 0"),
        ({"host_bytes": 1, "eviction_policy": "fifo"}, r"expected eviction_policy of probation, .*, cost, got 'fifo'"),
        ({"disk_folder": "x"}, "expected disk_bytes >= 1 with a disk_folder, got None"),
        ({"disk_folder": "x", "disk_bytes": 1, "weights": ""}, "expected weights as a name that is not empty, or None"),
    ],
)
def test_tiers_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TierConfig(**settings)  # type: ignore[arg-type]
