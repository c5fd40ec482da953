"""TLS certificates for tests, generated anew for each run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class KeyPair:
    """The PEM files of a certificate and its private key."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Certificates:
    """An authority, certificates of a server and a client that it issued, and a certificate of another authority."""

    authority: Path
    server: KeyPair
    client: KeyPair
    other_authority: Path
    stranger: KeyPair


def generate_certificates(folder: Path) -> Certificates:
    """Write new keys and certificates to a folder."""
    authority, other_authority = trustme.CA(), trustme.CA()

    def write(name: str, pem: trustme.Blob) -> Path:
        path = folder / name
        pem.write_to_path(str(path))
        return path

    def issue(issuer: trustme.CA, name: str, *identities: str) -> KeyPair:
        leaf = issuer.issue_cert(*identities)
        return KeyPair(write(f"{name}.pem", leaf.cert_chain_pems[0]), write(f"{name}.key", leaf.private_key_pem))

    return Certificates(
        authority=write("ca.pem", authority.cert_pem),
        server=issue(authority, "server", "localhost", "127.0.0.1"),
        client=issue(authority, "client", "client.quire.test"),
        other_authority=write("other_ca.pem", other_authority.cert_pem),
        stranger=issue(other_authority, "stranger", "stranger.quire.test"),
    )
