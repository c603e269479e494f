"""The steps of every kind of operation; those about references are here, the others in
:mod:`.operations`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.acting.operations import (
    SMALL,
    WORD,
    Cancelled,
    Closed,
    Steps,
    ask,
    chosen,
    get,
    mark,
    publish,
    put,
    putting,
    sealing,
    shard,
)
from tests.simulation.acting.references import Local
from tests.simulation.machine.memory import LINE

from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from tests.simulation.acting.clients import Task

__all__ = ["steps_of"]


def steps_of(task: Task) -> Steps:
    """The steps of an operation."""
    return _KINDS[task.operation.kind](task)


def _object(task: Task) -> Steps:
    operation = task.operation
    (lines,) = operation.lines
    nbytes = lines * LINE or SMALL
    data = mark(operation.number) * (nbytes // WORD.size)
    meta = TensorMeta("uint8", (nbytes,))
    item = m.PutItem("", meta, nbytes, None if lines else data)
    hold = task.client.number()
    if operation.sealed:
        yield from sealing(task, item, data, hold)
    else:
        yield from putting(task, [item], [data] if lines else [], 0, None, hold)
    _begins(task, hold, ("", 0))


def _hold(task: Task) -> Steps:
    (key,) = task.operation.keys
    hold = task.client.number()
    task.call.sent = True
    timeline = 0
    try:
        reply = yield m.Hold(task.client.number(), hold, key)
        if type(reply) is m.CommittedIn:
            timeline = reply.timelines[0]
            task.call.about = (key, reply.versions[0], timeline), True
        task.conclude(reply)
    except (Cancelled, Closed) as error:
        task.give_up(error)
    _begins(task, hold, (key, timeline))


def _begins(task: Task, hold: int, of: tuple[str, int]) -> None:
    """A process has a reference now, or takes back what it has asked for in vain."""
    call, bearer = task.call, task.client.bearer
    if bearer is None or bearer.died is not None:
        return
    if call.ended is not None and not call.code:
        key, timeline = of
        bearer.refs[hold] = Local((key, call.result[0], timeline), hold, sure=True)
    elif call.ended is None or call.code in ("Cancelled", "Closed"):
        bearer.lane.send(m.Unhold([hold]))


def _at_once(task: Task) -> Steps:
    """What no answer is waited for: a reference is sent or dropped, or a process forks."""
    try:
        yield None
    except (Cancelled, Closed):
        return
    operation, world, bearer = task.operation, task.world, task.client.bearer
    if bearer is None or bearer.died is not None:
        return
    match operation.kind:
        case "drop":
            bearer.drop(operation.which)
        case "fork":
            world.references.fork(task.client, operation.number, operation.which)
        case _:
            local = bearer.choose(operation.which)
            if local is not None:
                world.references.send(
                    bearer,
                    local,
                    operation.number,
                    operation.to,
                    twice=operation.which % 4 == 0,
                    kills=operation.kills,
                )


def _free(task: Task) -> Steps:
    try:
        yield None
        local = chosen(task)
        if local is None:
            return
        task.world.references.freed.add(local.name)
        number = task.client.number()
        task.conclude((yield m.Free(number, [local.name], number)))
    except (Cancelled, Closed) as error:
        task.give_up(error)


_KINDS = {
    "put": put,
    "rewind": put,
    "publish": publish,
    "shard": shard,
    "get": get,
    "fetch": get,
    "delete": ask,
    "wait": ask,
    "versions": ask,
    "exists": ask,
    "object": _object,
    "hold": _hold,
    "read": get,
    "send": _at_once,
    "drop": _at_once,
    "fork": _at_once,
    "free": _free,
}
