"""A process that joins a store of another release, or something that is no store at all."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from tests.support import running_store, until

import torchstore_core as ts
from torchstore_core.wire import messages as m

pytestmark = pytest.mark.local_only


@pytest.mark.parametrize("step", [-1, 1])
async def test_a_client_of_another_protocol_is_told_which_side_is_older(
    step: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At once, by every way into the store, and nobody else notices."""
    ours = m.PROTOCOL_VERSION
    older = {-1: "the client's", 1: "the server's"}[step]
    says = rf"client speaks protocol {ours + step}, this server {ours}; .*: {older} is the older"
    async with running_store() as client:
        status = await client.status()
        server = psutil.Process(status.controller_pid)
        before = server.num_fds()
        monkeypatch.setattr(m, "PROTOCOL_VERSION", ours + step)
        monkeypatch.setenv("TORCHSTORE_ADDRESS", client.address)
        for _ in range(5):
            with pytest.raises(ts.ProtocolError, match=says):
                await ts.connect(client.address, store_name="other")
            with pytest.raises(ts.ProtocolError, match=says):
                await ts.connect_or_initialize(store_name="another")
        (found,) = [one for one in await ts.stores() if one.address == client.address]
        assert found.error is not None
        assert older in found.error
        await client.put("k", torch.ones(1000))  # a session that was there goes on
        monkeypatch.undo()
        assert torch.equal(await ts.get("k"), torch.ones(1000))
        assert len((await client.status()).sessions) == len(status.sessions)

        async def all_are_closed() -> bool:
            return server.num_fds() <= before

        await until(all_are_closed)
    assert "Traceback" not in capfd.readouterr().err


ANSWERS = {
    "HTTP": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n",
    "a huge length": struct.pack("<I", 0xFFFFFFFF),
    "other messages": struct.pack("<I", 4) + b"\x93\x01\x02\x03",
}


@contextmanager
def _answering(path: Path, answer: bytes) -> Iterator[None]:
    """Something that answers whoever connects, until it is left."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(1 << 16)
                peer.sendall(answer)
                peer.recv(1)  # until the client closes the connection

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize("answer", ANSWERS)
async def test_what_listens_is_no_store(tmp_path: Path, answer: str) -> None:
    address = f"unix:{tmp_path}/it.sock"
    with _answering(tmp_path / "it.sock", ANSWERS[answer]):
        async with asyncio.timeout(20):
            with pytest.raises(ts.ProtocolError) as caught:
                await ts.connect(address)
    assert address in caught.value.message
    assert "split the batch" not in caught.value.message
