"""The transport's description of itself: its hook module, its bids, and the classes it names."""

from __future__ import annotations

import ast
import itertools
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from torchstore_core.contracts.transport import (
    Bid,
    Link,
    LinkContext,
    Refusal,
    TransportServer,
)
from torchstore_core.errors import PluginError, TransportUnavailableError
from torchstore_core.machine import topology
from torchstore_core.machine.networks import Network
from torchstore_core.plugins.registry import load_class
from torchstore_core.testing.timers import clock
from torchstore_core.testing.transports.base import TransportKit, check, fail
from torchstore_core.testing.transports.ends.endpoints import tool_environment

__all__ = ["DescriptorTests"]

_UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
_BIDS = 400
_BID_S = 2e-3
_PROBE_S = 2.0
_SECONDS = 60.0

# A program that prints which modules a fresh interpreter imports when it calls the hook, the probe
# and the bid.
_FRESH = """
import json, sys
import torchstore_core.contracts.hooks, torchstore_core.contracts.transport
import torchstore_core.testing.transports.ends.host
from torchstore_core.machine import topology
from torchstore_core.machine.networks import Network
here = topology.probe()
before = set(sys.modules)
name, value = json.loads(sys.argv[1])
spec = torchstore_core.testing.transports.ends.host.Plugin(name, value).spec()
if spec.probe is not None:
    spec.probe()
context = torchstore_core.contracts.transport.LinkContext(here, here, True, True, b"")
spec.bid(context)
print(json.dumps(sorted(set(sys.modules) - before)))
"""

# A program that prints the files of all modules in the halves' own packages that they import.
_HALVES = """
import importlib, json, sys
found = {}
for path in json.loads(sys.argv[1]):
    importlib.import_module(path)
    top = path.partition(".")[0]
    for name, module in sys.modules.copy().items():
        if name == top or name.startswith(top + "."):
            found[name] = getattr(module, "__file__", None)
print(json.dumps(found))
"""

# A program that prints which modules a fresh interpreter has after it has imported one.
_MODULE = """
import importlib, json, sys
importlib.import_module(json.loads(sys.argv[1])[0])
print(json.dumps(sorted(sys.modules)))
"""


def contexts(offer: bytes = b"") -> Iterator[LinkContext]:
    """Yield links for which a transport may have to bid: near and far, offered and not."""
    here = topology.probe()
    other_process = msgspec.structs.replace(here, pid=here.pid + 1)
    far = msgspec.structs.replace(here, host_id="elsewhere", hostname="b", pid=7, kernel="Linux 4")
    richer = msgspec.structs.replace(far, rdma_devices=("mlx5_0",), cuda_devices=8, cpus=200)
    poor = msgspec.structs.replace(far, cpus=1, memory_bytes=1 << 20)
    for volume, same_host in ((here, True), (other_process, True), (here, False), (far, False)):
        yield LinkContext(here, volume, same_host, offered=False)
        for given in {offer, b"", b"garbage", b"\xff" * 20}:
            yield LinkContext(here, volume, same_host, offered=True, offer=given)
    # Networks of which the system does not know the rate, of which it does, and none at all.
    wired = [
        msgspec.structs.replace(
            host, networks=tuple(Network(f"eth{n}", f"192.0.{n}.{at}", 24, rate) for n in range(2))
        )
        for at, host in enumerate((here, far), 1)
        for rate in (0, 100, 400_000)
    ]
    lonely = msgspec.structs.replace(far, networks=(), namespace="")
    pairs = [(richer, richer), (richer, poor), (poor, poor), (here, lonely), (lonely, lonely)]
    for one, other in (*pairs, *itertools.product(wired[:3], wired[3:])):
        yield LinkContext(one, other, same_host=False, offered=True, offer=offer)


