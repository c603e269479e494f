"""Aligned lines and tables, printed with rich: coloured on a terminal only (with NO_COLOR: nowhere;
with FORCE_COLOR: everywhere).

Lines that are too long are left to the terminal, so that text copied from them is complete. Only
the last column of a table of prose is wrapped within the column, and a listing of many columns may
be folded. Output to a pipe is neither wrapped nor folded.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

__all__ = ["Cell", "Screen", "bar", "printable"]

_GAP = 2
_LEAST_PROSE = 24
_LEAST_CELL = 4
_ANY_WIDTH = 1 << 20

Cell = str | Text


def printable(text: str) -> str:
    r"""Return ``text`` with everything escaped that is invisible or could move the cursor.

    >>> print(printable("a\nb\x1b[31m é"))
    a\nb\x1b[31m é
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def bar(fraction: float, width: int = 24) -> Text:
    """Return a bar that shows how full something is."""
    full = max(0, min(width, round(fraction * width)))
    if fraction > 0:
        full = max(full, 1)
    colour = "red" if fraction > 0.95 else "yellow" if fraction > 0.8 else "green"
    return Text.assemble(("█" * full, colour), ("░" * (width - full), "dim"))


class _Console(Console):
    """One that leaves it to the command how it ends when nobody reads its output."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


class Screen:
    """Prints to standard output, or to standard error."""

    def __init__(self, *, stderr: bool = False) -> None:
        plain = bool(os.environ.get("NO_COLOR"))  # neither bold nor dim, only the text
        self.console = _Console(
            stderr=stderr,
            highlight=False,
            markup=False,
            emoji=False,
            color_system=None if plain else "auto",
        )
        wraps = self.console.file.isatty() or "COLUMNS" in os.environ
        self._width = self.console.width if wraps else _ANY_WIDTH

    def line(self, *parts: Cell | tuple[str, str]) -> None:
        """Print one line of styled Texts, and of plain strings and ``(text, style)`` pairs, which
        are shown as by :func:`printable`.
        """
        made = [(part, "") if isinstance(part, str) else part for part in parts]
        shown = [p if isinstance(p, Text) else (printable(p[0]), p[1]) for p in made]
        self.console.print(Text.assemble(*shown), soft_wrap=True)

    def heading(self, title: str, rest: str = "") -> None:
        """Print a blank line and the title of a section."""
        self.line()
        self.line((title, "bold"), (f"  {rest}" if rest else "", "dim"))

    @contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show ``text`` on a terminal while the context lasts; the function replaces the text."""
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        hidden = not self.console.file.isatty()
        with Progress(*columns, console=self.console, transient=True, disable=hidden) as shown:
            task = shown.add_task(text)
            yield lambda text: shown.update(task, description=text)

    def table(
        self,
        titles: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        *,
        right: Sequence[int] = (),
        prose: bool = False,
        indent: int = 0,
    ) -> None:
        """Print aligned columns.

        Args:
            titles: one for each column; empty: no header.
            rows: the cells; those that are no Text are shown as by :func:`printable`.
            right: the columns to align at the right.
            prose: whether to wrap the last column within itself.
            indent: the number of blanks before each line.
        """
        lines = _lines(titles, rows)
        if not lines:
            return
        made = Table.grid(padding=(0, _GAP, 0, 0))
        *others, _ = _widths(lines)
        room = max(self._width - indent - sum(others) - _GAP * len(others), _LEAST_PROSE)
        for i in range(len(others) + 1):
            wrap = prose and i == len(others)
            made.add_column(
                justify="right" if i in right else "left",
                overflow="fold",
                no_wrap=not wrap,
                max_width=room if wrap else None,
            )
        for line in lines:
            made.add_row(*(Text.assemble(cell) for cell in line))  # so that blanks have no style
        options = self.console.options.update(width=_ANY_WIDTH)
        segments = self.console.render_lines(Padding(made, (0, 0, 0, indent)), options, pad=False)
        self._print([Text.assemble(*((s.text, s.style or "") for s in line)) for line in segments])

    def listing(
        self,
        titles: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        *,
        right: Sequence[int],
        folds: Sequence[int],
    ) -> None:
        """Print a table of possibly many thousand rows, whose last column is always shown in full.
        (With rich's tables, 18,000 rows take five seconds.)

        Args:
            titles, rows, right: as for :meth:`table`; only the last column is styled.
            folds: columns that may be shortened. If the lines are too long, the last column gets
                a line of its own, above the others; if they still are, these columns are shortened.
        """
        lines = _lines(titles, rows)
        *widths, last_width = _widths(lines)
        folded = bool(folds) and sum(widths) + _GAP * len(widths) + last_width > self._width
        while folded and sum(widths) + _GAP * len(widths) > self._width:
            widest = max(folds, key=lambda i: widths[i])
            if widths[widest] <= _LEAST_CELL:
                break  # they cannot get any shorter
            widths[widest] -= 1
        gap = " " * _GAP
        out: list[Text] = []
        for *cells, last in lines:
            sized = (_sized(str(c), widths[i], right=i in right) for i, c in enumerate(cells))
            text = (gap.join(sized), "" if out else "dim")
            out += (
                [Text.assemble(last), Text.assemble(gap, text)]
                if folded
                else [Text.assemble(text, gap, last)]
            )
        self._print(out)

    def _print(self, lines: Sequence[Text]) -> None:
        for line in lines:
            line.rstrip()
        whole = Text("\n").join(lines)
        if self.console.color_system is None:  # faster, for many keys that go into a pipe
            self.console.file.write(f"{whole}\n")
        else:
            self.console.print(whole, soft_wrap=True)


def _lines(titles: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[list[Cell]]:
    head: list[list[Cell]] = [[Text(title, "dim") for title in titles]] if titles else []
    return head + [[c if isinstance(c, Text) else printable(c) for c in row] for row in rows]


def _widths(lines: Sequence[Sequence[Cell]]) -> list[int]:
    sizes = [[cell_len(str(cell)) for cell in line] for line in lines]
    return [max(column) for column in zip(*sizes, strict=True)]


def _sized(text: str, width: int, *, right: bool) -> str:
    size = cell_len(text)
    if size > width:
        return set_cell_size(text, width - 1) + "…"
    blank = " " * (width - size)
    return blank + text if right else text + blank
