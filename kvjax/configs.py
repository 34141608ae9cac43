"""Model configs and deployments by name or path, found from any directory.

Flow:    name | folder | file -> [load_model_config | load_deployment] -> ModelConfig | Deployment

`configs/` of a source checkout and `kvjax/_configs` of an installed wheel are the same tree: `models/*.json` with
Hugging Face's config.json keys, `deployments/*.toml` with the fields of `Deployment`. Unknown keys are errors.
"""

from __future__ import annotations

import os
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kvjax.errors import ConfigError
from kvjax.models.config import ModelConfig, read_json_object
from kvjax.text import did_you_mean, parse_bytes

_INSTALLED = Path(__file__).parent / "_configs"
_CHECKOUT = Path(__file__).parent.parent / "configs"


@dataclass(frozen=True)
class Deployment:
    """What a planner or a replay has to know beside the model; None where the tool's default is wanted."""

    model: str | None = None  # name, folder or file
    memory_bytes: int | None = None  # KV-cache budget of one device
    num_blocks: int | None = None
    block_size: int | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    request_len: int | None = None
    tokens_per_checkpoint: int | None = None
    max_num_seqs: int | None = None
    max_in_flight_tokens: int | None = None
    platform: str | None = None
    tensor_parallel: int | None = None
    data_parallel: int | None = None
    decode_context_parallel: int | None = None
    prefill_context_parallel: int | None = None
    hybrid: bool | None = None
    one_memory: bool | None = None
    idle_state_dtype: str | None = None
    state_block_size: int | None = None


_TYPES: dict[str, type] = {
    **dict.fromkeys(("model", "dtype", "platform", "idle_state_dtype"), str),
    **dict.fromkeys(("hybrid", "one_memory"), bool),
}
_MEMORY_KEY = "memory"  # in TOML: a number of bytes or a text such as "56GiB"


def config_root() -> Path:
    """Folder of the shipped configs."""
    return _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def known_models() -> list[str]:
    """Names of the shipped model configs."""
    return sorted(path.stem for path in (config_root() / "models").glob("*.json"))


def known_deployments() -> list[str]:
    """Names of the shipped deployments."""
    return sorted(path.stem for path in (config_root() / "deployments").glob("*.toml"))


def load_model_config(model: str | Path) -> ModelConfig:
    """The config of a shipped name, of a Hugging Face folder, or of a path to a config.json.

    A folder or file of a shipped name's own spelling goes first; a folder without a config.json does not hide it.

    Raises:
        ConfigError: nothing of that name or path (the message lists the names), or a bad config.
    """
    path, shipped = Path(str(model) or os.devnull), config_root() / "models" / f"{model}.json"  # no name: no folder
    if path.is_dir() and not (path / "config.json").is_file() and not shipped.is_file():
        raise ConfigError(f"expected a Hugging Face model folder with config.json, found no {path / 'config.json'}")
    if (path / "config.json").is_file():
        path = path / "config.json"
    file = path if path.is_file() else shipped
    if not file.is_file():
        raise ConfigError(
            f"expected a model's name ({', '.join(known_models())}), a folder with a config.json or a path to one, "
            f"got {str(model)!r}{did_you_mean(str(model), known_models())}"
        )
    return ModelConfig.from_dict(read_json_object(file), where=str(file))


def load_deployment(deployment: str | Path) -> Deployment:
    """The deployment of a shipped name or of a path to a TOML file.

    Raises:
        ConfigError: nothing of that name or path, text that is no TOML, an unknown key, or a value that cannot be.
    """
    path = Path(deployment)
    file = path if path.is_file() else config_root() / "deployments" / f"{deployment}.toml"
    if not file.is_file():
        raise ConfigError(
            f"expected a deployment's name ({', '.join(known_deployments())}) or a path to a TOML file, "
            f"got {str(deployment)!r}{did_you_mean(str(deployment), known_deployments())}"
        )
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: expected TOML, got {error}") from error
    return _parse_deployment(data, str(file))


def _parse_deployment(data: dict[str, Any], where: str) -> Deployment:
    known = {field.name for field in fields(Deployment)} - {"memory_bytes"} | {_MEMORY_KEY}
    unknown = sorted(set(data) - known)
    if unknown:
        raise ConfigError(f"{where}: unknown keys {', '.join(unknown)}; expected some of {', '.join(sorted(known))}")
    values = dict(data)
    memory = values.pop(_MEMORY_KEY, None)
    for key, value in values.items():
        expected = _TYPES.get(key, int)
        if type(value) is not expected:
            raise ConfigError(f"{where}: expected {key} to be of type {expected.__name__}, got {value!r}")
        if expected is int and values[key] < 1:
            raise ConfigError(f"{where}: expected {key} >= 1, got {value}")
    if memory is not None:
        values["memory_bytes"] = _parse_memory(memory, where)
    return Deployment(**values)


def _parse_memory(memory: Any, where: str) -> int:
    if type(memory) not in (int, str):
        raise ConfigError(f"{where}: expected {_MEMORY_KEY} to be a number of bytes or a text, got {memory!r}")
    try:
        return parse_bytes(memory)
    except ValueError as error:
        raise ConfigError(f"{where}: {_MEMORY_KEY}: {error}") from error
