"""Only the user who runs the store gets in: by the directory's mode, and by the socket's peer."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.support import running_store

import torchstore_core as ts
from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.errors import ConfigurationError
from torchstore_core.machine import topology
from torchstore_core.machine.directories import runtime_directory
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode

NOBODY = 65534
HERE = topology.probe()
HELLO = bytes(
    encode(m.Hello(1, m.PROTOCOL_VERSION, b"", HERE, ClientFacts(1, HERE.host_id, HERE.hostname)))
)

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


def as_uid(uid: int, function: Callable[[], str]) -> str:
    """What ``function`` says in a process of another user."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            if uid != os.getuid():
                os.setgroups([])
                os.setgid(uid)
                os.setuid(uid)
            os.write(write, function().encode())
        except BaseException as error:
            os.write(write, f"failed: {error!r}".encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(pid, 0)
    return text


def greeting(path: Path) -> str:
    """How a socket answers a hello."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        try:
            sock.connect(str(path))
            sock.sendall(HELLO)
            data = sock.recv(1 << 16)
        except PermissionError:
            return "no permission"
        except (BrokenPipeError, ConnectionResetError):
            return "closed"
        return f"{len(data)} bytes" if data else "closed"


def descriptors(path: Path) -> str:
    """How many file descriptors the socket of the shm transport gives away."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        try:
            sock.connect(str(path))
            _, fds, _, _ = socket.recv_fds(sock, 4096, 16)
        except PermissionError:
            return "no permission"
        except ConnectionResetError:
            return "0"
        return str(len(fds))


def refusal(address: str) -> str:
    """What a program of a user is told by ``connect``."""
    try:
        asyncio.run(ts.connect(address, store_name="of somebody else"))
    except ts.StoreClosedError as error:
        return str(error)
    return "connected"


# ---- by the directory -----------------------------------------------------------------------


async def test_sockets_lie_in_directories_of_mode_0700() -> None:
    async with running_store() as client:
        control = Path(client.address.partition(":")[2])
        for directory in (control.parent, control.parent.parent):
            info = directory.lstat()
            assert stat.S_ISDIR(info.st_mode)
            assert stat.S_IMODE(info.st_mode) == 0o700
            assert info.st_uid == os.getuid()
        sockets = list(control.parent.glob("*.sock"))
        assert len(sockets) >= 2  # the server's and the shm transport's
        for path in sockets:
            assert stat.S_IMODE(path.lstat().st_mode) == 0o600


@needs_root
async def test_another_user_does_not_reach_the_sockets() -> None:
    async with running_store() as client:
        control = Path(client.address.partition(":")[2])
        (shm,) = control.parent.glob("shm-*.sock")
        assert as_uid(NOBODY, lambda: greeting(control)) == "no permission"
        assert as_uid(NOBODY, lambda: descriptors(shm)) == "no permission"
        assert as_uid(0, lambda: greeting(control)).endswith("bytes")
        assert as_uid(0, lambda: descriptors(shm)) == "1"
        refused = as_uid(NOBODY, lambda: refusal(client.address))
        assert "only processes of the user who started it can connect" in refused


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the runtime directory would be; it does not exist yet."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "torchstore"


def test_the_runtime_directory_is_made_private(base: Path) -> None:
    previous = os.umask(0)
    try:
        assert runtime_directory() == base
        assert stat.S_IMODE(base.lstat().st_mode) == 0o700
        assert runtime_directory() == base  # and found again
    finally:
        os.umask(previous)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701, 0o777], ids=oct)
def test_a_directory_that_others_can_enter_is_refused(base: Path, mode: int) -> None:
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(ConfigurationError, match="mode 0700"):
        runtime_directory()


