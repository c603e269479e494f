"""Rows of memory through a socket, without a copy and without the interpreter. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from torchstore_core.errors import ConfigurationError

try:
    from torchstore_core._native import transfer as _native_transfer
except ImportError:  # built without a compiler
    _native_transfer = None  # type: ignore[assignment]
_transfer: Callable[[int, array[int], bool, bool], int] | None = _native_transfer

__all__ = ["MemoryRows", "has_native", "receive_rows", "send_rows"]

#: Address, bytes of a row, number of rows, and the bytes from the start of one to that of the next.
MemoryRows = tuple[int, int, int, int]


def has_native() -> bool:
    """Whether the other functions of this module can be used: they are compiled."""
    return _transfer is not None


def send_rows(fd: int, rows: Iterable[MemoryRows], *, more: bool = False) -> int:
    """Send all rows over a blocking socket; returns the number of bytes.

    Args:
        more: whether more is sent at once, so that a small rest may wait for it.

    Raises:
        OSError: of the socket; a BlockingIOError if its time-out for sending has passed.
        ConfigurationError: see :func:`has_native`.
    """
    return _call(fd, rows, True, more)


def receive_rows(fd: int, rows: Iterable[MemoryRows]) -> int:
    """Fill all rows with what comes over a blocking socket; returns the number of bytes, which is
    less than all of them only if the peer has closed the connection.

    Raises:
        OSError: of the socket; a BlockingIOError if its time-out for receiving has passed.
        ConfigurationError: see :func:`has_native`.
    """
    return _call(fd, rows, False, False)


def _call(fd: int, rows: Iterable[MemoryRows], sending: bool, more: bool) -> int:
    if _transfer is None:
        raise ConfigurationError("torchstore-core was built without a compiler")
    return _transfer(fd, array("q", [x for row in rows for x in row]), sending, more)
