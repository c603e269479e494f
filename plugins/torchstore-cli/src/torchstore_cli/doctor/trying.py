"""Whether plug-ins can be used: each is tried in a process beside, which it may take down.

``python -m torchstore_cli.doctor.trying JSON`` is that process: for every plug-in it says a line of
JSON for each step, and one for the outcome. Torch-free, but for what the plug-ins import.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence

import msgspec

from torchstore_core.contracts.runtime import Runtime, RuntimeSpec
from torchstore_core.contracts.transport import (
    Link,
    Segment,
    ServerContext,
    TransportServer,
    TransportSpec,
)
from torchstore_core.errors import PluginError, TransportUnavailableError
from torchstore_core.machine import topology
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.server.memory.segment import open_memory

__all__ = ["Outcome", "try_plugins"]

# Longest time for one plug-in: importing a large library from a cold disk takes long.
_LONGEST_S = 30.0
_SEGMENT_BYTES = 1 << 16

Named = tuple[str, str]  # group and name of a plug-in


class Outcome(msgspec.Struct, frozen=True):
    """What came of one plug-in.

    Args:
        error: why it cannot be used; None: it can.
        ends_process: it took the process down that tried it.
        refusal: why a volume in a process like that one does not offer the transport.
    """

    error: str | None = None
    ends_process: bool = False
    refusal: str | None = None


class _Tries(msgspec.Struct, frozen=True):
    """What the process beside is to do. ``directory``: for the sockets of server halves."""

    plugins: list[Named]
    block: tuple[str, ...]
    directory: str


class _Line(msgspec.Struct, frozen=True):
    """What it says: what it does next, or the outcome."""

    step: str = ""
    outcome: Outcome | None = None


async def try_plugins(plugins: Sequence[Named], block: Sequence[str]) -> dict[Named, Outcome]:
    """Load each of the plug-ins and the classes that it names, and start its server half.

    Args:
        plugins: group and name of each.
        block: names of plug-ins that are not loaded.
    """
    outcomes: dict[Named, Outcome] = {}
    with tempfile.TemporaryDirectory(prefix="torchstore-") as directory:
        while rest := [named for named in plugins if named not in outcomes]:
            tries = _Tries(rest, tuple(block), directory)
            outcomes.update(zip(rest, await _try_until_it_ends(tries), strict=False))
    return outcomes


async def _try_until_it_ends(tries: _Tries) -> list[Outcome]:
    """The outcomes of the first plug-ins: of all, or up to the one that ended the process."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "torchstore_cli.doctor.trying",
        msgspec.json.encode(tries).decode(),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    outcomes: list[Outcome] = []
    step = "starting to try it"
    how = f"did not end within {_LONGEST_S:g} s"
    try:
        async with asyncio.timeout(_LONGEST_S) as limit:
            while process.stdout is not None and len(outcomes) < len(tries.plugins):
                data = await process.stdout.readline()
                if not data.endswith(b"\n"):
                    how = f"ended the process ({_end(await process.wait())})"
                    break
                line = msgspec.json.decode(data, type=_Line)
                step = line.step or step
                if line.outcome is not None:
                    outcomes.append(line.outcome)
                    limit.reschedule(asyncio.get_running_loop().time() + _LONGEST_S)
    except TimeoutError:
        pass  # ``how`` says it
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if len(outcomes) < len(tries.plugins):
        outcomes.append(Outcome(f"{step} {how}", ends_process=True))
    return outcomes


def _end(status: int) -> str:
    return f"exit status {status}" if status >= 0 else signal.Signals(-status).name


# ---- the process beside -------------------------------------------------------------------


async def _try_all(tries: _Tries, say: Callable[[_Line], None]) -> None:
    registry = Registry(block=tries.block)

    def step(text: str) -> None:
        say(_Line(text))

    for group, name in tries.plugins:
        step("importing it")
        try:
            outcome = await _try(registry.load(group, name), tries.directory, step)
        except PluginError as error:
            outcome = Outcome(error.message)
        say(_Line(outcome=outcome))


async def _try(plugin: object, directory: str, step: Callable[[str], None]) -> Outcome:
    """Import what a loaded plug-in names; of a transport, start the server half.

    Raises:
        PluginError: something that it names is not there, or not what it should be.
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
    try:
        reason = None if plugin.probe is None else plugin.probe()
        if reason is None:
            step(f"starting {plugin.server}")
            await _start(made, directory)
    except TransportUnavailableError as error:
        reason = error.message
    except Exception as error:
        raise PluginError(f"{plugin.server} cannot be started: {error!r}") from error
    return Outcome(refusal=reason)


def _class(path: str, base: type, step: Callable[[str], None]) -> type:
    step(f"importing {path}")
    found = load_class(path)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PluginError(f"{path} is no subclass of {base.__name__}")
    return found


async def _start(cls: type[TransportServer], directory: str) -> None:
    """What a volume of this process would do."""
    segment = Segment(0, open_memory("doctor", _SEGMENT_BYTES), _SEGMENT_BYTES)
    half = cls()
    try:
        await half.start(
            ServerContext("doctor", "doctor-0", directory, topology.probe()), [segment]
        )
    finally:
        await half.close()
        os.close(segment.fd)


def main() -> None:
    """Entry point of the module. What plug-ins print goes nowhere."""
    answers = os.dup(1)
    os.dup2(2, 1)
    tries = msgspec.json.decode(sys.argv[1].encode(), type=_Tries)

    def say(line: _Line) -> None:
        os.write(answers, msgspec.json.encode(line) + b"\n")

    asyncio.run(_try_all(tries, say))


if __name__ == "__main__":
    main()
