"""The one error tree of the store.

Every error has a stable ``code`` (it crosses the wire and never changes), a message that says what
happened, to which key, and what to do, and optional ``details``: plain data for programs.

Errors raised by the server are rebuilt in the client from their code by :func:`from_wire`.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "ConfigurationError",
    "KeyNotFoundError",
    "LayoutMismatchError",
    "ObjectLostError",
    "PartialPutError",
    "PluginError",
    "ProtocolError",
    "StoreClosedError",
    "StoreFullError",
    "StoreTimeoutError",
    "TorchStoreError",
    "TransportError",
    "TransportNotReadyError",
    "TransportUnavailableError",
    "UnsafeObjectError",
    "UnsupportedValueError",
    "VersionGoneError",
    "from_wire",
    "in_seconds",
]


class TorchStoreError(Exception):
    """Base of everything the store raises on purpose.

    Args:
        message: what happened and what to do.
        key: the key (or first key) it happened to, if any.
        details: plain data (str, int, list, dict) for programs; shown by ``torchstore`` tools.

    >>> KeyNotFoundError("no such key: 'w'", key="w").code
    'key-not-found'
    """

    code: ClassVar[str] = "error"

    def __init__(
        self, message: str, *, key: str | None = None, details: dict[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.key = key
        self.details: dict[str, Any] = details or {}

    def __str__(self) -> str:
        # KeyError's own __str__ would show the repr of the message.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.key, self.details))


def _rebuild(
    cls: type[TorchStoreError], message: str, key: str | None, details: dict[str, Any]
) -> TorchStoreError:
    return cls(message, key=key, details=details)


class KeyNotFoundError(TorchStoreError, KeyError):
    """A key is not in the store. ``details["missing"]`` lists all missing keys of a batch."""

    code = "key-not-found"


class PartialPutError(KeyNotFoundError):
    """No version of a key is whole yet: shards, or participants, of its first one are missing.

    ``details``: what ``stat`` says of a version that is on its way: ``key``, ``version``,
    ``missing`` (a list of ``[name, offset, shape]``, boxes in elements, by the name of an entry, or
    the key of a plain tensor), ``participants`` (how many there are), ``committed`` and ``writing``
    (who of them is done, or at it), ``missing_participants`` (who has not begun, as far as their
    names are known) and ``nbytes`` (of those that are done).
    """

    code = "partial-put"


class VersionGoneError(TorchStoreError):
    """A version is not there: overwritten, deleted, or (in a put) not newer than what is."""

    code = "version-gone"


class ObjectLostError(TorchStoreError):
    """The memory that held a value is gone (its volume died) and no copy is left. Put it again.

    ``details``: ``version``; ``volume`` (its id), ``index``, ``reason`` and ``since`` (seconds
    since the epoch).
    """

    code = "object-lost"


class StoreFullError(TorchStoreError):
    """A put does not fit. Nothing was changed.

    ``details``: ``capacity_bytes``, ``used_bytes``, ``requested_bytes`` (of all ``copies``),
    ``free_bytes``, ``largest_free_bytes`` (one value needs one free range),
    ``largest_volume_bytes`` (no value can be larger), ``leased_bytes``, ``unfinished_bytes`` and
    ``holders`` (a list of who holds how much). If enough is free, but not
    in one piece: ``pieces`` (how many free ranges there are) and ``largest_value_bytes`` (of the
    put).
    """

    code = "store-full"


class StoreTimeoutError(TorchStoreError, TimeoutError):
    """An operation did not end within its ``timeout=`` (seconds).

    ``details`` of every operation: ``operation`` (its name), ``timeout`` and ``address``; if the
    server said nothing at all, ``answered`` is False. Of a wait also ``keys`` and ``min_version``
    that were waited for; and, if the server could still say it, ``unmet``: of each key that is not
    there (the first ones of many) its ``key``, newest ``version`` (0: none), whether that is
    ``lost``, and the ``pending`` versions that are half put, with their ``participants`` and who of
    them has ``committed``.
    """

    code = "timeout"


class StoreClosedError(TorchStoreError):
    """There is no store here: never initialised, shut down, or its server died."""

    code = "store-closed"


class LayoutMismatchError(TorchStoreError, ValueError):
    """Shape, dtype or slice of a destination does not fit what is stored. Nothing was written."""

    code = "layout-mismatch"


class TransportError(TorchStoreError):
    """Moving the bytes failed."""

    code = "transport"


class TransportUnavailableError(TransportError):
    """No installed and permitted transport reaches the volume. ``details["refusals"]`` says why."""

    code = "transport-unavailable"


class TransportNotReadyError(TransportUnavailableError):
    """A transport cannot reach the volume at this moment: file descriptors are used up, here or in
    the server, or the server is too busy. The store tries it again by itself, a little later.
    """

    code = "transport-not-ready"


class PluginError(TorchStoreError):
    """A plug-in is missing, broken, or claims a name that is taken."""

    code = "plugin"


class ProtocolError(TorchStoreError):
    """The other side sent something that is not the protocol, or another version of it."""

    code = "protocol"


class UnsafeObjectError(TorchStoreError):
    """A value needs pickle and ``allow_pickle=False`` forbids it."""

    code = "unsafe-object"


class UnsupportedValueError(TorchStoreError, TypeError):
    """A value of this kind cannot be stored (meta, sparse, quantised tensors, ...)."""

    code = "unsupported-value"


class ConfigurationError(TorchStoreError, ValueError):
    """An argument or environment variable has a value that makes no sense."""

    code = "configuration"


_BY_CODE: dict[str, type[TorchStoreError]] = {
    cls.code: cls
    for cls in (
        TorchStoreError,
        KeyNotFoundError,
        PartialPutError,
        VersionGoneError,
        ObjectLostError,
        StoreFullError,
        StoreTimeoutError,
        StoreClosedError,
        LayoutMismatchError,
        TransportError,
        TransportUnavailableError,
        TransportNotReadyError,
        PluginError,
        ProtocolError,
        UnsafeObjectError,
        UnsupportedValueError,
        ConfigurationError,
    )
}


def from_wire(code: str, message: str, key: str | None, details: dict[str, Any]) -> TorchStoreError:
    """The error that ``code`` stands for; an unknown code (newer server) gives the base class."""
    return _BY_CODE.get(code, TorchStoreError)(message, key=key, details=details)


def in_seconds(timeout: float | None) -> str:
    """A time-out in words: what was asked for, though a part of it was used up before.

    >>> in_seconds(0.1 + 0.2), in_seconds(1.4999), in_seconds(5), in_seconds(3600.0)
    ('0.3 s', '1.5 s', '5 s', '3600 s')
    """
    if timeout is None:
        return "any time"
    return f"{timeout:.0f} s" if timeout >= 1000 else f"{timeout:.3g} s"
