"""What all volumes of a process share: where it listens, and its clients' connections."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Hashable, Sequence
from itertools import count
from typing import ClassVar

from torchstore_core.errors import TransportUnavailableError
from torchstore_transports.tcp.serving.listening import Listeners
from torchstore_transports.tcp.serving.peers import Admission, Peers
from torchstore_transports.tcp.serving.requests import Segments
from torchstore_transports.tcp.wire.protocol import VOLUMES_MAX

__all__ = ["Port"]


class Port:
    """Lets clients in to the volumes of this process, each of which has a number. Thread-safe.

    It listens only while there are clients, and only at addresses that one of them uses.

    Args:
        secure: the TLS context; None: no TLS.
    """

    _ports: ClassVar[dict[Hashable, Port]] = {}  # the ports that serve volumes
    _of_process: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, secure: ssl.SSLContext | None) -> None:
        self._peers = Peers(secure)
        self._listeners = Listeners(self._peers.take)
        self._volumes: dict[int, Segments] = {}
        self._lock = threading.Lock()

    @classmethod
    def serving(
        cls, key: Hashable, secure: ssl.SSLContext | None, segments: Segments
    ) -> tuple[Port, int]:
        """Serve a volume at a port of this process; return the port and the volume's number.

        Args:
            key: identifies the certificates; each set of them has a port of its own.

        Raises:
            TransportUnavailableError: this process serves too many volumes.
        """
        with cls._of_process:
            port = cls._ports.get(key) or cls(secure)
            number = next(one for one in count() if one not in port._volumes)
            if number > VOLUMES_MAX:
                raise TransportUnavailableError(f"this process serves {number} volumes already")
            cls._ports[key] = port
            port._volumes[number] = segments
            return port, number

    def let_in(
        self, peer: bytes, volume: int, addresses: Sequence[str]
    ) -> tuple[list[tuple[str, int]], Admission]:
        """Let a client in to a volume, and listen at these addresses, too. Return where it listens,
        and what the client has to show on its connections, which is the same for all volumes.

        Raises:
            TransportUnavailableError: it can listen at none of the addresses.
        """
        with self._lock:
            endpoints = self._listeners.open(addresses)
            if endpoints:
                return endpoints, self._peers.let_in(peer, volume, self._volumes[volume])
            self._close_if_unused()
        raise TransportUnavailableError("the volume has no address that the client reaches")

    def met(self, peer: bytes, volume: int) -> bool:
        """Return whether the client has been let in to that volume."""
        return self._peers.met(peer, volume)

    def forget(self, peer: bytes, volume: int) -> None:
        """End what a client has under way in a volume. When this returns, none of its bytes moves
        there any more. Blocks until the client's threads have noticed.
        """
        self._peers.forget(peer, volume)
        with self._lock:
            self._close_if_unused()

    def remove(self, volume: int) -> None:
        """Remove a volume, and forget its clients. Blocks."""
        for peer in self._peers.of(volume):
            self._peers.forget(peer, volume)
        with self._of_process:
            self._volumes.pop(volume, None)
            for key in [key for key, port in self._ports.items() if not port._volumes]:
                del self._ports[key]
            last = not self._volumes
        with self._lock:
            self._close_if_unused()
        if last:
            self._peers.close()

    def _close_if_unused(self) -> None:
        if not self._peers:
            self._listeners.close()
