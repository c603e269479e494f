"""Being one of the processes that a server lives for: the other side of ``server.members``."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import weakref

from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    in_seconds,
)
from torchstore_core.machine.unix_sockets import connect, unix_socket

__all__ = ["Member"]

log = logging.getLogger(__name__)


class Member:
    """A connection that keeps the server; made by :meth:`join`. A forked child has no part."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        _open.add(self)

    @classmethod
    async def join(cls, address: str, timeout: float) -> Member:
        """Become a member.

        Raises:
            StoreClosedError: the server is gone, or ends.
            StoreTimeoutError: it does not answer within ``timeout`` seconds.
        """
        loop = asyncio.get_running_loop()
        with unix_socket() as sock:
            try:
                async with asyncio.timeout(timeout):
                    await connect(sock, address.partition(":")[2])
                    if not await loop.sock_recv(sock, 1):
                        raise StoreClosedError(
                            f"the server at {address} ends: its last rank has left"
                        )
            except TimeoutError as error:
                raise StoreTimeoutError(
                    f"no answer from {address} within {in_seconds(timeout)}",
                    details={"timeout": timeout, "address": address},
                ) from error
            except OSError as error:
                raise StoreClosedError(
                    f"no store at {address}: rank 0 has ended ({error})"
                ) from error
        return cls(sock)

    @property
    def ended(self) -> bool:
        """Whether the server has closed the connection, which it does at its end alone."""
        try:
            return not self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except ConnectionResetError:
            return True
        except OSError:  # nothing has come; or this is a forked child, which has no part
            return False

    async def leave(self, timeout: float) -> bool:
        """Leave; whether this was the last one: then the server has ended when this returns.

        A server that does not answer within ``timeout`` seconds is left alone: it knows that this
        process has gone, and ends when it can and nobody is left.
        """
        sock = self._sock
        loop = asyncio.get_running_loop()
        try:
            sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(timeout):
                return not await loop.sock_recv(sock, 1)
        except TimeoutError:
            log.warning("the server did not answer within %g s that this rank leaves", timeout)
            return False
        except OSError as error:
            log.debug("leaving: %s", error)
            return True
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the connection without a word."""
        _open.discard(self)
        self._sock.close()


_open: weakref.WeakSet[Member] = weakref.WeakSet()


def _after_in_child() -> None:
    for member in list(_open):
        member.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_in_child)
