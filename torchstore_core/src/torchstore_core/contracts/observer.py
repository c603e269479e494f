"""What an observer plug-in (group ``torchstore.plugins``) receives for each client operation.

A complete plug-in is a module, here ``my_observer``, with an entry point in its
``pyproject.toml``::

    [project.entry-points."torchstore.plugins"]
    mine = "my_observer"

and one hook, a plain function that is called in the client, on the caller's event loop, when an
operation has ended:

>>> from collections import Counter
>>> from torchstore_core.contracts.hooks import hookimpl
>>> moved, failed = Counter(), Counter()
>>> @hookimpl
... def torchstore_operation(operation):
...     moved[operation.name] += operation.nbytes
...     if operation.error:
...         failed[operation.error] += 1
>>> torchstore_operation(Operation("get", "torchstore", 1, 4096, "shm", 1e-3, {}, key="w"))
>>> torchstore_operation(Operation("get", "torchstore", 1, 0, "", 1e-4, {}, "key-not-found"))
>>> moved, failed
(Counter({'get': 4096}), Counter({'key-not-found': 1}))

The hook must be quick, and may omit its argument. An exception that it raises is logged the first
time, then only counted (``plugin_errors`` of ``status()``), and never reaches the caller; Ctrl-C
does.
"""

from __future__ import annotations

import msgspec

__all__ = ["Operation"]


class Operation(msgspec.Struct, frozen=True):
    """One client operation that has ended. Every call of a ``Client`` that sends a request to the
    store is one, whether it was awaited, blocking, or made through a function of the module.

    A ``put_state_dict(blocking=False)`` ends when its commit does. It is never reported if its
    event loop is closed before then.

    Args:
        name: name of the call: ``put``, ``get_batch``, ``latest_version``, ...
        store_name: name of the store.
        entries: number of keys; for ``put_state_dict`` and ``get_state_dict``, of entries.
        nbytes: bytes of values that were moved or mapped, counting every copy and also transfers
            whose operation failed. For a rank's part or a shard, only its own bytes; 0 where there
            was nothing to write.
        transport: names of the transports that moved them, joined by ``+``; ``""`` if none did.
        seconds: from the call to its end, by the monotonic clock.
        phases: seconds by phase: ``plan`` (control message), ``copy``, ``commit``.
        error: ``""`` if it succeeded; else the ``code`` of the ``TorchStoreError`` that it raised,
            or, for any other exception, the name of its class, such as ``CancelledError``.
        key: the key, or the first of several; ``""`` if there is none.
        version: the version of ``key`` that was put, read or found; for a failed call, the version
            that was requested. 0 if neither is known.
        volumes: ids of the volumes that the client moved bytes to or from, sorted. Values that
            travel inside a message (transport ``inline``) involve none.
    """

    name: str
    store_name: str
    entries: int
    nbytes: int
    transport: str
    seconds: float
    phases: dict[str, float]
    error: str = ""
    key: str = ""
    version: int = 0
    volumes: tuple[str, ...] = ()
