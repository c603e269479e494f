"""The reports of the commands, as text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import assert_never

from rich.text import Text

from torchstore_cli import reports
from torchstore_cli.bench.view import show_bench, show_transports
from torchstore_cli.doctor.view import show_doctor, show_peer
from torchstore_cli.screen import Cell, Screen, bar, printable
from torchstore_core.reports.summaries import kind_text, pending_text, shape_text
from torchstore_core.reports.units import human_bytes, human_duration

__all__ = ["show"]

_MOST_SESSIONS = 20


def show(screen: Screen, report: reports.Report, *, long: bool = False) -> None:
    """Show a report; ``long``: with every column."""
    match report:
        case reports.StatusReport():
            _status(screen, report)
        case reports.RefsReport():
            _refs(screen, report)
        case reports.KeyReport():
            _keys(screen, report, long=long)
        case reports.KeyDetails():
            _key(screen, report)
        case reports.Removed():
            _removed(screen, report)
        case reports.Drained():
            screen.line(report.text)
        case reports.Serving():
            _serving(screen, report)
        case reports.DoctorReport():
            show_doctor(screen, report)
        case reports.PeerReport():
            show_peer(screen, report)
        case reports.BenchReport():
            show_bench(screen, report)
        case reports.TransportsReport():
            show_transports(screen, report)
        case _:
            assert_never(report)


def _status(screen: Screen, report: reports.StatusReport) -> None:
    """Show a page about one store."""
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
        ("incarnation", str(report.incarnation)),
    ]
    if spill := str(report.spill):
        rows.insert(1, ("when full", spill))
    if repair := str(report.repair):
        rows.insert(1, ("copies", repair))
    screen.table((), [(Text(str(row[0]), "dim"), row[1]) for row in rows], prose=True)
    _volumes(screen, report)
    if report.pending:
        _pending(screen, report)
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
    for volume in report.volumes:
        if volume.draining and not volume.lost:
            left = human_bytes(volume.used_bytes)
            lost.append((f"drained: {volume.id}", f"{left} left; no put goes there"))
    if lost:
        screen.line()
        screen.table((), [(Text(printable(name), "red"), why) for name, why in lost])


def _unfinished(versions: int, nbytes: int) -> str:
    """Describe the unfinished versions, to follow a number of keys; empty if there are none."""
    if not versions:
        return ""
    return f"; {versions:,} unfinished version{'s' * (versions != 1)}, {human_bytes(nbytes)}"


def _pending(screen: Screen, report: reports.StatusReport) -> None:
    """Show the versions that are not complete yet, and whom they wait for."""
    screen.heading("Unfinished", "versions that nobody can read yet")
    screen.table(
        ("KEY", "VERSION", "SIZE", "STATE"),
        [(p.key, str(p.version), human_bytes(p.nbytes), pending_text(p)) for p in report.pending],
        right=(1, 2),
        prose=True,
    )
    if report.pending_versions > len(report.pending):
        screen.line((f"and {report.pending_versions - len(report.pending):,} more", "dim"))


def _most(operations: dict[str, int]) -> str:
    """Return the three most frequent operations."""
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


# ---- references -----------------------------------------------------------------------------


def _refs(screen: Screen, report: reports.RefsReport) -> None:
    """A line for each holder of each version that is held. Lines of programs come last, and are
    shown whole.
    """
    if not report.refs:
        screen.line(("no references", "dim"))
        return
    now = time.time()
    rows: list[Sequence[Cell]] = []
    for ref in report.refs:
        name = printable(ref.key) or f"object {ref.version:x}"
        version = f"{ref.version}{'' if ref.current else ' (only held)'}" if ref.key else "–"
        for at, holder in enumerate(ref.holders):
            first: list[Cell] = ["", "", "", ""]
            if not at:
                first = [Text(name, "bold"), version, human_bytes(ref.nbytes), ref.kind]
            rank = "" if holder.rank is None else f", rank {holder.rank}"
            who = f"pid {holder.pid} on {holder.hostname}{rank}"
            age = human_duration(max(0.0, now - holder.since))
            rows.append([*first, who, holder.state, age, holder.where])
    traced = any(holder.where for ref in report.refs for holder in ref.holders)
    titles = ["KEY", "VERSION", "SIZE", "TYPE", "HOLDER", "STATE", "SINCE"]
    screen.listing(
        [*titles, "LINE"] if traced else titles,
        rows if traced else [row[:-1] for row in rows],
        right=(2, 6),
        folds=(4,),
    )
    held = sum(ref.nbytes for ref in report.refs if not ref.current)
    count = len(report.refs)
    screen.line()
    screen.line(
        (f"{count:,} version{'s' * (count != 1)}; {human_bytes(held)} only for references", "dim")
    )


# ---- keys ---------------------------------------------------------------------------------


def _shape(entry: reports.KeyLine | reports.KeyDetails) -> str:
    return "–" if entry.shape is None else shape_text(entry.shape)


def _keys(screen: Screen, report: reports.KeyReport, *, long: bool) -> None:
    """Show a line for each key, which comes last and is shown in full, whatever its length. A
    version that is not complete yet has a line of its own, below that of the key.
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
    screen.listing(
        [*titles, "KEY"],
        [row for *_, row in sorted(rows, key=lambda row: row[:2])],
        right=(0, 3, 4, 5, 6) if long else (0, 3),
        folds=(1, 2, 7) if long else (),
    )
    # The entries of a state dict are listed, too, so its own bytes would count twice.
    total = human_bytes(sum(e.nbytes for e in report.entries if e.entries is None))
    count = len(report.entries)
    screen.line()
    unfinished = _unfinished(len(report.pending), sum(p.nbytes for p in report.pending))
    screen.line((f"{count:,} key{'s' if count != 1 else ''}, {total}{unfinished}", "dim"))


def _key(screen: Screen, e: reports.KeyDetails) -> None:
    """Show everything about one key."""
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
        rows.append(("lost", e.lost))
    rows += [(f"version {p.version}", pending_text(p)) for p in e.pending]
    screen.line((e.key, "bold"))
    screen.table((), [(Text(name, "dim"), text) for name, text in rows])


def _removed(screen: Screen, report: reports.Removed) -> None:
    """Show how many keys were deleted, and which, if they are few."""
    few = len(report.keys) <= 5
    names = f": {', '.join(report.keys)}" if report.keys and few else ""
    screen.line(f"deleted {report.deleted:,} key{'s' if report.deleted != 1 else ''}{names}")


def _serving(screen: Screen, report: reports.Serving) -> None:
    """Show how programs and commands reach the store that was started."""
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
