"""``torchstore doctor``: what this host offers a store, and what keeps one from working here.

Torch-free.
"""

from __future__ import annotations

import os
import platform
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata

import msgspec

from torchstore_cli import reports
from torchstore_cli.connection import given_address, open_store
from torchstore_cli.doctor.limits import limit_notes, memory_notes, read_limits
from torchstore_cli.doctor.links import host_report, link_report, link_to, numa_notes
from torchstore_cli.doctor.plugin_check import Outcome, check_plugins
from torchstore_cli.doctor.spilling import spill_notes
from torchstore_core.clients.session.held_ref import TRACE
from torchstore_core.clients.stores import discovery
from torchstore_core.clients.stores import environment as stores
from torchstore_core.contracts.transport import LinkContext
from torchstore_core.errors import ConfigurationError, TorchStoreError
from torchstore_core.machine import copying, topology
from torchstore_core.machine.directories import runtime_directory
from torchstore_core.machine.numa import probe_numa
from torchstore_core.machine.switches import is_on
from torchstore_core.machine.virtual_memory import map_shared, populate_write, unmap
from torchstore_core.plugins.installed import GROUPS
from torchstore_core.plugins.ranking import Policy, rank
from torchstore_core.plugins.registry import Registry
from torchstore_core.plugins.requirements import misfit
from torchstore_core.server.memory.segment import open_memory
from torchstore_core.server.memory.volume import default_capacity
from torchstore_core.server.server import ServerOptions
from torchstore_core.wire import messages as m

__all__ = ["examine"]

_TRANSPORTS = "torchstore.transports"
_CLI = "torchstore-cli"
_PACKAGES = ("torchstore-core", "torchstore-transports", "torchstore-strategies", "torch")


