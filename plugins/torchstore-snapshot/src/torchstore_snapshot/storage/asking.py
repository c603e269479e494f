"""Requests to servers, which are given up when they take too long.

Libraries limit the time that may pass between two bytes. A server that sends one from time to time
never reaches such a limit, nor does one that takes in nothing of what it is sent.
"""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

from torchstore_snapshot.errors import SnapshotUnavailableError

__all__ = ["ask", "asking"]

# Seconds for a request, with all attempts to repeat it, and bytes per second that are sent besides.
_PATIENCE_S = 120.0
_SLOWEST = 64 << 10


def ask(fs: Any, url: str, method: str, /, *args: Any, nbytes: int = 0, **kwargs: Any) -> Any:
    """Call a method of a file system of fsspec that asks a server.

    Args:
        url: for errors.
        nbytes: how much is sent or received.

    Raises:
        SnapshotUnavailableError: it took too long.
        Exception: what the method raises.
    """
    if not getattr(fs, "async_impl", False) or not inspect.iscoroutinefunction(
        getattr(fs, f"_{method}", None)
    ):
        return getattr(fs, method)(*args, **kwargs)
    from fsspec.asyn import sync  # type: ignore[import-untyped]

    return sync(fs.loop, asking, fs, url, method, *args, nbytes=nbytes, **kwargs)


async def asking(
    fs: Any, url: str, method: str, /, *args: Any, nbytes: int = 0, **kwargs: Any
) -> Any:
    """The same in the event loop of an asynchronous file system."""
    limit = _PATIENCE_S + nbytes / _SLOWEST
    try:
        async with asyncio.timeout(limit) as patience:
            return await getattr(fs, f"_{method}")(*args, **kwargs)
    except TimeoutError as error:
        if not patience.expired():
            raise
        raise SnapshotUnavailableError(
            f"{url!r} did not answer a request within {limit:.0f} s, or too slowly ({method})",
            details={"path": url, "code": ""},
        ) from error
