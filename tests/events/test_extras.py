"""Without msgspec or pyzmq the package imports, and what needs them says which extra brings them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvjax.errors import MissingExtraError
from kvjax.events import EventDecoder, EventEncoder, KVEventsConfig, ZmqEventPublisher


def test_importing_needs_neither() -> None:
    code = "import kvjax.events, sys; sys.exit(bool({'msgspec', 'zmq'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("coder", [EventEncoder, EventDecoder])
def test_coding_needs_msgspec(coder: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "msgspec", None)
    with pytest.raises(MissingExtraError, match=r"coding KV events needs msgspec.*pip install 'kvjax\[events\]'"):
        coder()


def test_publishing_needs_pyzmq(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(MissingExtraError, match=r"publishing KV events needs zmq.*pip install 'kvjax\[events\]'"):
        ZmqEventPublisher(KVEventsConfig())
