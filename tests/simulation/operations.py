"""What clients do, step by step, as generators: each yields a request, and is resumed with its
answer, or yields None to let others go on in between.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from typing import TYPE_CHECKING

from tests.simulation.memory import LINE, Range
from tests.simulation.violations import Violation

from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from tests.simulation.clients import Task

__all__ = ["Cancelled", "Closed", "Steps", "steps_of"]

Steps = Generator[m.Message | None, m.Message, None]

_WORD = struct.Struct("<IHH")  # put, entry, shard
_SMALL = 2 * _WORD.size
_ALL = 1 << 20


class Cancelled(Exception):
    """The user has given up."""


class Closed(Exception):
    """The connection is gone."""


def mark(number: int, entry: int = 0, shard: int = 0) -> bytes:
    """What every word of a value is."""
    return _WORD.pack(number, entry, shard)


def marked(data: bytes, what: str) -> bytes:
    """The mark of a value that was read."""
    word = data[: _WORD.size]
    if data != word * (len(data) // _WORD.size):
        words = {_WORD.unpack_from(data, at) for at in range(0, len(data), _WORD.size)}
        raise Violation("torn", f"{what} is a mixture of {sorted(words)}")
    return word


def steps_of(task: Task) -> Steps:
    """The steps of an operation."""
    return _KINDS[task.operation.kind](task)


# ---- putting ------------------------------------------------------------------------------


def _put(task: Task) -> Steps:
    operation = task.operation
    items: list[m.PutItem] = []
    values: list[bytes] = []
    for at, (key, lines) in enumerate(zip(operation.keys, operation.lines, strict=True)):
        nbytes = lines * LINE or _SMALL
        data = mark(operation.number, at) * (nbytes // _WORD.size)
        items.append(
            m.PutItem(key, TensorMeta("uint8", (nbytes,)), nbytes, None if lines else data)
        )
        if lines:
            values.append(data)
    yield from putting(task, items, values, operation.version, None)


def putting(
    task: Task,
    items: list[m.PutItem],
    values: list[bytes],
    version: int,
    group: m.Publication | None,
) -> Steps:
    """Put items, and write ``values``, which are those that do not travel inside the request."""
    client = task.client
    txn = client.number()
    holder = ("put", client.index, client.life, txn)
    owners = task.world.owners
    try:
        task.call.sent = not values
        reply = yield m.Put(client.number(), txn, items, version, group)
        if type(reply) is not m.Granted:
            task.conclude(reply)
            return
        count = len(values)
        pairs = [
            (grant, values[at % count])
            for at, grant in enumerate(reply.grants)
            if grant is not None
        ]
        ranges: list[Range] = [(g.volume, g.offset, g.offset + len(v)) for g, v in pairs]
        owners.writers[holder] = ranges
        for grant, value in pairs:
            for start in range(0, len(value), 2 * LINE):
                piece = value[start : start + 2 * LINE]
                owners.write(holder, grant.volume, grant.offset + start, piece)
                yield None
        del owners.writers[holder]
        task.call.sent = True
        task.conclude((yield m.Commit(client.number(), txn)))
    except (Cancelled, Closed) as error:
        owners.writers.pop(holder, None)
        task.give_up(error)
        via = client.lanes[0] if task.connection.closed or task.operation.spare else task.connection
        via.send(m.Abort([txn]))


# ---- getting ------------------------------------------------------------------------------


def _get(task: Task) -> Steps:
    operation = task.operation
    client = task.client
    lease = client.number()
    holder = ("get", client.index, client.life, lease)
    owners = task.world.owners
    try:
        wants = [m.Want(key, operation.version) for key in operation.keys]
        inline = _ALL if operation.inline else 0
        reply = yield m.Locate(client.number(), lease, wants, inline)
        if type(reply) is not m.Located:
            task.conclude(reply)
            return
        ranges: list[Range] = []
        for entry in reply.entries:
            if entry.grant is not None:
                at = entry.grant.offset
                ranges.append((entry.grant.volume, at, at + entry.nbytes))
        owners.readers[holder] = ranges
        found: list[tuple[int, bytes]] = []
        for key, entry in zip(operation.keys, reply.entries, strict=True):
            what = f"version {entry.version} of {key!r}"
            if entry.grant is None:
                found.append((entry.version, marked(entry.data or b"", what)))
                continue
            pieces: list[bytes] = []
            for start in range(0, entry.nbytes, 2 * LINE):
                nbytes = min(2 * LINE, entry.nbytes - start)
                pieces.append(owners.read(entry.grant.volume, entry.grant.offset + start, nbytes))
                yield None
            found.append((entry.version, marked(b"".join(pieces), what)))
        task.call.returned(found, task.world.step)
        if not reply.leased:
            return
        seen = [owners.read(volume, start, end - start) for volume, start, end in ranges]
        for _ in range(operation.hold):
            yield None
            again = [owners.read(volume, start, end - start) for volume, start, end in ranges]
            if again != seen:
                raise Violation("lease", f"what {operation} reads has changed under its lease")
        del owners.readers[holder]
        via = client.lanes[0] if operation.spare or task.connection.closed else task.connection
        via.send(m.Release([lease]))
    except (Cancelled, Closed) as error:
        owners.readers.pop(holder, None)
        task.give_up(error)
        client.lanes[0].send(m.Release([lease]))


# ---- the rest -----------------------------------------------------------------------------


def _ask(task: Task) -> Steps:
    operation = task.operation
    number = task.client.number()
    keys = list(operation.keys)
    request: m.Message
    match operation.kind:
        case "delete":
            request = m.Delete(number, keys, operation.strict)
        case "wait":
            request = m.Wait(number, keys, operation.version)
        case "versions":
            request = m.Versions(number, keys[0])
        case _:
            request = m.Exists(number, keys)
    try:
        task.call.sent = True
        task.conclude((yield request))
    except (Cancelled, Closed) as error:
        task.give_up(error)
        if operation.kind == "wait":
            task.connection.send(m.Cancel(number))


_KINDS = {
    "put": _put,
    "get": _get,
    "delete": _ask,
    "wait": _ask,
    "versions": _ask,
    "exists": _ask,
}
