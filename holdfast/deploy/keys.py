"""Certificates and keys of a federation: its own authority, the server's certificate, the server's key for
signatures, a key for every node. Private parts are readable by their owner only, from the moment they
exist."""

from __future__ import annotations

import datetime
import ipaddress
import os
import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from holdfast.core.errors import ConfigError
from holdfast.core.files import write_atomically
from holdfast.core.reading import read_whole

_CURVE = ec.SECP384R1()  # what Flower's node authentication takes
_LARGEST = 1 << 20  # bytes of a key or a certificate


def write_secret(path: Path, content: bytes) -> None:
    """Write a new file that only its owner can read; an existing one is not touched."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{path} exists already, and a key is never overwritten; remove it first if it is not needed"
        ) from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        os.fsync(file.fileno())


def make_authority(folder: Path, name: str, days: int = 3650) -> None:
    """Write ca.key and ca.pem, the authority that signs the server's certificate. Nodes need ca.pem only."""
    key = ec.generate_private_key(_CURVE)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        crl_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _certificate(_named(f"{name} authority"), _named(f"{name} authority"), key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    write_secret(folder / "ca.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (folder / "ca.pem").write_bytes(certificate.public_bytes(Encoding.PEM))


def make_server_certificate(
    folder: Path, hosts: Sequence[str], days: int = 825, into: Path | None = None
) -> None:
    """Write server.key and server.pem for these names and addresses, signed by the authority in this folder.
    127.0.0.1 and localhost are always among them: the proxy and SuperExec reach the SuperLink there."""
    into = into or folder
    authority, signer = (
        _read_certificate(folder / "ca.pem"),
        _read_key(folder / "ca.key", load_pem_private_key),
    )
    key = ec.generate_private_key(_CURVE)
    names = [_alternative(host) for host in dict.fromkeys(["localhost", "127.0.0.1", *hosts])]
    certificate = (
        _certificate(_named(hosts[0] if hosts else "localhost"), authority.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    write_secret(into / "server.key", key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    (into / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))


def renew_server_certificate(folder: Path) -> None:
    """Replace server.key and server.pem by new ones for the same names. Nodes go by the authority, so they
    need nothing."""
    with tempfile.TemporaryDirectory(prefix=".renewing-", dir=folder) as new:
        make_server_certificate(folder, hosts_of(folder / "server.pem"), into=Path(new))
        for name in ("server.key", "server.pem"):
            os.replace(Path(new) / name, folder / name)


def make_node_key(folder: Path, comment: str) -> str:
    """Write key and key.pub into the node's folder; return the public half, which is all that the server
    needs."""
    make_key(folder / "key")
    return write_node_public(folder, comment)


def make_key(path: Path) -> None:
    """Write a new private key of a node or of the server's signatures."""
    key = ec.generate_private_key(_CURVE)
    write_secret(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))


def write_node_public(folder: Path, comment: str) -> str:
    """Write key.pub of the key in a node's folder."""
    public = f"{public_of(folder / 'key')} {comment}"
    (folder / "key.pub").write_text(public + "\n")
    return public


def node_public(text: str) -> str:
    """Return the public key that a node asks to be enrolled with, without its comment; raise an error if
    Flower would not accept it."""
    key = read_public(text)
    if not isinstance(key.curve, ec.SECP384R1):
        raise ConfigError(
            f"a node needs a key of curve secp384r1, this one is of {key.curve.name}; make one: `holdfast"
            " federation key`"
        )
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def make_server_key(folder: Path) -> str:
    """Write orders.key and orders.pub into the server's folder: the server signs orders to nodes and heads of
    the ledger with them. An existing key is kept. Return the public half, which nodes need."""
    private = folder / "orders.key"
    if not private.exists():
        make_key(private)
    public = public_of(private) + " server"
    write_atomically(folder / "orders.pub", (public + "\n").encode())
    return public


def public_of(private: Path) -> str:
    """Return the public half of a key."""
    return load_private(private).public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def load_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """Read a private key of a node or of the server."""
    return _read_key(path, load_ssh_private_key)


def read_public(text: bytes | str) -> ec.EllipticCurvePublicKey:
    """Read a public key in OpenSSH or PEM format."""
    try:
        data = text.encode() if isinstance(text, str) else text
        key = (
            load_pem_public_key(data)
            if data.lstrip().startswith(b"-----")
            else load_ssh_public_key(data.strip())
        )
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"not a public key that can be read: {_short(error)}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError("not a public key that can be read: nodes have keys of elliptic curves (ECDSA)")
    return key


def sign(key: ec.EllipticCurvePrivateKey, context: str, data: bytes) -> bytes:
    """Sign by ECDSA with SHA-384 a first line, which names the kind of message, and the message: a signature
    of one kind is not valid for another."""
    return key.sign(_signed(context, data), ec.ECDSA(hashes.SHA384()))


def verify(public: str, context: str, data: bytes, signature: bytes) -> bool:
    """Return whether the owner of this public key has signed exactly this; False whatever is wrong with
    it."""
    try:
        read_public(public).verify(signature, _signed(context, data), ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ConfigError, ValueError, TypeError, AttributeError):
        return False
    return True


def _signed(context: str, data: bytes) -> bytes:
    if "\n" in context:
        raise ValueError("the first line of what is signed must be one line")
    return context.encode() + b"\n" + data


def make_secret(path: Path) -> None:
    """Write the secret by which a SuperExec authenticates."""
    write_secret(path, secrets.token_hex(32).encode())


def ready_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Check the certificates before a server starts: otherwise each node would fail in its own log. A missing
    certificate of the server is made."""
    for name, remedy in {
        "ca.pem": "every node needs a new one: `holdfast federation init` a new federation",
        "server.pem": "remove server.pem and server.key, and new ones are made",
    }.items():
        if name == "server.pem" and not (folder / name).exists() and not (folder / "server.key").exists():
            make_server_certificate(folder, hosts)
        found = _read_certificate(folder / name)
        now = datetime.datetime.now(datetime.UTC)
        if now < found.not_valid_before_utc:
            raise ConfigError(
                f"{folder / name} is valid only from {found.not_valid_before_utc:%Y-%m-%d} on: this machine's"
                " clock is wrong"
            )
        if now > found.not_valid_after_utc:
            raise ConfigError(f"{folder / name} expired on {found.not_valid_after_utc:%Y-%m-%d}; {remedy}")


def expires(certificate: Path) -> datetime.datetime:
    return _read_certificate(certificate).not_valid_after_utc


def hosts_of(certificate: Path) -> list[str]:
    """Return the names and addresses of a certificate."""
    try:
        found = (
            _read_certificate(certificate)
            .extensions.get_extension_for_class(x509.SubjectAlternativeName)
            .value
        )
    except (x509.ExtensionNotFound, ValueError):
        raise ConfigError(f"{certificate} is not a certificate of a server: it names no host") from None
    return [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]


def _read_certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(read_whole(file, _LARGEST))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a readable certificate: {_short(error)}") from None


def _read_key(file: Path, load: Callable[[bytes, bytes | None], Any]) -> ec.EllipticCurvePrivateKey:
    """Read a private key of the kind that is made here, without a password."""
    try:
        key = load(read_whole(file, _LARGEST), None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{file} is not a readable private key: {_short(error)}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{file} is not a usable private key: it is not of an elliptic curve (ECDSA)")
    return key


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:100]


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )
