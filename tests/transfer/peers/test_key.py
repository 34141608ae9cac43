"""The shared key: where it comes from, and that it shows itself nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvjax.transfer import TransferKey

DIGITS = "5a" * 32


def test_keys_of_equal_bytes_sign_alike_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(DIGITS + "\n", encoding="ascii")
    file.chmod(0o600)
    monkeypatch.setenv("KVJAX_TRANSFER_KEY", DIGITS)
    keys = [TransferKey(bytes.fromhex(DIGITS)), TransferKey.from_file(file), TransferKey.from_environment()]
    code = keys[0].sign("ticket", b"data")
    assert all(key.signed("ticket", b"data", code) for key in keys)
    assert not keys[0].signed("content", b"data", code)
    assert not keys[0].signed("ticket", b"Data", code)
    assert not TransferKey.generate().signed("ticket", b"data", code)
    assert "5a" not in repr(keys[0])


@pytest.mark.parametrize("secret", [b"", b"x" * 31, "x" * 40, None])
def test_what_is_no_secret_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match=r"expected at least 32 secret bytes, got .*; make a key with"):
        TransferKey(secret)


def test_a_file_that_others_may_read_and_text_that_is_no_key_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text(DIGITS, encoding="ascii")
    file.chmod(0o640)
    with pytest.raises(ValueError, match="expected a key file that its owner alone may read, got mode 0640"):
        TransferKey.from_file(file)
    file.chmod(0o600)
    file.write_bytes(b"\xff no digits")
    with pytest.raises(ValueError, match=r"expected a key of hexadecimal digits in .*, got other text"):
        TransferKey.from_file(file)
    monkeypatch.delenv("KVJAX_TRANSFER_KEY", raising=False)
    with pytest.raises(ValueError, match=r"in \$KVJAX_TRANSFER_KEY, got none"):
        TransferKey.from_environment()
