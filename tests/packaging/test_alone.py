"""Every package of a transport with nothing beside it but the core and what its metadata name."""

from __future__ import annotations

import importlib.metadata
import re
from collections import Counter
from pathlib import Path

import pytest
from tests.packaging.alone import Alone, closure

# Packages of this repository that no transport may need without saying so.
_OURS = {f"torchstore-{name}" for name in ("strategies", "transports", "cli", "spmd", "inprocess")}

#: Packages, each with the transports whose kits are run, and how many tests of each must pass: all
#: that are not skipped for what it does not declare, or where there are no network namespaces.
PACKAGES = {
    "torchstore-transports": {"shm": 43, "inline": 4, "tcp": 43},
    "torchstore-inprocess": {"inprocess": 36},
    "torchstore-gloo": {"gloo": 43},
    "torchstore-torchcomms": {"torchcomms": 43},
    "torchstore-rdma": {"rdma": 44},
}
_PAIRS = {"gloo", "torchcomms"}
_CLASS = """
class Test_{name}(TransportTests):
    name = {name!r}
    # What waits for its peer inside of a library of pairs ends with the time of the pair.
    gone_within = {gone_within}
"""
_INI = """
[pytest]
filterwarnings =
    error
    ignore:Failed to initialize NumPy:UserWarning
"""
_STORE = '''
import asyncio
import contextlib
import pathlib

import torch
import torchstore_core as ts


def sockets(pid):
    """Where that process listens, in the lines of the kernel."""
    links = []
    for path in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # it is closed at this moment
            links.append(path.readlink().name)
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


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("package", "chosen"),
    [
        ("torchstore-inprocess", "every_size or rows or bids or halves"),
        *(pytest.param(name, "", marks=pytest.mark.soak) for name in PACKAGES),
    ],
)
def test_the_kit_passes_with_nothing_else(package: str, chosen: str, tmp_path: Path) -> None:
    """``core[testing]`` and the package are all there is: no other plug-in, of pytest neither. What
    it lacks is missing wherever the kit is, so a part of one is enough for every day.
    """
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
    for name in PACKAGES[package]:
        source += _CLASS.format(name=name, gone_within=25.0 if name in _PAIRS else 5.0)
    (kit / "test_kit.py").write_text(source)
    (kit / "pytest.ini").write_text(_INI)
    passed = _passed(alone, kit, "-k", chosen)
    for name, least in PACKAGES[package].items():
        assert passed[name] >= (5 if chosen else least), passed
    if package == "torchstore-inprocess":  # no store uses it that any process can start
        return
    alone.add(["torchstore-strategies"])  # which a store needs, so that its tests run, too
    passed = _passed(alone, kit, "-k", "store")
    assert all(passed[name] >= 2 for name in PACKAGES[package]), passed


def _passed(alone: Alone, kit: Path, *arguments: str) -> Counter[str]:
    """Run the kit; how many tests have passed of each transport, while none has failed."""
    done = alone.run("-m", "pytest", "-v", "-ra", "test_kit.py", *arguments, cwd=kit, timeout=550)
    print(done.stdout[-20_000:], done.stderr[-5_000:])
    assert done.returncode == 0
    return Counter(re.findall(r"::Test_(\w+)::\S+ PASSED", done.stdout))


def test_a_store_without_network_transports_has_no_port(tmp_path: Path) -> None:
    """Where the strategies and one transport for volumes of the same process are all there is."""
    names = ["torchstore-core", "torchstore-inprocess", "torchstore-strategies"]
    alone = Alone(tmp_path / "venv", names)
    done = alone.run("-c", _STORE, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "refused: ['inprocess']\nrefused: ['inprocess']\nsockets: []\n"


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
