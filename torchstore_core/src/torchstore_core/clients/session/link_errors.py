"""What links of other packages may raise besides what their contract allows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from torchstore_core.errors import StoreClosedError, TransportError
from torchstore_core.machine.tasks import is_cancelled


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
