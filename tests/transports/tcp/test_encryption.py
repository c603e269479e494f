"""TLS between the halves of ``tcp``, with certificates that the test makes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from tests.support import until
from tests.transports.tcp.halves import MB, PEER, Local, drip, linked, threads, volume
from tests.transports.tcp.proxy import Proxy

from torchstore_core.contracts.transport import Copy
from torchstore_core.errors import (
    ConfigurationError,
    TransportNotReadyError,
    TransportUnavailableError,
)
from torchstore_core.testing.timers import within

VARIABLES = ("TORCHSTORE_TCP_CERT", "TORCHSTORE_TCP_KEY", "TORCHSTORE_TCP_CA")
Files = tuple[Path, Path, Path]


def _openssl(*words: str | Path) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)


def _authority(folder: Path, name: str) -> Files:
    """A certificate, its key, and the certificate of the authority that signed it."""
    folder.mkdir()
    key, root = folder / "ca.key", folder / "ca.pem"
    request, own, signed = folder / "own.csr", folder / "own.key", folder / "own.pem"
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    _openssl("req", "-x509", *curve, "-keyout", key, "-out", root, "-subj", f"/CN={name}")
    _openssl("req", *curve, "-keyout", own, "-out", request, "-subj", "/CN=host")
    by = ("-CA", root, "-CAkey", key, "-CAcreateserial")
    _openssl("x509", "-req", "-in", request, *by, "-out", signed, "-days", "2")
    return signed, own, root


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Files, Files]:
    if shutil.which("openssl") is None:
        pytest.skip("the openssl command is not installed")
    folder = tmp_path_factory.mktemp("certificates")
    return _authority(folder / "ours", "ours"), _authority(folder / "other", "other")


def _use(monkeypatch: pytest.MonkeyPatch, files: Files | None) -> None:
    for name, path in zip(VARIABLES, files or ("", "", ""), strict=True):
        monkeypatch.setenv(name, str(path))


async def test_bytes_are_encrypted(
    authorities: tuple[Files, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, authorities[0])
    monkeypatch.setenv("TORCHSTORE_TCP_CHECKSUM", "1")
    with Proxy() as proxy:
        async with linked(64 * MB, proxy.route) as (link, there):
            seen = proxy.seen = {"up": bytearray(), "down": bytearray()}
            data = b"plain text " * (2 * MB)
            source, target = Local(len(data), data), Local(len(data))
            await link.write([source.copy()])
            await link.read([target.copy()])
            assert target.raw == data
            await link.write([Copy(source.address, 7, 5, 700, 3000, 1400, 2100)])
            await link.read([Copy(target.address, 7, 5, 700, 3000, 1400, 2100)])
            assert target.raw == data
            for heard in seen.values():
                assert len(heard) > len(data)
                assert b"plain text" not in heard
            connection = next(iter(link._streams._connections))
            assert connection.encrypted
            link.close()
            await there.server.disconnect(PEER)
            await until(lambda: not threads())


async def test_a_cancelled_transfer(
    authorities: tuple[Files, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shutting a connection ends a thread that is inside of TLS, too."""
    _use(monkeypatch, authorities[0])
    async with linked(256 * MB) as (link, there):
        there.fill(b"r", 200 * MB)
        local = Local(200 * MB)
        reading = asyncio.ensure_future(link.read([local.copy()]))
        await until(lambda: local.buffer[0] == b"r", 20)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        local.fill(b"\0", 200 * MB)
        await link.read([Copy(local.address, 7, 0, 3)])
        assert local.buffer[:4] == b"rrr\0"
        link.close()
        await until(lambda: "torchstore-tcp" not in threads())
        assert local.is_full_of(b"\0", 200 * MB - 3, 3)


async def test_a_certificate_of_another_authority(
    authorities: tuple[Files, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, authorities[0])
    async with volume() as there:
        ours, other = authorities
        for files in (other, (*other[:2], ours[2])):  # the second one trusts the volume
            _use(monkeypatch, files)
            with pytest.raises(TransportNotReadyError):
                await there.connect()
        _use(monkeypatch, ours)
        (await there.connect()).close()


async def test_only_one_side_has_certificates(
    authorities: tuple[Files, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with volume() as there:
        _use(monkeypatch, authorities[0])
        with pytest.raises(TransportUnavailableError, match="this process has certificates"):
            await there.connect()
    async with volume() as there:
        _use(monkeypatch, None)
        with pytest.raises(TransportUnavailableError, match="the volume has certificates"):
            await there.connect()


async def test_certificates_that_cannot_be_used(
    authorities: tuple[Files, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key, root = authorities[0]
    for files, why in (((cert, key, ""), "belong together"), ((cert, root, root), "cannot be")):
        _use(monkeypatch, files)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match=why):
            async with volume():
                pass


async def test_plain_bytes_at_an_encrypted_port(
    authorities: tuple[Files, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, authorities[0])
    async with linked() as (_, there):
        with socket.create_connection(there.endpoint, timeout=60) as sock:
            sock.sendall(os.urandom(2000))
            with contextlib.suppress(ConnectionResetError):
                while await asyncio.to_thread(sock.recv, 1000):
                    pass
        (await there.connect()).close()


async def test_a_slow_handshake_at_an_encrypted_port(
    authorities: tuple[Files, Files], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has one limit as a whole, however diligently somebody sends a byte of it at a time."""
    _use(monkeypatch, authorities[0])
    monkeypatch.setattr("torchstore_transports.tcp.serving.peers.GREETING_S", 2.0)
    async with linked() as (_, there):
        slow = socket.create_connection(there.endpoint, timeout=60)
        async with within(5):
            # The head of a record of 16 KB, as a greeting of TLS begins.
            await asyncio.to_thread(drip, slow, bytes.fromhex("16030140000100"))
        (await there.connect()).close()
