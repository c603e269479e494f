"""What clients do, step by step, as generators: each yields a request, and is resumed with its
answer; or a packet, and is told whether it has landed; or None, to let others go on in between.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from tests.simulation.acting.references import Local
from tests.simulation.machine.halves import TRANSPORT, Packet
from tests.simulation.machine.memory import LINE, Holder, Range
from tests.simulation.plans import KEPT, STATE_DICT
from tests.simulation.promises.violations import Violation

from torchstore_core.values import TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from tests.simulation.acting.clients import Task

__all__ = ["SMALL", "WORD", "Cancelled", "Closed", "Steps", "ask", "chosen", "get", "mark"]
__all__ += ["marked", "publish", "put", "putting", "sealing", "shard"]

Steps = Generator[m.Message | Packet | None, Any, None]

WORD = struct.Struct("<IHH")  # put, entry, shard
SMALL = 2 * WORD.size
_ALL = 1 << 20


class Cancelled(Exception):
    """The user has given up."""


class Closed(Exception):
    """The connection is gone."""


def mark(number: int, entry: int = 0, shard: int = 0) -> bytes:
    """What every word of a value is."""
    return WORD.pack(number, entry, shard)


def marked(data: bytes, what: str) -> bytes:
    """The mark of a value that was read."""
    word = data[: WORD.size]
    if data != word * (len(data) // WORD.size):
        words = {WORD.unpack_from(data, at) for at in range(0, len(data), WORD.size)}
        raise Violation("torn", f"{what} is a mixture of {sorted(words)}")
    return word


# ---- putting ------------------------------------------------------------------------------


def put(task: Task) -> Steps:
    operation = task.operation
    items: list[m.PutItem] = []
    values: list[bytes] = []
    for at, (key, lines) in enumerate(zip(operation.keys, operation.lines, strict=True)):
        nbytes = lines * LINE or SMALL
        data = mark(operation.number, at) * (nbytes // WORD.size)
        items.append(
            m.PutItem(key, TensorMeta("uint8", (nbytes,)), nbytes, None if lines else data)
        )
        if lines:
            values.append(data)
    if operation.sealed:
        yield from sealing(task, items[0], values[0])
    else:
        yield from putting(task, items, values, operation.version, None)


def publish(task: Task) -> Steps:
    operation = task.operation
    items: list[m.PutItem] = []
    values: list[bytes] = []
    for at, (name, lines) in enumerate(zip(operation.names, operation.lines, strict=True)):
        shared = name == "all"
        nbytes = (0 if shared else lines * LINE) or SMALL
        data = mark(operation.number, at) * (nbytes // WORD.size)
        small = shared or not lines
        meta = TensorMeta("uint8", (nbytes,))
        items.append(m.PutItem(name, meta, nbytes, data if small else None))
        if not small:
            values.append(data)
    who = str(task.client.index)
    group = m.Publication(
        operation.keys[0], who, operation.participants, operation.partial, operation.keep
    )
    yield from putting(task, items, values, operation.version, group)


def shard(task: Task) -> Steps:
    operation = task.operation
    who, count = int(operation.names[0]), operation.participants
    part = TensorSlice((who * LINE,), (LINE,), (count * LINE,), (count,), (who,))
    meta = TensorMeta("uint8", (count * LINE,))
    data = mark(operation.number) * (LINE // WORD.size)
    item = m.PutItem(operation.keys[0], meta, LINE, None, part)
    yield from putting(task, [item], [data], operation.version, None)


def putting(
    task: Task,
    items: list[m.PutItem],
    values: list[bytes],
    version: int,
    group: m.Publication | None,
    hold: int = 0,
) -> Steps:
    """Put items, and write ``values``, which are those that do not travel inside the request.

    ``hold``: the id of a reference to the item, which has no key.
    """
    client = task.client
    txn = client.number()
    holder = ("put", client.index, client.life, txn)
    writers = task.world.owners.writers
    unsettled: list[tuple[int, str]] = []
    unfinished = client.unfinished
    unfinished.add(txn)
    try:
        task.call.sent = not values
        kind = m.Rewind if task.operation.kind == "rewind" else m.Put
        fades = m.EVICTABLE if task.operation.fades else 0
        request: m.Message = kind(client.number(), txn, items, version, group, fades)
        if hold:
            request = m.PutObject(client.number(), txn, items[0], hold)
        reply = yield request
        if type(reply) is not m.Granted:
            task.conclude(reply)
            return
        grants = enumerate(reply.grants)
        pairs = [(to, values[at % len(values)]) for at, to in grants if to is not None]
        writers[holder] = [(g.volume, g.offset, g.offset + len(value)) for g, value in pairs]
        for grant, value in pairs:
            landed = False
            if task.world.plan.travels:
                unsettled = [(grant.volume, TRANSPORT)]
                landed = yield from _send(task, holder, grant, value)
                unsettled = []
            if not landed:
                yield from _write(task, holder, grant, value)
        del writers[holder]
        task.call.sent = True
        reply = yield m.Commit(client.number(), txn)
        task.conclude(reply)
        if type(reply) is m.Failure and reply.code == "store-full":  # its log was
            task.liveness.send(m.Abort([txn]))  # as real clients do: a channel may be dead already
    except (Cancelled, Closed) as error:
        writers.pop(holder, None)
        task.give_up(error)
        for volume, _ in unsettled:
            client.links.pop(volume, None)
        via = task.liveness if task.connection.closed or task.operation.spare else task.connection
        via.send(m.Abort([txn], unsettled))
    finally:
        unfinished.discard(txn)


def sealing(task: Task, item: m.PutItem, value: bytes, hold: int = 0) -> Steps:
    """Make a value in the store, and put it without a copy: its client keeps it for as long as the
    operation says.

    ``hold``: as for :func:`putting`.
    """
    client, operation, owners = task.client, task.operation, task.world.owners
    txn, lease = client.number(), client.number()
    holder = ("put", client.index, client.life, txn)
    client.unfinished.add(txn)
    is_kept = False
    try:
        unnamed = replace(item, key=f"{m.HIDDEN}made-{client.index}-{client.life}-{txn}")
        reply = yield m.Put(client.number(), txn, [unnamed])
        if type(reply) is not m.Granted:
            task.conclude(reply)
            return
        (grant,) = reply.grants
        ranges = [(grant.volume, grant.offset, grant.offset + len(value))]
        owners.writers[holder] = ranges
        yield from _write(task, holder, grant, value)
        # From now on, what it writes goes to pages of its own; it reads the others.
        owners.readers[holder] = owners.writers.pop(holder)
        client.leases[lease] = None
        task.call.sent = True
        fades = m.EVICTABLE if operation.fades else 0
        reply = yield m.Seal(client.number(), txn, item.key, lease, hold, "", fades)
        task.conclude(reply)
        client.unfinished.discard(txn)
        if type(reply) is m.Failure:
            _give_up_sealing(task, holder, txn, lease)
            return
        is_kept = yield from _look(task, ranges)
        if not is_kept:
            del owners.readers[holder]
            task.liveness.send(m.Release([lease]))
    except (Cancelled, Closed) as error:
        task.give_up(error)
        _give_up_sealing(task, holder, txn, lease)
    finally:
        client.unfinished.discard(txn)
        if not is_kept:
            client.leases.pop(lease, None)


def _give_up_sealing(task: Task, holder: Holder, txn: int, lease: int) -> None:
    """Its bytes are in memory of its client's own now."""
    task.world.owners.writers.pop(holder, None)
    task.world.owners.readers.pop(holder, None)
    via = task.liveness if task.connection.closed or task.operation.spare else task.connection
    via.send(m.Abort([txn]))
    task.liveness.send(m.Release([lease]))