class DescriptorTests(TransportKit):
    """Tests of the hook, the spec, the bids and the probe."""

    def test_its_name_leads_to_its_halves(self) -> None:
        """The entry point leads to a spec of this name, which names classes of both halves."""
        spec = self.spec()
        check(spec.name == self.name, f"the spec calls itself {spec.name!r}, not {self.name!r}")
        if spec.in_band:
            check(not spec.client and not spec.server, "it is in-band, and yet names halves")
            return
        for what, path, base in (
            ("client", spec.client, Link),
            ("server", spec.server, TransportServer),
        ):
            if path is None:
                fail(f"it names no {what} half")
            try:
                cls = load_class(path)
            except PluginError as error:
                fail(f"its {what} half does not load: {error}")
            good = isinstance(cls, type) and issubclass(cls, base)
            check(good, f"its {what} half {path!r} is no {base.__name__}")

    def test_its_hook_module_is_light(self) -> None:
        """In a fresh interpreter, the hook, its probe and its bid import neither torch, nor the
        halves, nor any library, because every client and every server loads the module.
        """
        plugin, spec = self.plugin(), self.spec()
        brought = set(_fresh(_FRESH, [plugin.name, plugin.value]))
        check("torch" not in brought, "it imports torch")
        for half in () if self.light_halves else (spec.client, spec.server):
            module = str(half).partition(":")[0]
            check(module not in brought, f"it imports its half {module}")
        package = plugin.value.partition(":")[0].partition(".")[0]
        known = {package, "torchstore_core", "msgspec", "pluggy", *sys.stdlib_module_names}
        libraries = {name.partition(".")[0] for name in brought} - known
        check(not libraries, f"it imports {', '.join(sorted(libraries))}")

    def test_its_halves_import_no_unpickler(self) -> None:
        """No module of the halves' own packages imports pickle or the like, because unpickling a
        peer's bytes would run the peer's code.
        """
        spec = self.spec()
        if spec.in_band:
            pytest.skip(f"{self.name} is in-band: it has no halves")
        modules = [str(half).partition(":")[0] for half in (spec.client, spec.server)]
        found: dict[str, str | None] = _fresh(_HALVES, modules)
        for module, file in sorted(found.items()):
            if module.partition(".")[0] == "torchstore_core" or not str(file).endswith(".py"):
                continue
            unsafe = sorted(_imports(Path(str(file)).read_text()) & _UNPICKLERS)
            check(not unsafe, f"{module} imports {', '.join(unsafe)}")

    def test_its_server_half_needs_no_torch(self) -> None:
        """A server half that is not isolated runs in the server's process, which has no torch."""
        spec = self.spec()
        if spec.in_band:
            pytest.skip(f"{self.name} is in-band: it has no halves")
        if spec.isolated:
            pytest.skip("its server half has a process of its own (isolated is True)")
        brought = _fresh(_MODULE, [str(spec.server).partition(":")[0]])
        check("torch" not in brought, "its server half imports torch, and is not isolated")

    def test_its_bids_make_sense(self) -> None:
        """A bid has a finite latency, a finite rate above 0 and a reason; a refusal, a reason."""
        spec = self.spec()
        for context in contexts(self._offer()):
            try:
                bid = spec.bid(context)
            except Exception as error:  # noqa: BLE001 - the store takes any one for a refusal
                fail(f"bidding raised {error!r} for {_about(context)}")
            where = f"{_about(context)}: {bid}"
            if isinstance(bid, Refusal):
                check(bool(bid.reason.strip()), f"a refusal without a reason, for {where}")
                continue
            check(isinstance(bid, Bid), f"neither a Bid nor a Refusal for {where}")
            latency, rate = bid.latency_s, bid.bytes_per_s
            check(math.isfinite(latency) and latency >= 0, f"a latency of {latency} s for {where}")
            check(math.isfinite(rate) and rate > 0, f"a rate of {rate} bytes/s for {where}")
            check(bool(bid.reason.strip()), f"a bid without a reason, for {where}")

    def test_its_bids_are_pure_and_quick(self) -> None:
        """The same context always gets the same bid, and bidding makes no handshake."""
        spec = self.spec()

        async def handshake(request: bytes) -> bytes:
            raise TransportUnavailableError("bids make no handshakes")

        known = [
            msgspec.structs.replace(context, handshake=handshake)
            for context in contexts(self._offer())
        ]
        environment = dict(os.environ)
        first = [spec.bid(context) for context in known]
        quickest = [math.inf] * len(known)  # a machine is busy now and then
        for count in range(_BIDS):
            at = count % len(known)
            began = time.perf_counter()
            again = spec.bid(known[at])
            quickest[at] = min(quickest[at], time.perf_counter() - began)
            if again != first[at]:
                fail(f"{_about(known[at])}: {first[at]}, and then {again}")
        took = max(quickest)
        check(took < _BID_S, f"a bid takes {took * 1e3:.1f} ms; it must only compare what it gets")
        check(dict(os.environ) == environment, "a bid changed the environment")

    def test_its_probe_says_in_words_what_is_missing(self) -> None:
        """The probe is quick, and repeats its answer."""
        spec = self.spec()
        if spec.probe is None:
            pytest.skip("it has no probe")
        began = clock()
        reason = spec.probe()
        took = clock() - began
        words = reason is None or bool(str(reason).strip())
        check(words, f"its probe returned {reason!r}: neither None nor a reason")
        check(reason == spec.probe(), f"its probe returned {reason!r}, and then something else")
        check(took < _PROBE_S, f"its probe took {took:.1f} s")

    def _offer(self) -> bytes:
        """Return a real offer, or an empty one if the halves do not work here."""
        try:
            return self.anywhere().reach.offer
        except pytest.skip.Exception:
            return b""


def _about(context: LinkContext) -> str:
    where = "on this host" if context.same_host else "on another host"
    ends = (("here", context.client.networks), ("there", context.volume.networks))
    networks = ", ".join(
        f"{end} {' and '.join(f'{n.address} ({n.mbits_per_s} Mbit/s)' for n in known) or 'none'}"
        for end, known in ends
    )
    offer = f"offered: {context.offered}, offer {context.offer[:20]!r}"
    return f"a volume {where}, {offer}, networks {networks}"


def _fresh(program: str, argument: list[str]) -> Any:
    """Return the JSON that a program prints in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", program, msgspec.json.encode(argument).decode()],
        env=tool_environment({}),
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        fail(f"a fresh interpreter cannot load it:\n{done.stderr}")
    return msgspec.json.decode(done.stdout.splitlines()[-1])


def _imports(source: str) -> set[str]:
    """Return the top-level packages that a module's source imports, in functions, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found.add(node.module.partition(".")[0])
    return found
