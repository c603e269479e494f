"""Send rows of memory through a socket, and receive them, without holding the interpreter lock.
Torch-free. ``native/transfer.c`` says how.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable

from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.copying import compiled

_transfer: Callable[[int, array[int], bool, bool], int] | None = compiled("transfer")

__all__ = ["MemoryRows", "has_native", "receive_rows", "send_rows"]

#: Address, bytes per row, number of rows, and bytes from the start of one row to that of the next.
MemoryRows = tuple[int, int, int, int]


def has_native() -> bool:
    """Return whether the compiled code is available, which the other functions here require."""
    return _transfer is not None


def send_rows(fd: int, rows: Iterable[MemoryRows], *, more: bool = False) -> int:
    """Send all rows over a blocking socket; return the number of bytes.

    Args:
        more: whether more data follows at once, so that the kernel may hold back a small remainder.

    Raises:
        OSError: the socket's error; a BlockingIOError if its send time-out has passed.
        ConfigurationError: see :func:`has_native`.
    """
    return _call(fd, rows, True, more)


def receive_rows(fd: int, rows: Iterable[MemoryRows]) -> int:
    """Fill all rows with the data that arrives over a blocking socket. Return the number of bytes,
    which is smaller than the rows only if the peer has closed the connection.

    Raises:
        OSError: the socket's error; a BlockingIOError if its receive time-out has passed.
        ConfigurationError: see :func:`has_native`.
    """
    return _call(fd, rows, False, False)


def _call(fd: int, rows: Iterable[MemoryRows], sending: bool, more: bool) -> int:
    if _transfer is None:
        raise ConfigurationError("torchstore-core was built without a compiler")
    return _transfer(fd, array("q", [x for row in rows for x in row]), sending, more)
