"""Links of transports: which optional abilities one has, and what it may raise besides what its
contract allows; see ``contracts.transport``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

from torchstore_core.contracts.transport import (
    SupportsMap,
    SupportsMapThrough,
    SupportsProgress,
    SupportsRegistration,
    SupportsWindow,
)
from torchstore_core.errors import StoreClosedError, TransportError
from torchstore_core.machine.tasks import is_cancelled

# A link has the abilities whose methods it has. ``isinstance`` with a Protocol would say the same,
# but takes more than ten microseconds, which is a tenth of the put of a small tensor.


def has_window(link: object) -> TypeGuard[SupportsWindow]:
    """Whether the link's segments are memory of this process.

    >>> has_window(object())
    False
    """
    return _has(link, "window") and _has(link, "prepare")


def has_map(link: object) -> TypeGuard[SupportsMap]:
    """Whether the link maps private memory of a range."""
    return _has(link, "map")


def has_map_through(link: object) -> TypeGuard[SupportsMapThrough]:
    """Whether the link maps memory of a segment that is still to be written."""
    return _has(link, "map_through") and _has(link, "make_private")


def has_registration(link: object) -> TypeGuard[SupportsRegistration]:
    """Whether the link registers memory, and so wants to know whose it is."""
    return _has(link, "write_from") and _has(link, "read_into")


def has_progress(link: object) -> TypeGuard[SupportsProgress]:
    """Whether the link reports how far its transfers are."""
    return _has(link, "progress")


def _has(link: object, method: str) -> bool:
    return getattr(link, method, None) is not None


@contextmanager
def link_errors() -> Iterator[None]:
    """Calls of a link's methods belong in this context. Whatever they raise then means that the
    link has failed, so that the next transport moves the bytes.

    Raises:
        TransportError: the link has raised this, or something that is not in its contract.
        StoreClosedError: the link needs the store, which is gone.

    >>> with link_errors():
    ...     raise ConnectionResetError("by the peer")
    Traceback (most recent call last):
        ...
    torchstore_core.errors.TransportError: its link failed: ConnectionResetError('by the peer')
    """
    try:
        yield
    except (TransportError, StoreClosedError):
        raise
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise TransportError("its link has cancelled itself") from None
    except Exception as error:
        raise TransportError(f"its link failed: {error!r}") from error
