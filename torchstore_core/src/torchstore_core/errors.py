"""Every error that the store raises, in one tree.

Every error has a stable ``code``, which is sent over the wire and never changes; a message that
states what happened, to which key, and what to do about it; and optional ``details``, which are
plain data for programs.

When the server raises an error, the client rebuilds it from its code with :func:`from_wire`.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "ConfigurationError",
    "DrainError",
    "EvictedError",
    "KeyNotFoundError",
    "LayoutMismatchError",
    "ObjectLostError",
    "OutOfMemoryError",
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
    """Base class of all errors that the store raises deliberately.

    Args:
        message: what happened and what to do about it.
        key: the key concerned, or the first of several; None if no key is involved.
        details: plain data (str, int, list, dict) for programs; the ``torchstore`` tools show it.

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
        # KeyError.__str__ would return the repr of the message.
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.key, self.details))


def _rebuild(
    cls: type[TorchStoreError], message: str, key: str | None, details: dict[str, Any]
) -> TorchStoreError:
    return cls(message, key=key, details=details)


class KeyNotFoundError(TorchStoreError, KeyError):
    """A key is not in the store. ``details["missing"]`` lists every missing key of a batch."""

    code = "key-not-found"


class PartialPutError(KeyNotFoundError):
    """No version of a key is complete yet: its first one still lacks shards or participants.

    ``details`` holds what ``stat`` reports about an unfinished version: ``key``, ``version``,
    ``missing`` (a list of ``[name, offset, shape]``: boxes in elements, each with the name of its
    entry, or with the key of a plain tensor), ``participants`` (how many there are), ``committed``
    and ``writing`` (the participants that have finished, and those that are still writing),
    ``missing_participants`` (those that have not started, as far as their names are known) and
    ``nbytes`` (the bytes of the participants that have finished).
    """

    code = "partial-put"


class EvictedError(KeyNotFoundError):
    """A value that was put with ``when_full="evictable"`` had to make room for others.

    ``details``: ``missing`` as for KeyNotFoundError; the ``version``, its size ``nbytes``, when it
    was ``evicted`` (seconds since the epoch), and ``reason``, which is ``"evicted"``.
    """

    code = "evicted"


class VersionGoneError(TorchStoreError):
    """A version was overwritten or deleted; in a put, it is not newer than the stored version."""

    code = "version-gone"


class ObjectLostError(TorchStoreError):
    """The volume that held a value died and no copy is left. Put the value again.

    ``details``: ``version``; and of the volume, its id as ``volume``, its ``index``, the ``reason``
    why it was lost, and ``since`` when (seconds since the epoch).
    """

    code = "object-lost"


class StoreFullError(TorchStoreError):
    """A put does not fit into the store. Nothing was changed.

    ``details``: ``capacity_bytes``, ``used_bytes``, ``requested_bytes`` (of all ``copies``
    together), ``free_bytes``, ``largest_free_bytes`` (a value needs a single free range),
    ``largest_volume_bytes`` (no value can be larger), ``leased_bytes``, ``unfinished_bytes`` and
    ``holders`` (a list of the sessions that hold memory, and how much); ``held_bytes``, if some of
    it is there only because references (``HeldRef``) hold it. If enough memory is free,
    but not in one piece, also ``pieces`` (the number of free ranges) and ``largest_value_bytes``
    (the largest value of the put); if not the store but its host is short of memory,
    ``host_left_bytes`` (what the host, or a cgroup, has left).

    A server with a keeper also refuses what changes the store, puts and other requests, while the
    system gives its log no more memory. Then there are only ``log_bytes`` (how long the log is) and
    ``reason`` (what the system says).
    """

    code = "store-full"


class OutOfMemoryError(TorchStoreError, MemoryError):
    """This process has no memory for a value that it gets: the memory itself, its address space
    (``ulimit -v``) or its mappings (``vm.max_map_count``) are used up. Nothing is leased.

    ``details``: ``requested_bytes`` of the tensor, or the encoded object, that could not be made.
    """

    code = "out-of-memory"


