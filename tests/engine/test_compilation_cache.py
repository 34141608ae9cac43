"""An engine that is asked to keeps its compiled steps, and logs what it compiles and what it takes from there."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from kvjax.engine import LLMEngine, SamplingParams
from kvjax.engine.step.agreement import settings_of
from tests.engine.engines import base_config, loaded, make_engine
from tests.models.golden_models import goldens_of

READY = re.compile(r"a step of 64 tokens and 8 requests is ready after [0-9.]+ s: (\d+) programs compiled, (\d+) taken")


@pytest.fixture
def no_folder() -> Iterator[None]:
    """jax has no place for compiled programs, and has what the test run gave it afterwards."""
    folder = jax.config.jax_compilation_cache_dir
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", None)
    yield
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", folder)


def test_the_second_engine_takes_what_the_first_one_compiled(
    no_folder: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line before each step's first run, and one behind it."""
    caplog.set_level(logging.INFO, "kvjax.device")
    golden, found = goldens_of("llama")[0], []
    for _ in range(2):
        caplog.clear()
        engine = LLMEngine(loaded("llama"), base_config("llama", compilation_cache=tmp_path / "kept"))
        (result,) = engine.generate([golden.prompt], SamplingParams(max_tokens=4, temperature=0.0))
        assert result.output_token_ids.tolist() == golden.greedy[:4].tolist()
        first, last = [record.getMessage() for record in caplog.records if record.name == "kvjax.device"]
        assert first == "compiling a step of 64 tokens and 8 requests"
        told = READY.match(last)
        assert told is not None, last
        found.append((int(told[1]), int(told[2])))
    (compiled, taken), again = found
    assert (compiled > 0, taken, again) == (True, 0, (0, compiled))
    assert any((tmp_path / "kept").iterdir())


def test_an_engine_that_is_not_asked_keeps_nothing_and_compiles_no_step_twice(
    no_folder: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvjax.device")
    for _ in range(2):
        make_engine("llama").generate([goldens_of("llama")[0].prompt], SamplingParams(max_tokens=2))
    assert jax.config.jax_compilation_cache_dir is None
    assert len([one for one in caplog.records if one.name == "kvjax.device"]) in (0, 2)  # 0: another test compiled it


def test_processes_of_an_engine_may_keep_their_programs_in_folders_of_their_own() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:1], "tensor")
    one, other = (base_config("llama", compilation_cache=folder) for folder in (False, "kept"))
    config = loaded("llama").config
    assert settings_of(one, config, mesh) == settings_of(other, config, mesh)
