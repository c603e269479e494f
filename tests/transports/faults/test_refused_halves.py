"""Why a volume does not serve a transport, and what keeps a volume from starting."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.support import until
from tests.unit.plugins.test_plugins import TRANSPORTS, Site

from torchstore_core.contracts.transport import LinkContext
from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.networks import Network, networks
from torchstore_core.machine.topology import probe
from torchstore_core.plugins.ranking import Policy, rank
from torchstore_core.plugins.registry import Registry, load_class
from torchstore_core.server.memory.volume import Volume
from torchstore_transports.tcp.wire.protocol import Offer, decode

MB = 1 << 20

ODD = """
import asyncio
from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.transport import Refusal, TransportServer, TransportSpec

class Half(TransportServer):
    starts = asyncio.Event()

    async def start(self, context, segments):
        {start}

    async def close(self):
        pass

@hookimpl
def torchstore_transport():
    bid = lambda context: Refusal("no")
    return TransportSpec({name!r}, bid, "no.such:Link", f"{{__name__}}:Half")
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Packages of one test. They leave the path before those of the folder do: the test's
    own ``monkeypatch`` would put back a path that has these.
    """
    made = Site(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        yield made
    for module in made.modules:
        sys.modules.pop(module, None)


@pytest.fixture
async def volume(tmp_path: Path) -> AsyncIterator[Volume]:
    made = Volume("s", 0, MB, Registry(), str(tmp_path))
    yield made
    await made.close()


async def test_certificates_that_cannot_be_used(
    volume: Volume,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("TORCHSTORE_TCP_CERT", "TORCHSTORE_TCP_KEY", "TORCHSTORE_TCP_CA"):
        monkeypatch.setenv(name, str(tmp_path / "missing.pem"))
    with caplog.at_level(logging.WARNING):
        info = await volume.start()
    assert "tcp" not in info.offers
    assert "certificates" in info.refused["tcp"]
    assert len(info.refused["tcp"]) <= 500
    assert any("certificates" in record.getMessage() for record in caplog.records)
    context = LinkContext(probe(), info.topology, same_host=True, offered=True)
    policy = Policy(force="tcp")
    ranking = rank(Registry().transports(), context, info.offers, policy, info.refused)
    assert info.refused["tcp"] in ranking.refusals["tcp"]
    assert info.refused["tcp"] in ranking.unavailable(1 << 30).message


@pytest.mark.parametrize("bind", ["0.0.0.0", "::", "224.0.0.1", "127.0.0.1,ff02::1"])
async def test_addresses_of_no_host(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, bind: str
) -> None:
    monkeypatch.setenv("TORCHSTORE_BIND", bind)
    with pytest.raises(ConfigurationError, match="no host is reached"):
        await volume.start()


async def test_without_transports_that_listen_no_address_matters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHSTORE_BIND", "0.0.0.0")
    listening = [spec.name for spec in Registry().transports() if spec.listens]
    assert "tcp" in listening
    volume = Volume("s", 0, MB, Registry(block=listening), str(tmp_path))
    info = await volume.start()
    await volume.close()
    assert "shm" in info.offers
    assert not set(info.offers) & set(listening)


async def test_an_address_of_another_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHSTORE_BIND", "127.0.0.2,203.0.113.77")
    volume = Volume("s", 0, MB, Registry(), str(tmp_path))
    with caplog.at_level(logging.WARNING):
        info = await volume.start()
    await volume.close()
    (said,) = [r.getMessage() for r in caplog.records if "TORCHSTORE_BIND" in r.getMessage()]
    assert "203.0.113.77" in said
    assert "127.0.0.2" not in said
    # What is advertised is what the user has chosen, not all that the host has.
    chosen = (Network("", "127.0.0.2", 32), Network("", "203.0.113.77", 32))
    offer = decode(info.offers["tcp"], Offer, "an offer")
    assert offer.networks == info.topology.networks == chosen
    assert not set(offer.networks) & set(networks())


async def test_a_half_that_exits_ends_neither_the_others_nor_the_server(
    site: Site,
) -> None:
    exits = ODD.format(name="exits", start="raise SystemExit(3)")
    site.install("odd", TRANSPORTS, exits=exits, fine=ODD.format(name="fine", start="return b''"))
    volume = Volume("s", 0, MB, site.registry(), str(site.path))
    info = await volume.start()
    await volume.close()
    assert info.refused == {"exits": "SystemExit(3)"}
    assert info.offers == {"fine": b""}


async def test_a_half_that_is_slow_to_start_is_named(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only that the server did not come up was said."""
    monkeypatch.setattr("torchstore_core.server.memory.volume._START_S", 0.01)
    start = "await self.starts.wait(); return b''"
    site.install("odd", TRANSPORTS, slow=ODD.format(name="slow", start=start))
    volume = Volume("s", 0, MB, site.registry(), str(site.path))
    with caplog.at_level(logging.WARNING):
        starting = asyncio.ensure_future(volume.start())
        await until(lambda: "transport slow is slow to start" in caplog.text)
        assert not starting.done()
        load_class("site_odd_slow:Half").starts.set()
        assert (await starting).offers == {"slow": b""}
    await volume.close()