class DrainError(TorchStoreError):
    """A volume cannot be emptied: the other volumes have no room for what is on it, or there is no
    other one. What could be moved was moved, and nothing is lost. Make room and drain it again, or
    put it back in service with ``undo=True``.

    ``details``: ``volume`` (its id), ``stuck_values`` and ``stuck_bytes`` (what cannot be moved),
    and ``nbytes`` (what is in use there).
    """

    code = "drain"


class StoreTimeoutError(TorchStoreError, TimeoutError):
    """An operation did not finish within its ``timeout=`` (seconds).

    ``details`` of every operation: ``operation`` (its name), ``timeout`` and ``address``; if the
    server did not respond at all, ``answered`` is False. A wait adds the ``keys`` and
    ``min_version`` that it waited for, and a put or a get that waited for memory adds
    ``waiting_for``, in words. If the server could still report it, there is also
    ``unmet``: for each key that did not meet the condition (only the first ones, if there are many)
    its ``key``, its newest ``version`` (0 if there is none), whether that version is ``lost``, and
    the ``pending`` versions that are only partly put, with the number of their ``participants`` and
    the names of those that have ``committed``.
    """

    code = "timeout"


class StoreClosedError(TorchStoreError):
    """There is no store: it was never initialised, was shut down, or its server died."""

    code = "store-closed"


class LayoutMismatchError(TorchStoreError, ValueError):
    """A destination's shape, dtype or slice does not fit the stored value. Nothing was written."""

    code = "layout-mismatch"


class TransportError(TorchStoreError):
    """A transfer of bytes failed."""

    code = "transport"


class TransportUnavailableError(TransportError):
    """No installed and permitted transport reaches the volume: see ``details["refusals"]``."""

    code = "transport-unavailable"


class TransportNotReadyError(TransportUnavailableError):
    """A transport cannot reach the volume at the moment, because this process or the server has
    run out of file descriptors, or of threads, or because the server is too busy, or has died and
    may come back (``details["died"]`` then says what of it). The store retries it by itself a
    little later.
    """

    code = "transport-not-ready"


class PluginError(TorchStoreError):
    """A plug-in is missing or broken, or claims a name that is already taken."""

    code = "plugin"


class ProtocolError(TorchStoreError):
    """The peer does not speak this protocol, or speaks another version of it."""

    code = "protocol"


class UnsafeObjectError(TorchStoreError):
    """A value needs pickle, which ``allow_pickle=False`` forbids."""

    code = "unsafe-object"


class UnsupportedValueError(TorchStoreError, TypeError):
    """Values of this kind cannot be stored (meta, sparse or quantised tensors, for example)."""

    code = "unsupported-value"


class ConfigurationError(TorchStoreError, ValueError):
    """An argument or an environment variable has an invalid value."""

    code = "configuration"


_BY_CODE: dict[str, type[TorchStoreError]] = {
    cls.code: cls
    for cls in list(globals().values())
    if isinstance(cls, type) and issubclass(cls, TorchStoreError)
}


def from_wire(code: str, message: str, key: str | None, details: dict[str, Any]) -> TorchStoreError:
    """Return the error for ``code``; for an unknown code (a newer server's), the base class."""
    return _BY_CODE.get(code, TorchStoreError)(message, key=key, details=details)


def in_seconds(timeout: float | None) -> str:
    """Return a time-out as text, rounded, so that it reads as the caller passed it even if a little
    of it has been used up.

    >>> in_seconds(0.1 + 0.2), in_seconds(1.4999), in_seconds(5), in_seconds(3600.0)
    ('0.3 s', '1.5 s', '5 s', '3600 s')
    """
    if timeout is None:
        return "any time"
    return f"{timeout:.0f} s" if timeout >= 1000 else f"{timeout:.3g} s"
