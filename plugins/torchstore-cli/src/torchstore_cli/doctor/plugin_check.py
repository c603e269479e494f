"""Checks whether plug-ins can be used, in a separate process, which a plug-in may take down.

The process is ``python -m torchstore_cli.doctor.plugin_check JSON``. For every plug-in, it writes a
line of JSON for each step, and one for the outcome. Torch-free, except for what plug-ins import.
"""

from __future__ import annotations

import asyncio
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence

import msgspec

from torchstore_core.contracts.runtime import Runtime, RuntimeSpec
from torchstore_core.contracts.transport import (
    Link,
    LinkContext,
    Segment,
    ServerContext,
    TransportServer,
    TransportSpec,
)
from torchstore_core.errors import PluginError, TransportError
from torchstore_core.machine import topology
from torchstore_core.machine.processes import signal_name, stat_fields
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.server.memory.isolated import IsolatedServer
from torchstore_core.server.memory.segment import open_memory

__all__ = ["Outcome", "check_plugins"]

# Time limit for one step of a plug-in: importing a large library from a cold disk is slow. What has
# computed for a hundredth of that does not hang, and gets as much again, some times: the machine
# may be slow, or busy.
_LONGEST_S = 30.0
_PERIODS, _SHARE = 4, 0.01
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_SEGMENT_BYTES = 1 << 16

Named = tuple[str, str]  # group and name of a plug-in


class Outcome(msgspec.Struct, frozen=True):
    """Whether one plug-in can be used.

    Args:
        error: why it cannot be used; None if it can.
        ends_process: whether it took down the process that tried it.
        refusal: why a volume in such a process would not offer the transport.
        route: over what it moves bytes between two processes of this host, if it can tell.
        offer: what such a volume would offer to the transport's clients.
    """

    error: str | None = None
    ends_process: bool = False
    refusal: str | None = None
    route: str = ""
    offer: bytes = b""


class _Task(msgspec.Struct, frozen=True):
    """What the separate process must check. ``directory``: for the sockets of server halves."""

    plugins: list[Named]
    block: tuple[str, ...]
    directory: str


class _Progress(msgspec.Struct, frozen=True):
    """A line of the separate process: the step that comes next, or an outcome."""

    step: str = ""
    outcome: Outcome | None = None


async def check_plugins(plugins: Sequence[Named], block: Sequence[str]) -> dict[Named, Outcome]:
    """Load each plug-in and the classes that it names, and start the server halves of transports.

    Args:
        plugins: group and name of each plug-in.
        block: names of plug-ins that are not loaded.
    """
    outcomes: dict[Named, Outcome] = {}
    near = tempfile.gettempdir()
    if len(os.fsencode(near)) > 40:  # a Unix socket's path has at most 107 bytes
        near = "/tmp"  # noqa: S108 - the directory is one that nobody else may enter
    with tempfile.TemporaryDirectory(prefix="torchstore-", dir=near) as directory:
        while rest := [named for named in plugins if named not in outcomes]:
            task = _Task(rest, tuple(block), directory)
            outcomes.update(zip(rest, await _check_until_it_ends(task), strict=False))
    return outcomes