class _Findings:
    """The problems and notes, in the order in which they were found."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def check(self, what: str, action: Callable[[], object]) -> None:
        """Run ``action``; if it fails, record that as a problem."""
        try:
            action()
        except (TorchStoreError, OSError) as error:
            self.problems.append(f"{what}: {error}")


async def examine(address: str | None, timeout: float) -> reports.DoctorReport:
    """Examine everything. Errors become part of the report instead of being raised."""
    found = _Findings()
    here = topology.probe()
    policy = Policy.unchecked()
    installed = Registry(block=policy.block)
    names = [(group, name) for group in GROUPS for name in installed.names(group)]
    outcomes = await check_plugins(names, policy.block)
    fatal = [name for (_, name), outcome in outcomes.items() if outcome.ends_process]
    registry = Registry(block=(*policy.block, *fatal))
    limits, left = read_limits(), topology.memory_left_bytes()
    link = _link_to_this_host(here, registry, policy, outcomes, found)
    found.check("the default strategy", lambda: registry.strategy(ServerOptions().strategy))
    found.check("the local runtime", lambda: registry.runtime("local"))
    found.check("the runtime directory", runtime_directory)
    found.check("shared memory", _share_memory)
    _check_environment(policy, installed, found)
    _check_platform(found)
    numa = probe_numa()
    found.notes += numa_notes("on this host", numa)
    cuda = bool(here.cuda_devices)
    found.notes += limit_notes(limits, left, default_capacity(), has_cuda=cuda)
    plugins = [*_plugins(installed, policy, outcomes)]
    for p in plugins:
        if p.name in fatal and p.state == "error":
            found.problems.append(
                f"the plug-in {p.name!r} of {p.group} takes processes down ({p.error}): block it "
                f"(TORCHSTORE_BLOCK={p.name}) or uninstall {p.distribution}"
            )
        elif p.state == "error" and (clash := installed.clash(p.group, p.name)):
            found.problems.append(clash)
        elif p.state == "error":
            found.notes.append(f"the plug-in {p.name!r} of {p.group} does not load, the others do")
    releases = {p.distribution for p in plugins if p.state != "blocked"} | {*_PACKAGES, _CLI}
    found.notes += filter(None, map(misfit, sorted(releases)))
    copy = reports.CopyEngine(copying.has_native(), _copy_threads(found))
    running_stores = await _stores(address, timeout, registry, policy, found)
    return reports.DoctorReport(
        ok=not found.problems,
        problems=found.problems,
        notes=found.notes,
        versions=_versions(),
        environment={k: v for k, v in sorted(os.environ.items()) if k.startswith("TORCHSTORE_")},
        host=host_report(here, numa),
        copy=copy,
        limits=limits,
        runtime_directory=_runtime_directory(),
        default_capacity_bytes=default_capacity(),
        link=link,
        stores=running_stores,
        plugins=plugins,
    )


# ---- transports ---------------------------------------------------------------------------


def _link_to_this_host(
    here: topology.Topology,
    registry: Registry,
    policy: Policy,
    outcomes: Mapping[tuple[str, str], Outcome],
    found: _Findings,
) -> reports.LinkReport:
    """Return the link that a client would have to a volume of another process on this host."""
    specs = registry.transports()
    there = msgspec.structs.replace(here, pid=0)
    offers = {
        spec.name: outcomes[_TRANSPORTS, spec.name].offer
        for spec in specs
        if spec.server is not None
    }
    ranking = rank(specs, LinkContext(here, there, same_host=True, offered=True), offers, policy)
    for (group, name), outcome in outcomes.items():
        reason = outcome.error or outcome.refusal
        if group == _TRANSPORTS and reason is not None:
            ranking.drop(name, reason)
    for name in policy.block:
        if registry.source(_TRANSPORTS, name):
            ranking.refusals[name] = "blocked by configuration"
    link = link_report("", True, ranking, lambda name: outcomes[_TRANSPORTS, name].route)
    _check_reach("a volume on this host", link, found)
    return link


def _check_reach(what: str, link: reports.LinkReport, found: _Findings) -> None:
    """Record a problem if no transport moves large values, so that only small ones could be put."""
    if link.chosen is not None:
        return
    reasons = [f"{name}: {reason}" for name, reason in link.refusals.items()]
    why = f" ({'; '.join(reasons)})" if reasons else ": pip install torchstore-transports"
    found.problems.append(f"{what}: no transport moves large values{why}")


async def _stores(
    address: str | None, timeout: float, registry: Registry, policy: Policy, found: _Findings
) -> list[reports.StoreLinks]:
    """Return the links to the given store, which must answer, or else to all running stores."""
    named = given_address(address)
    if named is not None:
        report = await _store(discovery.RunningStore(named), timeout, registry, policy, found)
        if report.error is not None:
            found.problems.append(f"the store: {report.error}")
        return [report]
    try:
        listening = await discovery.stores()
    except ConfigurationError:  # already recorded as a problem
        return []
    return [await _store(server, timeout, registry, policy, found) for server in listening]


async def _store(
    server: discovery.RunningStore,
    timeout: float,
    registry: Registry,
    policy: Policy,
    found: _Findings,
) -> reports.StoreLinks:
    """Connect to each volume as a client would, and return the links."""
    if server.error is not None:
        return reports.StoreLinks(server.address, "", 0, [], server.error)
    links: list[reports.LinkReport] = []
    try:
        async with open_store(server.address, timeout) as store:
            welcome = store.welcome
            status = (await store.call(m.StatusReply, m.Status)).status
            found.notes += memory_notes(
                status, topology.probe().host_id, topology.memory_left_bytes()
            )
            found.notes += spill_notes(status)
            for info in welcome.volumes:
                if info.lost:
                    continue
                link = await link_to(store, info, registry, policy)
                links.append(link)
                _check_reach(f"volume {info.id}", link, found)
    except TorchStoreError as error:
        return reports.StoreLinks(
            server.address, server.store_name, server.pid, links, error.message
        )
    return reports.StoreLinks(server.address, welcome.store_name, welcome.server.pid, links)


# ---- plug-ins -----------------------------------------------------------------------------


def _plugins(
    registry: Registry, policy: Policy, outcomes: Mapping[tuple[str, str], Outcome]
) -> Iterator[reports.PluginLine]:
    for group in GROUPS:
        blocked = {name for name in policy.block if registry.source(group, name)}
        for name in sorted({*registry.names(group), *blocked}):
            source = registry.source(group, name)
            if name in blocked:
                yield reports.PluginLine(group, name, source, "blocked")
            else:
                error = outcomes[group, name].error
                yield reports.PluginLine(group, name, source, "error" if error else "ok", error)


# ---- the host -----------------------------------------------------------------------------


def _share_memory() -> None:
    """Create a segment, pass it on, and check that the other side sees the same bytes."""
    size = 1 << 16
    fd = open_memory("doctor", size)
    other = -1
    try:
        one, two = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with one, two:
            socket.send_fds(one, [b"x"], [fd])
            _, fds, _, _ = socket.recv_fds(two, 1, 1)
        if not fds:
            raise OSError("a file descriptor sent over a Unix socket did not arrive")
        other = fds[0]
        address = map_shared(other, size)
        try:
            populate_write(address, size)
            os.pwrite(fd, b"torchstore", 100)
            if os.pread(other, 10, 100) != b"torchstore":
                raise OSError("the two ends of a segment hold different bytes")
        finally:
            unmap(address, size)
    finally:
        os.close(fd)
        if other >= 0:
            os.close(other)


def _check_platform(found: _Findings) -> None:
    if not hasattr(os, "memfd_create"):
        found.notes.append(
            f"no memfd on this platform: segments are unlinked files in {tempfile.gettempdir()}, "
            "which should be in memory"
        )
    if not copying.has_native():
        found.notes.append(
            "the compiled copy module is missing (it was built without a C compiler): large "
            "copies go through the cache and are slower"
        )


def _check_environment(policy: Policy, registry: Registry, found: _Findings) -> None:
    found.check(stores.ADDRESSES, lambda: stores.inherited_address("any other"))
    found.check(stores.ALLOW_PICKLE, stores.allows_pickle)
    found.check(TRACE, lambda: is_on(TRACE))
    found.check("the environment", lambda: policy.check_installed(registry))


def _copy_threads(found: _Findings) -> int | None:
    try:
        return copying.copy_threads()
    except ConfigurationError as error:
        found.problems.append(error.message)
        return None


def _runtime_directory() -> str | None:
    try:
        return str(runtime_directory())
    except (ConfigurationError, OSError):
        return None


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions
