"""The whole state of a manager as bytes, and a manager out of them that goes on where the saved one stopped.

Flow:    KVCacheManager -> [save_manager] -> bytes -> [open_state] -> SavedManager -> a fresh manager, filled in

A saved state is a CBOR map of

    format, version   "kvjax-manager-state", 3
    digest, body      SHA-256 of `body`, and it: zlib of a CBOR map of
        config        the KVCacheConfig (config_encoding.py)
        options       `max_model_len`, `hash_block_size` and the fields of ManagerOptions that are data, by name
        objects       names of those that are not (a policy's class): they are given again at restore
        nodes         all that the manager consists of (state_graph.py)

The digest finds damage, not malice; a file can hold no code, but a forged one can hold a state that never was, which
`check_invariants` may or may not find. Observers (a metrics collector) are not part of the state.
"""

from __future__ import annotations

import abc
import zlib
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Self

import cbor2

from kvjax.core.options.manager_options import ManagerOptions
from kvjax.core.options.release_rules import ReleaseRules
from kvjax.core.save.bounded_cbor import inflate, load_plain
from kvjax.core.save.config_encoding import decode_config, describe_config, encode_config
from kvjax.core.save.state_filling import fill_graph
from kvjax.core.save.state_graph import INLINE, Node, encode_graph
from kvjax.core.spec import KVCacheConfig

FORMAT, VERSION = "kvjax-manager-state", 3
MAX_BYTES = 1 << 30  # of memory, to read a state
KEYS = {"format", "version", "digest", "body"}


class SavableManager(abc.ABC):
    """The part of `KVCacheManager` that saves and restores all of it."""

    kv_cache_config: KVCacheConfig
    max_model_len: int
    hash_block_size: int
    options: ManagerOptions

    @abc.abstractmethod
    def check_invariants(self) -> None:
        """Raises InvariantError where the state breaks a law."""

    def save_state(self) -> bytes:
        """All state, running requests included, for `restore`: about 10 us and 100 bytes a hashed block.

        Raises:
            NotImplementedError: a user's kind or policy keeps state of a sort that cannot be saved.
        """
        return save_manager(self)

    @classmethod
    def restore(
        cls,
        state: bytes,
        kv_cache_config: KVCacheConfig | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        **options: Any,
    ) -> Self:
        """A manager in the saved state: the same calls get the same answers, ids and events as the saved one's would.

        Its running requests are `request_table.requests`, new objects. Observers start anew, those that are given.

        Args:
            state: what `save_state` returned.
            kv_cache_config: the config that it must be of; None: any.
            max_bytes: most memory that may go into reading the state, however small it is packed: a hashed block
                takes about 1 KB of it.
            options: of the constructor: observers (`metrics_collector`, `miss_reasons`, `tier`), and what a file does
                not hold (a policy's class); all others are as saved, and must be if given.

        Raises:
            ValueError: no state, a damaged one, one of another version, config or option, one that takes more memory
                than `max_bytes`, or an object is missing.
        """
        saved = open_state(state, max_bytes)
        arguments = saved.arguments(kv_cache_config, options)
        try:
            manager = cls(**arguments)
        except ValueError:
            raise
        except Exception as error:  # a forged config or option
            raise _damaged(error) from error
        saved.fill(manager)
        return manager


@dataclass(frozen=True)
class SavedManager:
    """A state that was read but not restored yet."""

    config: KVCacheConfig
    options: dict[str, Any]
    objects: tuple[str, ...]
    nodes: list[Node]

    def arguments(self, config: KVCacheConfig | None, given: dict[str, Any]) -> dict[str, Any]:
        """What to make the fresh manager with.

        Raises:
            ValueError: another config or option than the saved manager's, or a missing object.
        """
        if config is not None and config != self.config:
            raise ValueError(
                f"expected a state of this config ({describe_config(config)}), got one of another "
                f"({describe_config(self.config)}); pools, layers, specs and columns must be equal"
            )
        for name, value in given.items():
            if name in self.options and value != self.options[name]:
                raise ValueError(f"expected a state with {name}={value!r}, got one with {name}={self.options[name]!r}")
        missing = [name for name in self.objects if name not in given]
        if missing:
            raise ValueError(f"expected {missing[0]}=..., which the saved manager had: a file does not hold objects")
        return {"kv_cache_config": self.config, **self.options, **given}

    def fill(self, manager: SavableManager) -> None:
        """Brings a fresh manager into the saved state.

        Raises:
            ValueError: the state is damaged, or of another version of kvjax. The manager is then of no use.
        """
        try:
            fill_graph(manager, self.nodes)
            manager.check_invariants()
        except ValueError:
            raise
        except Exception as error:  # whatever a damaged graph leads to
            raise _damaged(error) from error


def save_manager(manager: SavableManager) -> bytes:
    """The state: about 10 us and 100 bytes a hashed block, a tenth of that for others.

    Raises:
        NotImplementedError: a policy or kind keeps state of a sort that cannot be saved.
    """
    options = {"max_model_len": manager.max_model_len, "hash_block_size": manager.hash_block_size}
    options |= vars(manager.options) | {"rules": vars(manager.options.rules)}
    plain = {name: value for name, value in options.items() if value is None or isinstance(value, (*INLINE, dict))}
    parts = {
        "config": encode_config(manager.kv_cache_config),
        "options": plain,
        "objects": sorted(set(options) - set(plain)),
        "nodes": encode_graph(manager),
    }
    body = zlib.compress(cbor2.dumps(parts), 1)
    return cbor2.dumps({"format": FORMAT, "version": VERSION, "digest": sha256(body).digest(), "body": body})


def open_state(state: bytes, max_bytes: int = MAX_BYTES) -> SavedManager:
    """Reads a saved state.

    Raises:
        ValueError: it is none, of another version, damaged, takes more memory than `max_bytes`, or its config is of no
            known class.
    """
    try:
        parts = load_plain(state, max_bytes)
    except (ValueError, TypeError):  # foreign bytes can look like anything
        parts = None
    if not isinstance(parts, dict) or parts.get("format") != FORMAT:
        raise ValueError(f"expected a state that save_state made, got {len(state)} bytes that are none")
    if parts.get("version") != VERSION:
        raise ValueError(f"expected a state of version {VERSION}, got version {parts.get('version')!r}")
    packed = parts.get("body")
    if set(parts) != KEYS or not isinstance(packed, bytes) or sha256(packed).digest() != parts["digest"]:
        raise ValueError("expected a whole state, got one that is damaged: its digest differs")
    try:
        data = inflate(packed, max_bytes)
        body = load_plain(data, max_bytes)
        config, options, objects, nodes = (body[name] for name in ("config", "options", "objects", "nodes"))
        options["rules"] = ReleaseRules(**options["rules"])
        saved = SavedManager(decode_config(config), options, tuple(objects), nodes)
        num_blocks = sum(pool.num_blocks for pool in saved.config.pools)
    except Exception as error:  # a forged body
        raise _damaged(error) from error
    if num_blocks > len(data):  # each has some bytes in arrays
        raise ValueError(f"expected a state of {num_blocks} blocks, got one of {len(data)} bytes, too few for so many")
    return saved


def _damaged(error: Exception) -> ValueError:
    return ValueError(f"expected a whole state, got one that is damaged: {error!r:.500}")
