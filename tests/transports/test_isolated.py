"""Server halves in processes of their own, whatever these do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.support import children, commands, turn, until
from tests.transports.mailbox import GATE, Letter

import torchstore_core as ts
from torchstore_core.contracts.transport import Segment, ServerContext
from torchstore_core.machine.topology import probe
from torchstore_core.server.memory.isolated import IsolatedServer
from torchstore_core.server.memory.segment import open_memory

MB = 1 << 20


class _Half:
    """An isolated mailbox with one segment."""

    def __init__(self, server: IsolatedServer, fd: int) -> None:
        self.server = server
        self._fd = fd

    async def ask(self, letter: Letter, peer: bytes = b"me") -> bytes:
        return await self.server.handshake(peer, msgspec.msgpack.encode(letter))

    async def pid(self) -> int:
        return int(await self.ask(Letter("who")))

    def first_byte(self) -> bytes:
        return os.pread(self._fd, 1, 0)


@asynccontextmanager
async def _half() -> AsyncIterator[_Half]:
    server = IsolatedServer("tests.transports.mailbox:MailboxServer")
    fd = open_memory("test", MB)
    try:
        await server.start(ServerContext("s", "v", "/tmp", probe()), [Segment(0, fd, MB)])
        yield _Half(server, fd)
    finally:
        await server.close()
        os.close(fd)


async def test_a_client_that_disconnects_while_the_process_starts_writes_nothing() -> None:
    async with _half() as half:
        os.kill(await half.pid(), signal.SIGKILL)
        await until(lambda: half.server.registered(0) == 0, 10)
        writing = asyncio.ensure_future(half.ask(Letter("write", data=b"x")))
        other = asyncio.ensure_future(half.ask(Letter("who"), b"other"))
        await turn()
        await half.server.disconnect(b"me")
        with pytest.raises(ts.TransportError, match="has disconnected"):
            await writing
        assert int(await other)
        assert half.first_byte() == b"\0"
        assert await half.ask(Letter("write", nbytes=1, data=b"y")) == b""
        assert half.first_byte() == b"y"


async def test_a_half_that_hangs_is_killed_when_a_client_disconnects() -> None:
    """With all that it has not read yet: one frame does not fit into the socket's buffer."""
    async with _half() as half:
        before = await half.pid()
        letters = [Letter("hang"), *[Letter("write", data=bytes(MB // 2))] * 4]
        asking = [asyncio.ensure_future(half.ask(letter)) for letter in letters]
        await turn()
        await half.server.disconnect(b"me")
        for one in asking:
            with pytest.raises(ts.TransportError, match="has died"):
                await one
        assert await half.pid() != before


async def test_handshakes_of_a_client_that_disconnects_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, held = tmp_path / "gate", tmp_path / "gate.held"
    monkeypatch.setenv(GATE, str(gate))
    gate.touch()
    async with _half() as half:
        writing = asyncio.ensure_future(half.ask(Letter("write", data=b"x")))
        await until(held.exists, 10)
        await half.server.disconnect(b"me")
        with pytest.raises(ts.TransportError, match="has disconnected"):
            await asyncio.wait_for(writing, 50)


_ISOLATED = "torchstore_core.server.memory.isolated"
_BLAS = "OPENBLAS_NUM_THREADS"


@pytest.mark.parametrize("threads", [None, "2"])
async def test_a_half_starts_no_threads_of_a_library_for_matrices_unless_the_user_says_so(
    threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(_BLAS)
    if threads is not None:
        monkeypatch.setenv(_BLAS, threads)
    async with _half() as half:
        started = int(await half.ask(Letter("threads of numpy")))
    assert (started > 0) == (threads is not None and len(os.sched_getaffinity(0)) > 1)


@pytest.mark.parametrize("how", ["hang", "count hangs", "stopped", "thread hangs"])
async def test_a_half_that_hangs_is_replaced(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a handshake, in what it says with each answer, or when nobody has asked it anything."""
    async with _half() as half:
        with monkeypatch.context() as soon:
            soon.setattr(f"{_ISOLATED}._PAUSE_S", 0.3)
            before = await half.pid()
            if how in ("stopped", "thread hangs"):
                if how == "stopped":
                    os.kill(before, signal.SIGSTOP)
                else:  # its event loop goes on answering
                    await half.ask(Letter(how))
                await until(lambda: not Path(f"/proc/{before}").exists(), 20)
            else:
                with pytest.raises(ts.TransportError, match="has died"):
                    await asyncio.wait_for(half.ask(Letter(how)), 50)
        assert half.server.registered(0) == 0
        assert int(await half.ask(Letter("who"), b"other")) == await half.pid() != before


async def test_calls_that_are_late_but_return_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async with _half() as half:
        monkeypatch.setattr(f"{_ISOLATED}._PAUSE_S", 0.5)
        before = await half.pid()
        await half.ask(Letter("threads are late"))

        async def was_asked() -> bool:
            return int(await half.ask(Letter("asked"))) > 5

        await until(was_asked, 20)
        assert await half.pid() == before


@pytest.mark.parametrize("ends", [True, False])
async def test_a_handshake_that_is_not_answered_costs_its_client(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It alone, or the process, if that cannot end it."""
    gate = tmp_path / "gate"
    monkeypatch.setenv(GATE, str(gate))
    gate.touch()
    async with _half() as half:
        before = await half.pid()
        if not ends:
            await half.ask(Letter("disconnect hangs"))
        with monkeypatch.context() as soon:
            soon.setattr(f"{_ISOLATED}.HANDSHAKE_S", 0.3)
            soon.setattr(f"{_ISOLATED}._DISCONNECT_S", 20.0 if ends else 0.3)
            with pytest.raises(ts.TransportNotReadyError, match="not answer a handshake"):
                await half.ask(Letter("write", nbytes=1, data=b"x"))
        assert half.first_byte() == (b"x" if ends else b"\0")  # it is written at the end
        assert (await half.pid() == before) is ends


async def test_whoever_ends_a_client_waits_until_it_has_ended() -> None:
    """So does the client, if it begins again."""
    async with _half() as half:
        await half.ask(Letter("disconnect hangs"))
        waiting = [asyncio.ensure_future(half.server.disconnect(b"me")) for _ in range(2)]
        await turn()
        waiting.append(asyncio.ensure_future(half.ask(Letter("who"))))
        await half.ask(Letter("who"), b"other")
        assert not any(one.done() for one in waiting)
        await half.ask(Letter("let go"), b"other")
        await asyncio.wait_for(asyncio.gather(*waiting), 50)


async def test_a_volume_that_closes_while_a_client_is_ended_warns_of_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _half() as half:
        pid = await half.pid()
        await half.ask(Letter("disconnect hangs"))
        ending = asyncio.ensure_future(half.server.disconnect(b"me"))
        await turn()
        await half.server.close()
        await asyncio.wait_for(ending, 50)
        assert not Path(f"/proc/{pid}").exists()
    assert not caplog.records


async def test_the_clients_of_a_process_that_has_died_end_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with _half() as half:
        os.kill(await half.pid(), signal.SIGKILL)
        await asyncio.wait_for(half.server.disconnect(b"me"), 50)
    assert not caplog.records


async def test_a_process_that_cannot_end_a_client_is_killed_with_the_reason_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{_ISOLATED}._DISCONNECT_S", 0.3)
    async with _half() as half:
        pid = await half.pid()
        await half.ask(Letter("disconnect hangs"))
        await half.server.disconnect(b"me")
        assert not Path(f"/proc/{pid}").exists()
    (record,) = caplog.records
    assert "MailboxServer is killed" in record.getMessage()
    assert record.getMessage().endswith("it took more than 0.3 s")


async def test_a_fault_of_the_half_is_a_transport_error_with_the_fault() -> None:
    async with _half() as half:
        with pytest.raises(ts.TransportError, match="a fault of the half") as caught:
            await half.ask(Letter("fail"))
        assert caught.value.details == {"raised": "ValueError"}


@pytest.mark.parametrize("what", ["nothing", "too much", "long error"])
async def test_an_impossible_answer_is_an_error_of_that_handshake_alone(what: str) -> None:
    async with _half() as half:
        before = await half.pid()
        with pytest.raises(ts.TorchStoreError, match=r"returned|xxx"):
            await half.ask(Letter(what))
        assert await half.pid() == before


async def test_a_dead_process_leaves_nothing_behind() -> None:
    """Not even a zombie, though nobody asks for it again."""
    async with _half() as half:
        pid = await half.pid()
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not Path(f"/proc/{pid}").exists(), 10)


async def test_a_process_that_starts_ends_with_its_volume() -> None:
    async with _half() as half:
        os.kill(await half.pid(), signal.SIGKILL)
        await until(lambda: half.server.registered(0) == 0, 10)
        before = _children()
        asking = asyncio.ensure_future(half.ask(Letter("who")))
        await until(lambda: _children() - before, 10)
        await half.server.close()
        with contextlib.suppress(ts.TransportError):  # or it had answered already
            await asking
        assert not _children() - before


def _children() -> set[int]:
    """Those of this process that run isolated halves."""
    return commands(b"memory.isolated", children())