async def _check_until_it_ends(task: _Task) -> list[Outcome]:
    """Return the outcomes of all plug-ins, or of those up to the one that ended the process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "torchstore_cli.doctor.plugin_check",
        msgspec.json.encode(task).decode(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    outcomes: list[Outcome] = []
    step = "starting to try it"
    how = ""
    try:
        while process.stdout is not None and len(outcomes) < len(task.plugins):
            reading = asyncio.ensure_future(process.stdout.readline())
            if how := await _hangs(process.pid, reading):
                break
            data = reading.result()
            if not data.endswith(b"\n"):
                how = f"ended the process ({_end(await process.wait())})"
                break
            line = msgspec.json.decode(data, type=_Progress)
            step = line.step or step
            if line.outcome is not None:
                outcomes.append(line.outcome)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if len(outcomes) < len(task.plugins):
        outcomes.append(Outcome(f"{step} {how}", ends_process=True))
    return outcomes


async def _hangs(pid: int, reading: asyncio.Future[bytes]) -> str:
    """Wait until a line has been read, or the process that is to write it seems to hang. Return how
    long it was waited for, in words; an empty text if there is a line.
    """
    try:
        periods, computes = 0, True
        while computes and periods < _PERIODS:
            before = _used_s(pid)
            await asyncio.wait([reading], timeout=_LONGEST_S)
            if reading.done():
                return ""
            computes = _used_s(pid) - before > _SHARE * _LONGEST_S
            periods += 1
        return f"did not end within {periods * _LONGEST_S:g} s"
    finally:
        reading.cancel()


def _used_s(pid: int) -> float:
    """The seconds of processors that a process has used; 0 if it has ended."""
    fields = stat_fields(pid)
    return sum(map(int, fields[11:13])) / _TICKS_PER_S


def _end(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal_name(-status)


# ---- the separate process -----------------------------------------------------------------


async def _check_all(task: _Task, report: Callable[[_Progress], None]) -> None:
    registry = Registry(block=task.block)

    def step(text: str) -> None:
        report(_Progress(text))

    for group, name in task.plugins:
        step("importing it")
        try:
            outcome = await _check(registry.load(group, name), task.directory, step)
        except PluginError as error:
            outcome = Outcome(error.message)
        report(_Progress(outcome=outcome))


async def _check(plugin: object, directory: str, step: Callable[[str], None]) -> Outcome:
    """Import the classes that a loaded plug-in names; start a transport's server half.

    Raises:
        PluginError: something that the plug-in names is missing or of the wrong type.
    """
    if isinstance(plugin, RuntimeSpec):
        _class(plugin.factory, Runtime, step)
        for path in (plugin.find, plugin.end, plugin.rank, plugin.spmd):
            if path is not None:
                step(f"importing {path}")
                load_class(path)
    if not isinstance(plugin, TransportSpec):
        return Outcome()
    if plugin.client is not None:
        _class(plugin.client, Link, step)
    if plugin.server is None:
        return Outcome()
    made = _class(plugin.server, TransportServer, step)
    offer, route = b"", ""
    try:
        reason = None if plugin.probe is None else plugin.probe()
        if reason is None:
            step(f"starting {plugin.server}")
            apart = plugin.isolated and plugin.tells_route
            half = IsolatedServer(plugin.server, plugin.offer) if apart else made()
            offer, route = await _start(half, plugin, directory)
            if plugin.isolated:  # a volume does not wait for the half's process
                offer = b"" if plugin.offer is None else plugin.offer()
    except TransportError as error:
        reason = error.message
    except Exception as error:
        raise PluginError(f"{plugin.server} cannot be started: {error!r}") from error
    return Outcome(refusal=reason, route=route, offer=offer)


def _class(path: str, base: type, step: Callable[[str], None]) -> type:
    step(f"importing {path}")
    found = load_class(path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PluginError(f"{path} is no subclass of {base.__name__}")
    return found


async def _start(half: TransportServer, spec: TransportSpec, directory: str) -> tuple[bytes, str]:
    """Start the server half as a volume of this process would. Return its offer, and the route of a
    link to it, if its links tell that.
    """
    here = topology.probe()
    segment = Segment(0, open_memory("doctor", _SEGMENT_BYTES), _SEGMENT_BYTES)
    try:
        offer = await half.start(ServerContext("doctor", "doctor-0", directory, here), [segment])
        if not spec.tells_route or spec.client is None:
            return offer, ""
        ask = functools.partial(half.handshake, b"doctor")
        client: type[Link] = load_class(spec.client)
        link = await client.connect(offer, LinkContext(here, here, True, True, offer, ask))
        try:
            return offer, link.route
        finally:
            link.close()
    finally:
        await half.close()
        os.close(segment.fd)


def main() -> None:
    """Check the plug-ins in the argument. Output of plug-ins goes to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    task = msgspec.json.decode(sys.argv[1].encode(), type=_Task)

    def report(line: _Progress) -> None:
        os.write(answers, msgspec.json.encode(line) + b"\n")

    asyncio.run(_check_all(task, report))


if __name__ == "__main__":
    main()
