"""A client process of the conformance kit, which runs the errands that it reads from its input.

The process is ``python -m torchstore_core.testing.transports.ends.client``. It has no torch, unless
the transport's client half imports it. Every line of its standard input is an errand, and is
answered with one line: ``ok``, or the error.

With a number and an errand as further arguments, it is a crowd: so many processes, each of which is
a client, runs the errand, says who it is, and kills itself when the input ends.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

import msgspec

from torchstore_core.contracts.transport import Link
from torchstore_core.errors import TransportError
from torchstore_core.plugins.registry import load_class
from torchstore_core.testing.transports.ends.endpoints import tool_environment
from torchstore_core.testing.transports.ends.hanging import Alarm
from torchstore_core.testing.transports.ends.memory import Memory, pattern
from torchstore_core.testing.transports.ends.session import Reach, Session

__all__ = ["Client", "Crowd", "Errand"]


# How long an errand may take. One that goes on for ever has been answered by then.
_ERRAND_S = 150.0
_MODULE = "torchstore_core.testing.transports.ends.client"


class Errand(msgspec.Struct, frozen=True):
    """A task for a client process: ``write`` a pattern, ``read`` and compare it, ``flood``: write
    patterns for ever, or ``follow``: read for ever. The last two are answered when their first
    pattern has arrived.
    """

    what: str
    seed: int
    offset: int
    nbytes: int


def _started(
    arguments: Sequence[object], wrapper: Sequence[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process of this module; each of the arguments is encoded as JSON."""
    encoded = [msgspec.json.encode(one).decode() for one in arguments]
    return subprocess.Popen(
        [*wrapper, sys.executable, "-m", _MODULE, *encoded],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=tool_environment(environment),
    )


class Client:
    """A client process, as seen by the test, which must close it."""

    def __init__(
        self,
        reach: Reach,
        wrapper: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = _started([reach], wrapper, environment or {})
        # The id by which the server half knows the process.
        self.peer = bytes.fromhex(self._line())

    def tell(self, errand: Errand) -> None:
        """Send an errand, without waiting for its answer."""
        if self._process.stdin is not None:
            self._process.stdin.write(msgspec.json.encode(errand) + b"\n")
            self._process.stdin.flush()

    def answer(self) -> str:
        """Wait for the answer to the oldest errand, and return it."""
        return self._line() or "the client process has died"

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Send the process a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the process (SIGKILL)."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Kill the process and close its pipes."""
        self.kill()
        if self._process.stdin is not None and self._process.stdout is not None:
            self._process.stdout.close()
            try:
                self._process.stdin.close()
            except BrokenPipeError:  # the pipe still contained data
                return

    def _line(self) -> str:
        if self._process.stdout is None:
            return ""
        return self._process.stdout.readline().decode().strip()


class Crowd:
    """Client processes that have run an errand each, as seen by the test, which must kill them.

    Attributes:
        peers: the ids by which the server half knows them.
    """

    def __init__(
        self, reach: Reach, count: int, errand: Errand, environment: Mapping[str, str]
    ) -> None:
        self._process = _started([reach, count, errand], (), environment)
        lines = self._process.stdout
        answers = [] if lines is None else [lines.readline().decode().strip() for _ in range(count)]
        try:
            self.peers = [bytes.fromhex(answer) for answer in answers if answer]
        except ValueError:
            self.kill()
            raise TransportError(f"client processes cannot write: {answers}") from None

    def kill(self) -> None:
        """Kill them (SIGKILL), and wait until they are dead."""
        self._process.communicate()


async def _do(link: Link, errand: Errand, alarm: Alarm) -> str:
    expected = pattern(errand.seed, errand.nbytes)
    if errand.what in ("read", "follow"):
        memory = Memory(errand.nbytes)
        await link.read([memory.copy(errand.offset)])
        if memory.data() != expected or not memory.is_intact():
            return "other bytes came"
        if errand.what == "follow":
            alarm.close()
            _say("ok")
            while True:
                await link.read([memory.copy(errand.offset)])
        return "ok"
    memory = Memory(expected)
    await link.write([memory.copy(errand.offset)])
    if errand.what == "flood":
        alarm.close()
        _say("ok")
        while True:
            errand = msgspec.structs.replace(errand, seed=errand.seed + 1)
            memory = Memory(pattern(errand.seed, errand.nbytes))
            await link.write([memory.copy(errand.offset)])
    return "ok"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _give_up(hangs: str) -> None:
    """End this process, whatever its event loop is busy with."""
    _say(f"it took more than {_ERRAND_S:.0f} s: {hangs}")
    os._exit(1)


async def _main(reach: Reach) -> None:
    session = Session(reach)
    _say(session.peer.hex())
    async with session:
        link: Link | None = None
        while line := await asyncio.to_thread(sys.stdin.readline):
            errand = msgspec.json.decode(line, type=Errand)
            try:
                with Alarm(_ERRAND_S, _give_up) as alarm:
                    if link is None:
                        link = await session.connect()
                    answer = await _do(link, errand, alarm)
                _say(answer)
            except TransportError as error:
                _say(f"{type(error).__name__}: {error.message}".replace("\n", " "))


async def _one_of_many(reach: Reach, errand: Errand) -> None:
    session = Session(reach)
    try:
        with Alarm(_ERRAND_S, _give_up) as alarm:
            answer = await _do(await session.connect(), errand, alarm)
    except TransportError as error:
        answer = f"{type(error).__name__}: {error.message}".replace("\n", " ")
    _say(session.peer.hex() if answer == "ok" else answer)
    await asyncio.to_thread(sys.stdin.readline)
    os.kill(os.getpid(), signal.SIGKILL)


def _crowd(reach: Reach, count: int, errand: Errand) -> None:
    load_class(str(reach.plugin.spec().client))  # what that imports is imported once
    for _ in range(count):
        if not os.fork():
            asyncio.run(_one_of_many(reach, errand))
    for _ in range(count):
        os.wait()


if __name__ == "__main__":
    reach = msgspec.json.decode(sys.argv[1], type=Reach)
    if sys.argv[2:]:
        _crowd(reach, int(sys.argv[2]), msgspec.json.decode(sys.argv[3], type=Errand))
    else:
        asyncio.run(_main(reach))
    os._exit(0)
