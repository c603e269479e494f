"""How the two ends of a new connection prove to each other that they took part in the handshake.

The secret never travels over the connection: each end proves that it has it by an HMAC-SHA256 over
random numbers from both. All messages have a fixed size, and a stranger learns nothing but that the
connection was closed. If certificates are configured, TLS comes first.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import socket
import ssl
import time
from collections.abc import Callable

from torchstore_core.errors import ConfigurationError

__all__ = [
    "GREETING_S",
    "SECRET_BYTES",
    "TICKET_BYTES",
    "RefusedError",
    "accept",
    "answer",
    "certificates",
    "encryption",
    "introduce",
]

#: Time limit of the whole greeting, in seconds.
GREETING_S = 5.0
SECRET_BYTES = 32
TICKET_BYTES = 16

_MAGIC = b"torchstore tcp 1"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_ACCEPTED = b"\x01"
_CERTIFICATE, _KEY, _AUTHORITY = "TORCHSTORE_TCP_CERT", "TORCHSTORE_TCP_KEY", "TORCHSTORE_TCP_CA"


class RefusedError(ConnectionError):
    """The other end is not the expected one, or has refused this end."""


def introduce(sock: socket.socket, ticket: bytes, secret: bytes, limit_s: float) -> None:
    """Do the client's part of the greeting, in at most ``limit_s`` seconds.

    Raises:
        RefusedError: the other end does not have the secret, or refuses the ticket.
        OSError: the connection broke, or the time has expired.
    """
    deadline = time.monotonic() + limit_s
    mine = secrets.token_bytes(_NONCE_BYTES)
    _send(sock, _MAGIC + ticket + mine, deadline)
    answered = _receive(sock, _NONCE_BYTES + _PROOF_BYTES, deadline)
    theirs, proof = answered[:_NONCE_BYTES], answered[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"server", mine, theirs)):
        raise RefusedError("it does not have the secret of the volume")
    _send(sock, _proof(secret, b"client", mine, theirs), deadline)
    if _receive(sock, len(_ACCEPTED), deadline) != _ACCEPTED:
        raise RefusedError("it does not accept the connection")


def answer(
    sock: socket.socket, secret_of: Callable[[bytes], bytes | None], deadline: float
) -> bytes:
    """Do the server's part of the greeting.

    Args:
        secret_of: returns the secret that belongs to a ticket; None if there is no such ticket.
        deadline: the end of the whole greeting, on the monotonic clock.

    Returns:
        The client's ticket. The client still waits for :func:`accept`.

    Raises:
        RefusedError: the other end is not a client that has been let in.
        OSError: the connection broke, or the time has expired.
    """
    hello = _receive(sock, len(_MAGIC) + TICKET_BYTES + _NONCE_BYTES, deadline)
    magic, rest = hello[: len(_MAGIC)], hello[len(_MAGIC) :]
    ticket, theirs = rest[:TICKET_BYTES], rest[TICKET_BYTES:]
    if magic != _MAGIC:
        raise RefusedError("it does not speak this protocol")
    secret = secret_of(ticket)
    if secret is None:
        raise RefusedError("its ticket is not valid")
    mine = secrets.token_bytes(_NONCE_BYTES)
    _send(sock, mine + _proof(secret, b"server", theirs, mine), deadline)
    proof = _receive(sock, _PROOF_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"client", theirs, mine)):
        raise RefusedError("it does not have the secret of its ticket")
    return ticket


def accept(sock: socket.socket) -> None:
    """Tell a client that its connection is accepted. Raises OSError."""
    sock.sendall(_ACCEPTED)


def certificates() -> tuple[str, ...]:
    """Return the paths in ``TORCHSTORE_TCP_CERT``, ``TORCHSTORE_TCP_KEY`` and
    ``TORCHSTORE_TCP_CA``; empty ones for variables that are not set.
    """
    return tuple(os.environ.get(name, "") for name in (_CERTIFICATE, _KEY, _AUTHORITY))


def encryption(*, server: bool) -> ssl.SSLContext | None:
    """Return the TLS context of ``TORCHSTORE_TCP_CERT``, ``TORCHSTORE_TCP_KEY`` and
    ``TORCHSTORE_TCP_CA`` (paths of PEM files); None if they are not set. Each end shows its
    certificate, which the authority must have signed; the names in it do not matter.

    Raises:
        ConfigurationError: only some of them are set, or a file cannot be used.
    """
    paths = certificates()
    if not any(paths):
        return None
    if not all(paths):
        raise ConfigurationError(f"{_CERTIFICATE}, {_KEY} and {_AUTHORITY} belong together")
    certificate, key, authority = paths
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The handshake determines the other end; the authority vouches for its host.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, key)
        context.load_verify_locations(authority)
    except OSError as error:  # an SSLError is one
        raise ConfigurationError(
            f"the certificates of {_CERTIFICATE}, {_KEY} and {_AUTHORITY} cannot be used: {error}"
        ) from error
    return context


def _proof(secret: bytes, side: bytes, client: bytes, server: bytes) -> bytes:
    return hmac.new(secret, side + client + server, hashlib.sha256).digest()


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(data)


def _receive(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        sock.settimeout(_left(deadline))
        more = sock.recv(nbytes - len(data))
        if not more:
            raise RefusedError("it has closed the connection")
        data += more
    return bytes(data)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"the greeting took more than {GREETING_S:g} s")
    return left
