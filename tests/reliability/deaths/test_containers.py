"""Clients in containers: namespaces of their own, in which each of them is process 1 of a host of
the same name or of another one. What they share with the server is the machine and a socket.
"""

from __future__ import annotations

import asyncio
import gc
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from tests.reliability.harness import is_running
from tests.support import running_store, until

import torchstore_core as ts

MB = 1 << 20
VALUE = torch.arange(MB, dtype=torch.int32)
CLIENT = """
import asyncio, os, sys
import torch
import torchstore_core as ts

async def main():
    client = await ts.connect(sys.argv[1])
    try:
        mapped = await client.get("w")
    except ts.TransportError as error:
        print(type(error).__name__, error, flush=True)
        return
    ref = await client.put_object(mapped + 1)
    (link,) = await client.explain(mapped.nbytes)
    print(os.getpid(), os.uname().nodename, link["chosen"], flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        same = torch.equal(mapped, await client.get("w"))
        print(same and torch.equal(mapped + 1, await client.get(ref)), flush=True)

asyncio.run(main())
"""


class Container:
    """A process with namespaces of its own, but for that of files.

    Args:
        address: of the store that it joins.
        name: of its host.
        environment: further variables.
    """

    def __init__(self, address: str, name: str, environment: dict[str, str]) -> None:
        command = [*UNSHARE, "sh", "-c", f'hostname {name}; exec "$@"', "sh"]
        self._process = subprocess.Popen(
            [*command, sys.executable, "-P", "-c", CLIENT, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | environment,
        )

    async def said(self) -> list[str]:
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        return line.decode().split()

    async def works(self) -> None:
        """It reads what it has mapped, what is there, and what it refers to."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        assert await self.said() == ["True"]

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
UNSHARE += ["--net", "--ipc", "--uts"]


@pytest.fixture
def containers() -> Iterator[list[Container]]:
    """All that a test has started; skips it where no namespaces can be made."""
    done = subprocess.run([*UNSHARE, "true"], check=False, capture_output=True)
    if done.returncode:
        pytest.skip(f"no namespaces can be made here: {done.stderr!r}")
    made: list[Container] = []
    yield made
    for one in made:
        one.kill()


async def held() -> tuple[int, int, int]:
    """Sessions, bytes that are mapped, and references."""
    status = await ts.status()
    return len(status.sessions), status.volumes[0].leased_bytes, len(await ts.refs())


async def becomes(expected: tuple[int, int, int]) -> None:
    async def is_so() -> bool:
        gc.collect()
        return await held() == expected

    await until(is_so)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("a", "b"), id="other", marks=pytest.mark.soak),
        pytest.param((platform.node(), platform.node()), id="same"),
    ],
)
async def test_they_share_memory_and_are_told_apart(
    containers: list[Container], names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their hosts are called; also by a server that has been killed, and that does not see
    one of them die.
    """
    monkeypatch.setenv("TORCHSTORE_REF_GRACE", "0.5")
    async with running_store() as client:
        await client.put("w", VALUE)
        for name in names:
            containers.append(Container(client.address, name, {}))
            assert await containers[-1].said() == ["1", name, "shm"]
        await becomes((3, VALUE.nbytes, 2))

        os.kill((await client.status()).controller_pid, signal.SIGKILL)
        for one in containers:
            await one.works()
        await becomes((3, VALUE.nbytes, 2))

        server = (await client.status()).controller_pid
        os.kill(server, signal.SIGSTOP)
        containers[0].kill()
        os.kill(server, signal.SIGKILL)
        await until(lambda: not is_running(server))
        await becomes((2, VALUE.nbytes, 1))
        await containers[1].works()
        containers[1].kill()
        await becomes((1, 0, 0))


async def test_one_that_is_said_to_be_another_host_shares_no_memory(
    containers: list[Container],
) -> None:
    """It is not tried either; and this one has no network."""
    async with running_store() as client:
        await client.put("w", VALUE)
        environment = {"TORCHSTORE_HOST_ID": "a container"}
        containers.append(Container(client.address, platform.node(), environment))
        said = await containers[0].said()
        assert said[0] == "TransportUnavailableError", said
        assert "shm: the volume is on another host" in " ".join(said)
