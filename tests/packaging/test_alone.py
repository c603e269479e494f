"""Every package of a transport with nothing beside it but the core and what its metadata name."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
from tests.packaging.alone import Alone, closure

# Packages of this repository that no transport may need without saying so.
_OURS = {f"torchstore-{name}" for name in ("strategies", "transports", "cli", "spmd", "inprocess")}

#: Packages, each with the transports whose kits are run, and those kits' own attributes.
PACKAGES = {
    "torchstore-transports": (("shm", ""), ("inline", ""), ("tcp", "")),
    "torchstore-inprocess": (("inprocess", ""),),
    "torchstore-gloo": (("gloo", "gone_within = 25.0"),),
    "torchstore-torchcomms": (("torchcomms", "gone_within = 25.0"),),
    "torchstore-rdma": (("rdma", ""),),
}
_CLASS = """
class Test{number}(TransportTests):
    name = {name!r}
    {more}
"""
_INI = """
[pytest]
filterwarnings =
    error
    ignore:Failed to initialize NumPy:UserWarning
"""
_STORE = '''
import asyncio
import pathlib

import torch
import torchstore_core as ts


def sockets(pid):
    """Where that process listens, in the lines of the kernel."""
    links = [path.readlink().name for path in pathlib.Path(f"/proc/{pid}/fd").iterdir()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:")}
    lines = [
        line.split()
        for name in ("tcp", "tcp6", "udp", "udp6")
        for line in pathlib.Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
    ]
    return [fields for fields in lines if fields[9] in inodes]


async def main():
    client = await ts.initialize(capacity=64 << 20, prefault=0)
    for value in (1, torch.zeros(1 << 20)):
        try:
            await client.put("value", value)
        except ts.TransportUnavailableError as error:
            print("refused:", sorted(error.details["refusals"]))
    print("sockets:", sockets((await client.status()).controller_pid))
    await ts.shutdown()


asyncio.run(main())
'''


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("package", PACKAGES)
def test_the_kit_passes_with_nothing_else(package: str, tmp_path: Path) -> None:
    """``core[testing]`` and the package are all there is: no other plug-in, of pytest neither."""
    if package == "torchstore-torchcomms" and not _installed("torchcomms"):
        pytest.skip("torchcomms is not installed")
    names = [package, "torchstore-core[testing]"]
    if package == "torchstore-torchcomms":
        names.append("torchcomms")  # which is installed by hand: see its README
    alone = Alone(tmp_path / "venv", names)
    declared = closure([package])
    assert not (_OURS & set(alone.distributions)) - set(declared)
    kit = tmp_path / "kit"
    kit.mkdir()
    source = "from torchstore_core.testing import TransportTests\n"
    for number, (name, more) in enumerate(PACKAGES[package]):
        source += _CLASS.format(number=number, name=name, more=more or "pass")
    (kit / "test_kit.py").write_text(source)
    (kit / "pytest.ini").write_text(_INI)
    # What stays open of pairs that were not made is an expected failure of their own tests.
    assert _passed(alone, kit, "-k", "not cancelled_connect") >= 8 * len(PACKAGES[package])
    alone.add(["torchstore-strategies"])  # which a store needs, so that its tests run, too
    found = _passed(alone, kit, "-k", "store")
    assert found >= (0 if package == "torchstore-inprocess" else 2 * len(PACKAGES[package]))


def _passed(alone: Alone, kit: Path, *arguments: str) -> int:
    """Run the kit; how many of its tests have passed, while none has failed."""
    done = alone.run("-m", "pytest", "-q", "-ra", "test_kit.py", *arguments, cwd=kit, timeout=280)
    print(done.stdout[-20_000:], done.stderr[-5_000:])
    passed = re.search(r"(\d+) passed", done.stdout)
    assert done.returncode in (0, 5)  # 5: none was chosen
    return int(passed[1]) if passed else 0


@pytest.mark.soak
def test_a_store_without_network_transports_has_no_port(tmp_path: Path) -> None:
    """Where the strategies and one transport for volumes of the same process are all there is."""
    names = ["torchstore-core", "torchstore-inprocess", "torchstore-strategies"]
    alone = Alone(tmp_path / "venv", names)
    done = alone.run("-c", _STORE, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused: ['inprocess']\nrefused: ['inprocess']\nsockets: []\n"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
