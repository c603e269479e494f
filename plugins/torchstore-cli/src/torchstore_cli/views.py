"""The reports, for people."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import assert_never

import msgspec
from rich.text import Text

from torchstore_cli import reports
from torchstore_cli.screen import Cell, Screen, bar, printable
from torchstore_core.reports.summaries import kind_text, pending_text, shape_text
from torchstore_core.reports.units import human_bytes, human_duration, human_latency
from torchstore_core.wire import messages as m

__all__ = ["show"]

_MOST_SESSIONS = 20


def show(screen: Screen, report: reports.Report, *, long: bool = False) -> None:
    """Show one report; ``long``: with every column."""
    match report:
        case reports.StatusReport():
            _status(screen, report)
        case reports.KeyReport():
            _keys(screen, report, long=long)
        case reports.KeyDetails():
            _key(screen, report)
        case reports.Removed():
            _removed(screen, report)
        case reports.Serving():
            _serving(screen, report)
        case reports.DoctorReport():
            _doctor(screen, report)
        case reports.BenchReport():
            _bench(screen, report)
        case _:
            assert_never(report)


def _status(screen: Screen, report: reports.StatusReport) -> None:
    """A page about one store."""
    living = [v for v in report.volumes if not v.lost]
    capacity = sum(v.capacity_bytes for v in living)
    used = sum(v.used_bytes for v in living)
    screen.line((report.store_name, "bold"), ("  up ", "dim"), human_duration(report.uptime_s))
    screen.line((report.address, "dim"))
    screen.line()
    share = used / capacity if capacity else 0.0
    rows: list[Sequence[Cell]] = [
        ("memory", bar(share) + f" {human_bytes(used)} of {human_bytes(capacity)} ({share:.0%})"),
        ("keys", f"{report.keys:,}{_unfinished(report.pending_versions, report.pending_bytes)}"),
        ("sessions", f"{len(report.sessions):,}"),
        ("operations", f"{report.operations_per_s:,.1f}/s; so far {_most(report.operations)}"),
        ("controller", f"pid {report.controller_pid}"),
        ("strategy", report.strategy),
    ]
    screen.table((), [(Text(str(row[0]), "dim"), row[1]) for row in rows], prose=True)
    _volumes(screen, report)
    if report.pending:
        _waiting(screen, report)
    if report.sessions:
        _sessions(screen, report)
    if report.plugin_errors:
        screen.heading("Plug-ins that the server could not load")
        screen.table((), report.plugin_errors.items(), prose=True)


def _volumes(screen: Screen, report: reports.StatusReport) -> None:
    writing = any(v.unfinished_bytes for v in report.volumes)
    titles = ["VOLUME", "PID", "CAPACITY", "USED", "LEASED", "FREE", "WARM"]
    rows = [
        [
            v.id,
            str(v.pid),
            human_bytes(v.capacity_bytes),
            human_bytes(v.used_bytes),
            human_bytes(v.leased_bytes),
            human_bytes(v.free_bytes),
            human_bytes(v.warm_bytes),
            *([human_bytes(v.unfinished_bytes)] if writing else []),
        ]
        for v in report.volumes
    ]
    screen.heading("Volumes")
    screen.table(titles + ["UNFINISHED"] * writing, rows, right=range(1, 8))
    lost = [(f"lost: {v.id}", v.lost) for v in report.volumes if v.lost]
    if lost:
        screen.line()
        screen.table((), [(Text(printable(name), "red"), printable(why)) for name, why in lost])


def _unfinished(versions: int, nbytes: int) -> str:
    """What to say beside the number of keys."""
    if not versions:
        return ""
    return f"; {versions:,} unfinished version{'s' * (versions != 1)}, {human_bytes(nbytes)}"


def _waiting(screen: Screen, report: reports.StatusReport) -> None:
    """Versions that are not whole, and whom they wait for."""
    screen.heading("Unfinished", "versions that nobody can read yet")
    screen.table(
        ("KEY", "VERSION", "SIZE", "STATE"),
        [(p.key, str(p.version), human_bytes(p.nbytes), _state(p)) for p in report.pending],
        right=(1, 2),
        prose=True,
    )
    if report.pending_versions > len(report.pending):
        screen.line((f"and {report.pending_versions - len(report.pending):,} more", "dim"))


def _state(p: m.Pending) -> str:
    return printable(pending_text(p))


def _most(operations: dict[str, int]) -> str:
    """The three most frequent operations."""
    ranked = sorted(operations.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {count:,}" for name, count in ranked) or "none"


def _sessions(screen: Screen, report: reports.StatusReport) -> None:
    shown = sorted(report.sessions, key=lambda s: (-s.leased_bytes, -s.unfinished_bytes, s.pid))
    screen.heading("Sessions")
    screen.table(
        ("PID", "RANK", "AGE", "LANES", "LEASES", "LEASED", "PUTS", "UNFINISHED", "HOST"),
        [
            (
                str(s.pid),
                "–" if s.rank is None else str(s.rank),
                human_duration(s.age_s),
                str(s.lanes),
                f"{s.leases:,}",
                human_bytes(s.leased_bytes),
                str(s.unfinished_puts),
                human_bytes(s.unfinished_bytes),
                s.hostname,
            )
            for s in shown[:_MOST_SESSIONS]
        ],
        right=range(8),
    )
    if len(shown) > _MOST_SESSIONS:
        screen.line((f"and {len(shown) - _MOST_SESSIONS} more; --json has all of them", "dim"))


# ---- keys ---------------------------------------------------------------------------------


def _shape(entry: reports.KeyLine | reports.KeyDetails) -> str:
    return "–" if entry.shape is None else shape_text(entry.shape)


def _keys(screen: Screen, report: reports.KeyReport, *, long: bool) -> None:
    """One line a key; the key comes last, whole, whatever its length. A version that is not whole
    has a line of its own, below that of the key.
    """
    if not report.entries and not report.pending:
        what = f"no key starts with {report.prefix!r}" if report.prefix else "no keys"
        screen.line((what, "dim"))
        return
    now = time.time()
    titles = ["SIZE", "TYPE", "SHAPE", "VERSION"]
    if long:
        titles += ["AGE", "LEASES", "PID", "VOLUME"]
    rows: list[tuple[str, int, Sequence[Cell]]] = []
    for e in report.entries:
        row: list[Cell] = [human_bytes(e.nbytes), kind_text(e), _shape(e), str(e.version)]
        if long:
            row += [
                human_duration(now - e.created),
                str(e.leases),
                str(e.creator_pid),
                "inline" if e.inline else e.volume,
            ]
        key: Cell = Text(printable(e.key), "bold")
        last = Text(f"{printable(e.key)} (lost)", "red") if e.lost else key
        rows.append((e.key, e.version, [*row, last]))
    for p in report.pending:
        row = [human_bytes(p.nbytes), "unfinished", "–", str(p.version), *["–"] * 4 * long]
        done = f"{len(p.committed)} of {p.participants or '?'} done"
        rows.append((p.key, p.version, [*row, Text(f"{printable(p.key)} ({done})", "yellow")]))
    screen.table(
        [*titles, "KEY"],
        [row for *_, row in sorted(rows, key=lambda row: row[:2])],
        right=(0, 3, 4, 5, 6) if long else (0, 3),
        folds=(1, 2, 7) if long else (),
    )
    # A state dict's entries are listed, too: its bytes are theirs.
    total = human_bytes(sum(e.nbytes for e in report.entries if e.entries is None))
    count = len(report.entries)
    screen.line()
    waiting = _unfinished(len(report.pending), sum(p.nbytes for p in report.pending))
    screen.line((f"{count:,} key{'s' if count != 1 else ''}, {total}{waiting}", "dim"))


def _key(screen: Screen, e: reports.KeyDetails) -> None:
    """All that is known of one key."""
    age = human_duration(time.time() - e.created)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(e.created))
    rank = "" if e.creator.rank is None else f", rank {e.creator.rank}"
    place = "inline, in the controller" if e.inline else f"{e.parts:,} parts"
    if e.segment is not None and e.offset is not None:
        place = f"segment {e.segment}, offset {e.offset:,}"
    if e.entries is not None:
        place = f"{e.entries:,} entries"
    rows = [
        ("version", str(e.version)),
        ("type", kind_text(e) if e.shape is None else f"{e.dtype} tensor"),
        ("size", f"{human_bytes(e.nbytes)} ({e.nbytes:,} bytes)"),
        ("volume", f"{e.volume or 'none'} ({place})"),
        ("leases", f"{e.leases:,}"),
        ("created", f"{when} ({age} ago)"),
        ("creator", f"pid {e.creator.pid} on {e.creator.hostname}{rank}"),
    ]
    if e.shape is not None:
        rows.insert(2, ("shape", _shape(e)))
    if len(e.versions) > 1:
        rows.insert(1, ("kept", ", ".join(map(str, e.versions[:-1]))))
    if e.copies > 1:
        rows.append(("copies", f"{e.copies:,}"))
    if e.lost:
        rows.append(("lost", printable(e.lost)))
    rows += [(f"version {p.version}", _state(p)) for p in e.pending]
    screen.line((printable(e.key), "bold"))
    screen.table((), [(Text(name, "dim"), text) for name, text in rows])


def _removed(screen: Screen, report: reports.Removed) -> None:
    """How many, and which if they are few."""
    few = len(report.keys) <= 5
    names = f": {', '.join(map(printable, report.keys))}" if report.keys and few else ""
    screen.line(f"deleted {report.deleted:,} key{'s' if report.deleted != 1 else ''}{names}")


def _serving(screen: Screen, report: reports.Serving) -> None:
    """How to use what was started."""
    volumes = report.num_storage_volumes
    screen.line(
        (report.store_name, "bold"),
        f" is up: {human_bytes(report.capacity_bytes)} in {volumes} "
        f"volume{'s' if volumes != 1 else ''}, strategy {report.strategy}, pid {report.pid}",
    )
    screen.table(
        (),
        [
            (Text("address", "dim"), report.address),
            (Text("shell", "dim"), f"export TORCHSTORE_ADDRESS={report.address}"),
            (Text("Python", "dim"), f'await ts.connect("{report.address}")'),
        ],
    )
    screen.line(("Ctrl-C ends it; what it holds is gone then.", "dim"))


# ---- doctor -------------------------------------------------------------------------------


def _doctor(screen: Screen, report: reports.DoctorReport) -> None:
    """The examination, verdict last."""
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
            b.reason + (" (preferred)" if b.preferred else ""),
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
        screen.line(("  ✗ ", "red"), printable(store.error))
    alike = itertools.groupby(store.links, lambda link: msgspec.structs.replace(link, volume=""))
    for link, group in alike:
        names = [one.volume for one in group]
        where = "this host, proven" if link.same_host else "another host"
        volumes = "volumes" if len(names) > 1 else "volume"
        screen.line(f"  {volumes} ", (", ".join(names), "bold"), (f"  {where}", "dim"))
        _show_link(screen, link)


def _verdict(screen: Screen, report: reports.DoctorReport) -> None:
    screen.line()
    marks = [("✗", "red", text) for text in report.problems]
    marks += [("!", "yellow", text) for text in report.notes]
    screen.table((), [(Text(mark, style), text) for mark, style, text in marks], prose=True)
    if report.ok:
        screen.line(("✓ ", "green"), "a store works here")
    else:
        count = len(report.problems)
        screen.line(("✗ ", "red"), f"{count} problem{'s' if count != 1 else ''}")


# ---- bench --------------------------------------------------------------------------------


def _bench(screen: Screen, report: reports.BenchReport) -> None:
    floors, small, large, ratios = report.floors, report.small, report.large, report.ratios

    def rate(seconds: float) -> str:
        return f"{large.nbytes / seconds / 1e9:.2f} GB/s"

    size, little = human_bytes(large.nbytes), human_bytes(small.nbytes)
    threads = f"{report.copy_threads} copy thread{'s' if report.copy_threads != 1 else ''}"
    screen.line((report.address or "a store of its own", "bold"), f" · {threads}")
    screen.line(("put here, got by another process, which checked every byte", "dim"))
    screen.line()
    copy, echo = f"{rate(floors.warm_copy_s)} warm copy", f"{human_latency(floors.echo_s)} echo"
    screen.table(
        ("WHAT", "RESULT", "FLOOR", "RATIO"),
        [
            (f"put {size}, first", rate(large.first_put_s), copy, f"{ratios['first_put']:.2f}"),
            (f"put {size}, again", rate(large.put_s), copy, f"{ratios['put']:.2f}"),
            (
                f"get {size} in place",
                rate(large.get_in_place_s),
                copy,
                f"{ratios['get_in_place']:.2f}",
            ),
            (f"get {size} zero-copy", human_latency(large.get_zero_copy_s), "", ""),
            (
                f"put {little}, p50",
                human_latency(small.put_p50_s),
                echo,
                f"{ratios['small_put_p50']:.1f} ×",
            ),
            (f"put {little}, p99", human_latency(small.put_p99_s), "", ""),
            (
                f"get {little}, p50",
                human_latency(small.get_p50_s),
                echo,
                f"{ratios['small_get_p50']:.1f} ×",
            ),
            (f"get {little}, p99", human_latency(small.get_p99_s), "", ""),
        ],
        right=(1, 2, 3),
    )
    screen.line()
    screen.line((f"floor of never touched memory: {rate(floors.cold_copy_s)}", "dim"))
