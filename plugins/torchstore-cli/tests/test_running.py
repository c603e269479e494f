"""What docs/running.md says besides its program, which tests/test_readme.py runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import torchstore_core as ts
from torchstore_core.clients.session.handshake import client_facts, socket_path
from torchstore_core.machine import topology
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_reply, encode

PAGE = (Path(__file__).parents[3] / "docs/running.md").read_text()
BIN = Path(sys.executable).parent


def _environment(**changes: str) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TORCHSTORE_")}
    return {**inherited, "PATH": f"{BIN}:{os.environ['PATH']}", **changes}


@contextmanager
def _running(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process
        finally:
            process.kill()


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.M | re.S)


@pytest.mark.thorough
async def test_the_transcript_of_unrelated_terminals(tmp_path: Path) -> None:
    serve, others = _blocks("console")
    command = shlex.split(serve.removeprefix("$ "))
    (directory,) = [word for word in command if word.startswith("/tmp/")]
    mine = f"/tmp/ts-{os.getpid()}"  # short, and not in the way of another test's
    command[command.index(directory)] = mine
    command[0] = str(BIN / command[0])
    with _running(command, _environment()) as server:
        assert server.stdout is not None
        assert "is up" in server.stdout.readline()
        script = "".join(
            f"{line.removeprefix('$ ')}\n" for line in others.splitlines() if line.startswith("$ ")
        )
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-e", "-c", script.replace(directory, mine)],
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=200,
        )
        printed = "".join(
            line for line in others.splitlines(keepends=True) if not line.startswith("$ ")
        )
        assert (done.returncode, done.stderr, done.stdout) == (0, "", printed)
        server.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(server.wait, 10) == 0
    assert not Path(mine).exists()


async def test_the_unit_file_serves_and_serves_again(tmp_path: Path) -> None:
    (unit,) = _blocks("ini")
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit, re.M))
    if analyze := shutil.which("systemd-analyze"):
        file = tmp_path / "torchstore@.service"
        file.write_text(unit.replace("/opt/torchstore/bin", str(BIN)))
        checked = subprocess.run([analyze, "verify", file], capture_output=True, text=True)
        assert (checked.returncode, checked.stderr) == (0, "")
    run = f"/tmp/ts-run-{os.getpid()}"
    directory = Path(run) / settings["RuntimeDirectory"].replace("%i", "alice")
    command = settings["ExecStart"].replace("%t", run).replace("%i", "alice").split()
    assert command[0] == "/opt/torchstore/bin/torchstore"
    command[0] = str(BIN / "torchstore")
    command += ["--json", "--prefault", "0"]
    name, _, value = settings["Environment"].partition("=")
    directory.mkdir(parents=True)
    directory.chmod(int(settings["RuntimeDirectoryMode"], 8))
    try:
        for ended_by in (signal.SIGKILL, signal.SIGTERM):  # over what a killed one has left
            with _running(command, _environment(**{name: value})) as server:
                assert server.stdout is not None
                ready = json.loads(server.stdout.readline())
                assert ready["address"] == f"unix:{directory}/control.sock"
                assert (ready["store_name"], ready["capacity_bytes"]) == ("training", 64 << 30)
                client = await ts.connect(ready["address"], store_name="served")
                await client.put("k", 1)
                server.send_signal(ended_by)
                code = await asyncio.to_thread(server.wait, 10)
                assert code == (0 if ended_by is signal.SIGTERM else -signal.SIGKILL)
                await ts.shutdown("served")
    finally:
        shutil.rmtree(run)


async def test_the_error_of_another_protocol(shared: ts.Client) -> None:
    (said,) = re.findall(r"^.* speaks protocol .*$", PAGE, re.M)
    here = topology.probe()
    hello = m.Hello(1, m.PROTOCOL_VERSION + 1, b"", here, client_facts({}, here))
    reader, writer = await asyncio.open_unix_connection(socket_path(shared.address))
    writer.write(encode(hello))
    bodies: list[bytes] = []
    unread = FrameReader(m.MAX_FRAME)
    while not bodies:
        bodies = unread.feed(await reader.read(1 << 16))
    writer.close()
    await writer.wait_closed()
    failure = decode_reply(bodies[0])
    assert isinstance(failure, m.Failure)
    assert failure.code == ts.ProtocolError.code
    numbers = r"protocol \d+, this server \d+"
    assert re.sub(numbers, "", failure.message) == re.sub(numbers, "", said)
    asked, theirs = map(int, re.findall(r"\d+", failure.message))
    assert (asked, theirs) == (m.PROTOCOL_VERSION + 1, m.PROTOCOL_VERSION)


@pytest.mark.parametrize("variable", sorted(set(re.findall(r"TORCHSTORE_\w+", PAGE))))
def test_its_variables_are_in_the_readme(variable: str) -> None:
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    assert f"| `{variable}` |" in readme
