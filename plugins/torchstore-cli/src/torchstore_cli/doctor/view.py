"""The report of ``torchstore doctor``, as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
from rich.text import Text

from torchstore_cli import reports
from torchstore_cli.screen import Cell, Screen, printable
from torchstore_core.machine.numa import Numa
from torchstore_core.reports.units import human_bytes, human_latency

__all__ = ["show_doctor", "show_peer"]


def show_doctor(screen: Screen, report: reports.DoctorReport) -> None:
    """Show the whole report, with the verdict last."""
    host, limits = report.host, report.limits
    screen.line(("Host", "bold"))
    native = "compiled" if report.copy.native else "memmove (no compiled module)"
    threads = "?" if report.copy.threads is None else str(report.copy.threads)
    devices = f"{host.cuda_devices} CUDA, {', '.join(host.rdma_devices) or 'no'} RDMA"
    rows = [
        ("host", f"{host.hostname} · {host.kernel} · boot id {host.host_id}"),
        ("processors", f"{host.cpus} for this process · devices: {devices}"),
        (
            "memory",
            f"{human_bytes(host.memory_bytes)} may be used; a store takes up to "
            f"{human_bytes(report.default_capacity_bytes)} by default",
        ),
        ("NUMA nodes", _nodes(host.numa)),
        ("copies", f"{native} · {threads} thread{'s' if threads != '1' else ''}"),
        (
            "limits",
            f"memlock {_size(limits.memlock_bytes, 'unlimited')} · open files "
            f"{limits.open_files or 'unlimited'} · mappings {limits.max_mappings or '?'}",
        ),
        (
            "/dev/shm",  # noqa: S108 - only words
            f"{_size(limits.dev_shm_bytes, 'missing')}; segments are memfds and need none of it",
        ),
        ("sockets", report.runtime_directory or "no usable directory"),
        ("versions", " · ".join(f"{name}=={v}" for name, v in report.versions.items())),
        *(("setting", f"{name}={value}") for name, value in report.environment.items()),
    ]
    screen.table((), [(Text(n, "dim"), t) for n, t in rows], prose=True, indent=2)
    screen.heading("Transports", "to a volume of another process on this host")
    _show_link(screen, report.link)
    for store in report.stores:
        _show_store(screen, store)
    if not report.stores:
        screen.heading("Stores", "none is running")
    screen.heading("Plug-ins")
    states = {"ok": ("ok", "green"), "error": ("error", "red"), "blocked": ("blocked", "yellow")}
    screen.table(
        ("GROUP", "NAME", "DISTRIBUTION", "STATE"),
        [
            (
                p.group.removeprefix("torchstore."),
                p.name,
                p.distribution,
                Text.assemble(states[p.state], f": {printable(p.error)}" if p.error else ""),
            )
            for p in report.plugins
        ],
        prose=True,
        indent=2,
    )
    _verdict(screen, report)


def _size(nbytes: int | None, otherwise: str) -> str:
    return otherwise if nbytes is None else human_bytes(nbytes)


def _show_link(screen: Screen, link: reports.LinkReport) -> None:
    rows: list[Sequence[Cell]] = [
        (
            Text("✓", "green"),
            Text(b.transport, "bold" if b.transport == link.chosen else ""),
            human_latency(b.latency_s),
            f"{b.bytes_per_s / 1e9:.1f} GB/s",
            _size(b.max_bytes, "any size"),
            "; ".join(filter(None, (b.reason, b.route))) + (" (preferred)" if b.preferred else ""),
        )
        for b in link.bids
    ]
    rows += [
        (Text("✗", "red"), name, "–", "–", "–", Text(printable(reason), "dim"))
        for name, reason in link.refusals.items()
    ]
    titles = ("", "TRANSPORT", "LATENCY", "SPEED", "UP TO", "WHY")
    screen.table(titles, rows, right=(2, 3, 4), prose=True, indent=2)
    if link.inline_up_to >= 0:
        screen.line(
            "  up to ",
            (f"{link.inline_up_to:,} bytes", "bold"),
            " values ride in the message; larger ones take ",
            (link.chosen or "nothing", "bold" if link.chosen else "red"),
        )


def _show_store(screen: Screen, store: reports.StoreLinks) -> None:
    screen.heading(f"Store {store.store_name}".rstrip(), store.address)
    if store.error is not None:
        screen.line(("  ✗ ", "red"), store.error)
    alike = itertools.groupby(store.links, lambda link: msgspec.structs.replace(link, volume=""))
    for link, group in alike:
        names = [one.volume for one in group]
        where = "this host, proven" if link.same_host else "another host"
        volumes = "volumes" if len(names) > 1 else "volume"
        screen.line(f"  {volumes} ", (", ".join(names), "bold"), (f"  {where}", "dim"))
        _show_link(screen, link)


def show_peer(screen: Screen, report: reports.PeerReport) -> None:
    """Show both sides of each link."""
    screen.line((report.store_name, "bold"), ("  ", ""), (report.address, "dim"))
    for volume in report.volumes:
        here, there = report.host, volume.host
        screen.heading(f"Volume {volume.link.volume}")
        rows: list[tuple[Cell, Cell, Cell]] = [
            ("host", here.hostname, there.hostname),
            ("kernel", here.kernel, there.kernel),
            ("processors", str(here.cpus), str(there.cpus)),
            ("memory", human_bytes(here.memory_bytes), human_bytes(there.memory_bytes)),
            *_addresses(here, there),
            ("RDMA devices", _names(here.rdma_devices), _names(there.rdma_devices)),
            ("CUDA devices", str(here.cuda_devices), str(there.cuda_devices)),
            ("NUMA nodes", _nodes(here.numa), _nodes(there.numa)),
            ("transports", _names(report.installed), _names(volume.offers)),
            *_versions(report.versions, volume.versions),
        ]
        screen.table(("", "HERE (INSTALLED)", "THERE (OFFERED)"), rows, prose=True, indent=2)
        screen.line()
        _show_link(screen, volume.link)
        _marked(screen, [("!", "yellow", note) for note in volume.notes])


def _nodes(numa: Numa) -> str:
    if not numa.nodes:
        return "not known"
    devices = [f"{name} on {node}" for name, node in numa.devices.items()]
    process = ", ".join(map(str, numa.process)) or "?"
    return "; ".join([f"{numa.nodes}, process on {process}", *devices])


def _versions(
    here: Mapping[str, str], there: Mapping[str, str]
) -> Iterator[tuple[Cell, Cell, Cell]]:
    """Yield a row for each distribution of either side."""
    for name in sorted({*here, *there}):
        yield name, here.get(name, "–"), there.get(name, "–")


def _addresses(here: reports.Host, there: reports.Host) -> Iterator[tuple[Cell, Cell, Cell]]:
    """Yield a row for each address of either side."""
    sides = ([_address(one) for one in host.addresses] or ["none"] for host in (here, there))
    for number, (one, other) in enumerate(itertools.zip_longest(*sides, fillvalue="")):
        yield ("" if number else "addresses", one, other)


def _address(one: reports.Address) -> str:
    rate = f", {one.mbits_per_s / 1000:g} Gbit/s" if one.mbits_per_s else ""
    return f"{one.address}/{one.prefix} ({one.interface}{rate})"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _marked(screen: Screen, marks: Sequence[tuple[str, str, str]]) -> None:
    screen.table((), [(Text(mark, style), text) for mark, style, text in marks], prose=True)


def _verdict(screen: Screen, report: reports.DoctorReport) -> None:
    screen.line()
    marks = [("✗", "red", text) for text in report.problems]
    marks += [("!", "yellow", text) for text in report.notes]
    _marked(screen, marks)
    if report.ok:
        screen.line(("✓ ", "green"), "a store works here")
    else:
        count = len(report.problems)
        screen.line(("✗ ", "red"), f"{count} problem{'s' if count != 1 else ''}")