def _write(task: Task, holder: Holder, grant: m.Grant, value: bytes) -> Steps:
    """Write a value through a window, in pieces."""
    for start in range(0, len(value), 2 * LINE):
        piece = value[start : start + 2 * LINE]
        if task.world.telling:
            where = f"{grant.volume}:{grant.offset + start}"
            task.world.tell(f"client {task.client.index} writes {len(piece)} bytes at {where}")
        task.world.owners.write(holder, grant.volume, grant.offset + start, piece)
        yield None


def _send(
    task: Task, holder: Holder, grant: m.Grant, value: bytes
) -> Generator[m.Message | Packet | None, Any, bool]:
    """Send a value over a network; whether it has arrived. If not, it never will."""
    client, volume = task.client, grant.volume
    if volume not in client.links:
        reply = yield m.Handshake(client.number(), volume, TRANSPORT, b"%d.%d" % holder[1:3])
        if type(reply) is not m.Handshaken:
            return False
        client.links[volume] = reply.data
    ticket = client.links[volume]
    for start in range(0, len(value), 2 * LINE):
        piece = value[start : start + 2 * LINE]
        offset = grant.offset + start
        if not (yield Packet(ticket, task.operation.number, holder, volume, offset, piece)):
            if client.links.get(volume) == ticket:
                del client.links[volume]
            yield m.Settle(client.number(), volume, TRANSPORT)
            return False
    return True


def chosen(task: Task, *, dropped_too: bool = False) -> Local | None:
    """The reference that an operation is about; None: its process has none.

    ``dropped_too``: it may be about a version that the process does not hold any more.
    """
    bearer, which = task.client.bearer, task.operation.which
    if bearer is None:
        return None
    if dropped_too and bearer.dropped:
        return Local(bearer.dropped[which % len(bearer.dropped)], 0, sure=False)
    return bearer.choose(which)


