"""Laws of the folder of compiled programs: nothing else may have said where, and a process has one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from kvjax.device.programs.compilation_cache import use_compilation_cache


@pytest.fixture
def before() -> Iterator[str]:
    """Where the test run keeps its own, which it keeps afterwards."""
    folder, shortest = jax.config.jax_compilation_cache_dir, jax.config.jax_persistent_cache_min_compile_time_secs
    assert folder is not None
    yield folder
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", shortest)


def test_programs_are_kept_where_nothing_else_is_said(
    before: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == before is not None
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    with monkeypatch.context() as homeless:
        homeless.delenv("XDG_CACHE_HOME")
        homeless.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
        use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    use_compilation_cache()
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "kvjax" / "jax")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0.5  # left to the environment
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")
    use_compilation_cache()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 0


def test_a_folder_is_made_and_there_is_one(before: str, tmp_path: Path) -> None:
    use_compilation_cache(before)
    with pytest.raises(ValueError, match=r"expected the compilation cache of this process, .* got .*one folder to all"):
        use_compilation_cache(tmp_path / "other")
    jax.config.update("jax_compilation_cache_dir", None)
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        use_compilation_cache(tmp_path / "file" / "in")
    assert jax.config.jax_compilation_cache_dir is None
    use_compilation_cache(tmp_path / "new" / "one")
    assert jax.config.jax_compilation_cache_dir == str(tmp_path / "new" / "one")
    assert (tmp_path / "new" / "one").is_dir()
