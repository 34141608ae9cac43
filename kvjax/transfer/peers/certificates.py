"""TLS of both sides made from the shared key: peers trust a certificate that only its holders can sign.

Flow:    TransferKey -> [server_credentials], [channel_credentials] -> PageServer, PageClient
Source:  RFC 5280; grpc's ssl_server_credentials with client certificates required

The key of the authority is derived from the shared one, so every process makes the same authority by itself, and with
it a certificate of its own, whose key never leaves the process.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any

from kvjax.extras import require_extra
from kvjax.transfer.peers.key import TransferKey

PEER_NAME = "peer.kvjax"
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of NIST P-256
BEGIN = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)  # clocks of peers may differ by years
END = datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC)


@dataclass(frozen=True)
class _Pem:
    """What one side shows, and what it trusts."""

    authority: bytes
    certificate: bytes
    private_key: bytes


def server_credentials(grpc: Any, key: TransferKey) -> Any:
    """Of a `grpc.Server` that hears only peers with the key."""
    pem = _pem(key)
    pair = (pem.private_key, pem.certificate)
    return grpc.ssl_server_credentials([pair], root_certificates=pem.authority, require_client_auth=True)


def channel_credentials(grpc: Any, key: TransferKey) -> Any:
    """Of a `grpc.Channel` that speaks only to peers with the key."""
    pem = _pem(key)
    return grpc.ssl_channel_credentials(pem.authority, pem.private_key, pem.certificate)


def _pem(key: TransferKey) -> _Pem:
    """An authority of the key, and a new certificate that it signed."""
    require_extra("cryptography", "transfer", "a transfer between processes")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    curve = ec.SECP256R1()
    authority_key = ec.derive_private_key(int.from_bytes(key.of("authority"), "big") % (ORDER - 1) + 1, curve)
    own_key = ec.generate_private_key(curve)
    authority_name, own_name = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in ("authority.kvjax", PEER_NAME)
    )

    def certificate(name: x509.Name, public_key: Any, *, is_authority: bool) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(authority_name)
            .public_key(public_key)
            .serial_number(1 if is_authority else x509.random_serial_number())
            .not_valid_before(BEGIN)
            .not_valid_after(END)
            .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
        )
        if not is_authority:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(PEER_NAME)]), critical=False)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    private = own_key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return _Pem(
        certificate(authority_name, authority_key.public_key(), is_authority=True),
        certificate(own_name, own_key.public_key(), is_authority=False),
        private,
    )


__all__ = ["PEER_NAME", "channel_credentials", "server_credentials"]