# ---- getting ------------------------------------------------------------------------------


def get(task: Task) -> Steps:
    """Reads keys, or all of a state dict, or what a reference refers to."""
    operation = task.operation
    client = task.client
    local: Local | None = None
    lease = client.number()
    holder = ("get", client.index, client.life, lease)
    owners = task.world.owners
    leases, is_kept = client.leases, False
    leases[lease] = None
    try:
        inline = _ALL if operation.inline else 0
        request: m.Message
        names = list(operation.keys)
        if operation.kind == "read":
            yield None
            local = chosen(task, dropped_too=operation.spare)
            if local is None:
                return
            local.users += 1
            name, version, timeline = local.name
            task.call.about = local.name, local.sure
            names = [name]
            if name == STATE_DICT:
                what = lease, name, version, None, inline
                request = m.FetchRef(client.number(), *what, timeline=timeline)
            else:
                wants = [m.Want(name, version)]
                request = m.LocateRefs(client.number(), lease, wants, inline, timelines=[timeline])
        elif operation.kind == "fetch":
            key = operation.keys[0]
            request = m.Fetch(client.number(), lease, key, operation.version, None, inline)
        else:
            wants = [m.Want(key, operation.version) for key in operation.keys]
            request = m.Locate(client.number(), lease, wants, inline)
        reply = yield request
        if type(reply) is m.Located:
            entries = reply.entries
        elif type(reply) is m.Fetched:
            entries, names = [one for one in reply.entries if one is not None], reply.names
        else:
            task.conclude(reply)
            return
        pieces = [
            (name, entry.version, *piece)
            for name, entry in zip(names, entries, strict=True)
            for piece in _pieces(entry)
        ]
        ranges: list[Range] = [
            (grant.volume, grant.offset, grant.offset + nbytes)
            for *_, nbytes, _, grant in pieces
            if grant is not None
        ]
        owners.readers[holder] = ranges
        found: list[tuple[str, int, bytes]] = []
        for name, version, where, nbytes, data, grant in pieces:
            if grant is not None:
                read: list[bytes] = []
                for start in range(0, nbytes, 2 * LINE):
                    size = min(2 * LINE, nbytes - start)
                    read.append(owners.read(grant.volume, grant.offset + start, size))
                    yield None
                data = b"".join(read)
            what = f"version {version} of {name!r}"
            found.append((name + where, version, marked(data or b"", what)))
        version = reply.version if type(reply) is m.Fetched else 0
        task.call.returned((version, found), task.world.step)
        if not reply.leased:
            return
        is_kept = yield from _look(task, ranges)
        if is_kept:
            return
        via = task.liveness if operation.spare or task.connection.closed else task.connection
        if operation.hold % 2 == 0:
            del owners.readers[holder]
            via.send(m.Release([lease]))
            return
        for at, (*_, nbytes, _, grant) in enumerate(pieces):  # one after the other
            if grant is not None:
                ranges.remove((grant.volume, grant.offset, grant.offset + nbytes))
                leases[lease] = [one for one in range(at + 1, len(pieces)) if pieces[one][-1]]
                via.send(m.Release([], [(lease, [at])]))
                yield None
        del owners.readers[holder]
    except (Cancelled, Closed) as error:
        owners.readers.pop(holder, None)
        task.give_up(error)
        task.liveness.send(m.Release([lease]))
    finally:
        if not is_kept:
            leases.pop(lease, None)
        if local is not None:
            local.users -= 1


def _look(task: Task, ranges: list[Range]) -> Generator[m.Message | Packet | None, Any, bool]:
    """Look at memory that is leased, for as long as the operation says; whether for ever."""
    client, operation, owners = task.client, task.operation, task.world.owners
    seen = [owners.read(volume, start, end - start) for volume, start, end in ranges]
    if operation.hold == KEPT:
        client.kept.append((ranges, seen))
        return True
    for _ in range(operation.hold):
        yield None
        again = [owners.read(volume, start, end - start) for volume, start, end in ranges]
        if again != seen:
            raise Violation("lease", f"what {operation} reads has changed under its lease")
    return False


def _pieces(entry: m.Entry) -> list[tuple[str, int, bytes | None, m.Grant | None]]:
    """Where the pieces of an entry are in it, and how many bytes, which or where."""
    if entry.parts is None:
        return [("", entry.nbytes, entry.data, entry.grant)]
    return [(f"@{p.offset[0]}", p.nbytes, p.data, p.grant) for p in entry.parts]


# ---- the rest -----------------------------------------------------------------------------


def ask(task: Task) -> Steps:
    operation = task.operation
    number = task.client.number()
    keys = list(operation.keys)
    request: m.Message
    match operation.kind:
        case "delete":
            request = m.Delete(number, keys, operation.strict, number)
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
