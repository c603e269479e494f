"""The reports of ``torchstore snapshot``, for people: on rich, coloured on terminals only."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchstore_core.reports.units import human_bytes, human_duration
from torchstore_snapshot.cli import reports

__all__ = ["show"]

_ANY_WIDTH = 1 << 20


def show(report: msgspec.Struct) -> None:
    """Print one report to standard output."""
    page = _Page()
    match report:
        case reports.ListReport():
            _list(page, report)
        case reports.SnapshotReport():
            _snapshot(page, report)
        case reports.ObjectReport():
            _object(page, report)
        case reports.Verified():
            _verified(page, report)
        case reports.DifferenceReport():
            _differences(page, report)
        case reports.Collected():
            _collected(page, report)
        case reports.Converted():
            what = f"{_count(report.tensors, 'tensor')}, {human_bytes(report.nbytes)}"
            page.line(f"{report.destination}: {report.kind} → {report.into}, {what}")


class _Console(Console):
    """One that leaves it to the command how it ends when nobody reads its output."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class _Page:
    """Standard output. Nothing is wrapped or cut, so that what one copies from it is whole."""

    def __init__(self) -> None:
        plain = bool(os.environ.get("NO_COLOR"))
        self._console = _Console(
            highlight=False, markup=False, emoji=False, color_system=None if plain else "auto"
        )

    def line(self, text: str | Text = "") -> None:
        shown = Text(_printable(text)) if isinstance(text, str) else text
        self._console.print(shown, soft_wrap=True)

    def table(
        self, titles: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()
    ) -> None:
        lines = list(rows)
        made = Table.grid(padding=(0, 2, 0, 0))
        for i in range(len(titles or lines[0])):
            made.add_column(justify="right" if i in right else "left", no_wrap=True)
        if titles:
            made.add_row(*(Text(title, "dim") for title in titles))
        for row in lines:
            made.add_row(*(Text(_printable(cell)) for cell in row))
        options = self._console.options.update(width=_ANY_WIDTH)
        for line in self._console.render_lines(made, options, pad=False):
            text = Text.assemble(*((part.text, part.style or "") for part in line))
            text.rstrip()
            self._console.print(text, soft_wrap=True)


def _printable(text: str) -> str:
    """Escape what could move the cursor, or could not be seen."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _when(created: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(created))
    return f"{when} ({human_duration(max(time.time() - created, 0.0))} ago)"


def _shape(shape: tuple[int, ...] | None) -> str:
    return "–" if shape is None else "×".join(map(str, shape)) or "scalar"


def _list(page: _Page, report: reports.ListReport) -> None:
    if report.snapshots:
        page.table(
            ("SIZE", "OBJECTS", "RANKS", "CREATED", "SNAPSHOT"),
            (
                (
                    human_bytes(s.nbytes),
                    f"{s.objects:,}",
                    str(s.world_size),
                    "–" if s.error else _when(s.created),
                    f"{s.name}  {s.error}".rstrip(),
                )
                for s in report.snapshots
            ),
            right=(0, 1, 2),
        )
        page.line()
        page.line(Text(_count(len(report.snapshots), "snapshot"), "dim"))
        return
    page.table(
        ("SIZE", "TYPE", "SHAPE", "PIECES", "OBJECT"),
        (
            (human_bytes(o.nbytes), o.dtype or o.kind, _shape(o.shape), str(o.pieces), o.path)
            for o in report.objects
        ),
        right=(0, 3),
    )
    total = human_bytes(sum(o.nbytes for o in report.objects))
    page.line()
    page.line(Text(f"{_count(len(report.objects), 'object')}, {total}", "dim"))


def _snapshot(page: _Page, report: reports.SnapshotReport) -> None:
    page.line(Text(_printable(report.path), "bold"))
    keys = ", ".join(f"{key} ({count:,})" for key, count in report.keys.items())
    rows = [
        ("take", report.take),
        ("created", _when(report.created)),
        ("of", "a store" if report.store else _count(report.world_size, "rank")),
        ("objects", f"{report.objects:,}, {human_bytes(report.nbytes)}"),
        ("keys", keys or "none"),
        ("files", f"{report.files:,}, {human_bytes(report.file_bytes)}"),
    ]
    if report.referred:
        names = ", ".join(report.referred)
        rows.append(("refers to", f"{human_bytes(report.referred_bytes)} in {names}"))
        if not report.weight_maps:
            how = "`torchstore snapshot convert --to safetensors` makes such a folder"
            rows.append(("from_pretrained", f"does not read it, because of that; {how}"))
    if report.leavings:
        left = _count(len(report.leavings), "file")
        rows.append(("left behind", f"{left}, which `torchstore snapshot gc` looks at"))
    page.table((), rows)


def _object(page: _Page, report: reports.ObjectReport) -> None:
    page.line(Text(_printable(report.path), "bold"))
    page.table(
        (),
        [
            ("type", f"{report.dtype} tensor" if report.dtype else report.kind),
            ("shape", _shape(report.shape)),
            ("size", f"{human_bytes(report.nbytes)} ({report.nbytes:,} bytes)"),
        ],
    )
    page.line()
    page.table(
        ("OFFSET", "SHAPE", "BYTES", "AT", "HASH", "FILE"),
        (
            (
                ",".join(map(str, p.offset)) or "–",
                _shape(p.shape),
                f"{p.nbytes:,}",
                f"{p.start:,}",
                p.digest,
                p.file,
            )
            for p in report.pieces
        ),
        right=(2, 3),
    )


def _verified(page: _Page, report: reports.Verified) -> None:
    for damage in report.damaged:
        page.line(Text.assemble((_printable(damage.path), "red"), f"  {damage.message}"))
    read = f"{human_bytes(report.nbytes)} in {human_duration(report.seconds)}"
    if report.ok:
        page.line(Text.assemble(("✓ ", "green"), f"whole: {read}"))
    else:
        files = sum(damage.path == damage.file for damage in report.damaged)
        objects = len(report.damaged) - files
        parts = [(objects, "object"), (files, "file")]
        count = ", ".join(_count(number, what) for number, what in parts if number)
        page.line(Text.assemble(("✗ ", "red"), f"damaged: {count}; {read}"))


def _differences(page: _Page, report: reports.DifferenceReport) -> None:
    marks = {"added": "+", "removed": "-"}
    rows = [
        (
            marks.get(d.change, "~"),
            d.path,
            d.change,
            d.before if d.before == d.after else " → ".join(filter(None, (d.before, d.after))),
        )
        for d in report.differences
    ]
    if rows:
        page.table((), rows)
    page.line(Text(f"{report.same:,} the same, {len(report.differences):,} not", "dim"))


def _collected(page: _Page, report: reports.Collected) -> None:
    for name in (*report.dropped, *report.files):
        page.line(name)
    for name, why in report.unreadable.items():
        page.line(Text.assemble((_printable(name), "red"), f"  {why}"))
    for name, why in report.held.items():
        page.line(Text.assemble((_printable(name), "yellow"), f"  stays: {why}"))
    for name in report.mended:
        page.line(f"{name}  {'would be ' if report.dry_run else ''}mended")
    verb = "would be removed" if report.dry_run else "removed"
    running = f"; {_count(len(report.running), 'take')} running" if report.running else ""
    page.line(
        Text(
            f"{_count(len(report.dropped), 'snapshot')} and {_count(len(report.files), 'file')} "
            f"{verb}, {human_bytes(report.nbytes)}{running}",
            "dim",
        )
    )
