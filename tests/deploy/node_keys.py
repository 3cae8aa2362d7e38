"""Keys of nodes."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat


def a_key() -> tuple[str, bytes]:
    """One public key, as OpenSSH and as PEM."""
    public = ec.generate_private_key(ec.SECP384R1()).public_key()
    ssh = public.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return ssh + " node@host", public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