def test_a_link_to_somewhere_else_is_refused(base: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    base.symlink_to(elsewhere)
    with pytest.raises(ConfigurationError, match="mode 0700"):
        runtime_directory()


@needs_root
def test_a_directory_of_somebody_else_is_refused(base: Path) -> None:
    base.mkdir(mode=0o700)
    os.chown(base, NOBODY, NOBODY)
    with pytest.raises(ConfigurationError, match="must be a directory of yours"):
        runtime_directory()


@needs_root
def test_a_directory_that_one_may_not_look_into_is_named(base: Path) -> None:
    """As in a user namespace, where the directories of all other users seem to be one's own."""
    base.mkdir()
    base.chmod(0)
    for path in (base.parent, base):
        os.chown(path, NOBODY, NOBODY)

    def looking() -> str:
        try:
            return f"found {asyncio.run(ts.stores())}"
        except ConfigurationError as error:
            return error.message

    said = as_uid(NOBODY, looking)
    assert f"may not look into {base}," in said
    assert "XDG_RUNTIME_DIR" in said


async def test_a_store_does_not_start_in_a_directory_of_others(base: Path) -> None:
    base.mkdir()
    base.chmod(0o755)
    with pytest.raises(ConfigurationError, match="mode 0700"):
        await ts.initialize(capacity=1 << 20, prefault=0)
    assert list(base.iterdir()) == []


# ---- by the peer ----------------------------------------------------------------------------


class OpenServer:
    """A server whose sockets everybody can reach, as if the file system protected nothing."""

    def __init__(self, log: Path) -> None:
        self.directory = Path(tempfile.mkdtemp(dir="/tmp"))
        self.directory.chmod(0o755)
        self._log = log
        options = {"capacity": 1 << 20, "prefault": 0, "directory": str(self.directory)}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "torchstore_core.server"),
                    msgspec.json.encode(options).decode(),
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self._process.stdout is not None
        self.address = msgspec.json.decode(self._process.stdout.readline())["address"]
        self.sockets = sorted(self.directory.glob("*.sock"))
        for path in self.sockets:
            path.chmod(0o666)

    def log(self) -> str:
        return self._log.read_text()

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._process.wait(60)
        shutil.rmtree(self.directory)


@pytest.fixture
def open_server(tmp_path: Path) -> Iterator[OpenServer]:
    made = OpenServer(tmp_path / "log")
    yield made
    made.close()


@needs_root
def test_root_says_nothing_to_the_server_of_another_user(tmp_path: Path) -> None:
    """No mode keeps root out, and who answers might be anybody."""
    path = tmp_path / "theirs.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.seteuid(NOBODY)  # who listens is what the system tells of a listener
        try:
            listener.listen()
        finally:
            os.seteuid(0)
        told = refusal(f"unix:{path}")
        assert f"uid {NOBODY} runs it, and this process is of 0" in told
        assert "only processes of the user who started it can connect" in told
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.recv(1) == b""


@needs_root
def test_another_user_is_sent_away_by_the_server_itself(open_server: OpenServer) -> None:
    control, shm = open_server.sockets
    assert control.name == "control.sock"
    for _ in range(3):
        assert as_uid(NOBODY, lambda: greeting(control)) == "closed"
        assert as_uid(NOBODY, lambda: descriptors(shm)) == "0"
    assert as_uid(0, lambda: greeting(control)).endswith("bytes")
    assert as_uid(0, lambda: descriptors(shm)) == "1"
    assert f"refused a connection of uid {NOBODY}" in open_server.log()
    told = as_uid(NOBODY, lambda: refusal(open_server.address))
    assert f"uid {os.getuid()} runs it, and this process is of {NOBODY}" in told
    assert "only processes of the user who started it can connect" in told
    assert "Traceback" not in open_server.log()

    async def use() -> None:
        client = await ts.connect(open_server.address, store_name="ours")
        try:
            await client.put("k", torch.arange(50_000))
            assert torch.equal(await client.get("k"), torch.arange(50_000))
            assert [s.pid for s in (await client.status()).sessions] == [os.getpid()]
        finally:
            await ts.shutdown("ours")

    asyncio.run(use())
