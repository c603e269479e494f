"""What an observer plug-in (group ``torchstore.plugins``) is told about each client operation.

A whole plug-in is a module, here ``my_observer``, with an entry point in its ``pyproject.toml``::

    [project.entry-points."torchstore.plugins"]
    mine = "my_observer"

and one hook, a plain function that is called in the client, on the event loop of the caller, when
an operation has ended:

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

It must be quick, and may leave out its argument. What it raises is logged the first time, then
counted (``plugin_errors`` of ``status()``), and never reaches the caller; Ctrl-C does.
"""

from __future__ import annotations

import msgspec

__all__ = ["Operation"]


class Operation(msgspec.Struct, frozen=True):
    """One client operation that has ended. Every call of a ``Client`` that asks the store for
    something is one, whichever way it was called: blocking, or by a function of the module.

    A ``put_state_dict(blocking=False)`` has ended when its commit has. That of an event loop that
    is closed before then is never told of.

    Args:
        name: of the call: ``put``, ``get_batch``, ``latest_version``, ...
        store_name: which store.
        entries: number of keys; of ``put_state_dict`` and ``get_state_dict``, of entries.
        nbytes: bytes of values that were moved or mapped, to all copies and also in vain: of a
            part or a shard its own; 0 where there was nothing to write.
        transport: names of the transports that moved them, joined by ``+``; ``""`` if none did.
        seconds: from call to end, by the monotonic clock.
        phases: seconds by phase: ``plan`` (control message), ``copy``, ``commit``.
        error: ``""`` if it succeeded; else the ``code`` of the ``TorchStoreError`` that it raised,
            and of any other exception the name of its class: ``CancelledError``.
        key: the key, of several the first one; ``""`` if there is none.
        version: of ``key``: what was put, read or found; of a failed call what was asked for. 0 if
            neither is known.
        volumes: ids of the volumes that the client moved bytes to or from, sorted. What rides in a
            message (transport ``inline``) moves by none.
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
