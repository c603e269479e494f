"""Lines and tables for people, on rich: aligned, never cut, coloured on a terminal only.

A line that is too long is left to the terminal, so that what one copies from it is whole; only the
last column of a table that is prose is wrapped, under itself. Into a pipe nothing is wrapped.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

__all__ = ["Screen", "bar", "printable"]

_GAP = 2
_LEAST_PROSE = 24

Cell = str | Text


def printable(text: str) -> str:
    r"""``text`` with everything that could move the cursor, or could not be seen, escaped.

    >>> print(printable("a\nb\x1b[31m é"))
    a\nb\x1b[31m é
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def bar(fraction: float, width: int = 24) -> Text:
    """How full something is."""
    full = max(0, min(width, round(fraction * width)))
    if fraction > 0:
        full = max(full, 1)
    colour = "red" if fraction > 0.95 else "yellow" if fraction > 0.8 else "green"
    return Text.assemble(("█" * full, colour), ("░" * (width - full), "dim"))


class Screen:
    """Standard output (or standard error)."""

    def __init__(self, *, stderr: bool = False) -> None:
        self.console = Console(stderr=stderr, highlight=False, markup=False, emoji=False)
        wraps = self.console.is_terminal or "COLUMNS" in os.environ
        self._width = self.console.width if wraps else None

    def line(self, *parts: Cell | tuple[str, str]) -> None:
        """One line of plain strings, styled Texts and ``(text, style)`` pairs."""
        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def heading(self, title: str, rest: str = "") -> None:
        """A blank line and the title of a section."""
        self.line()
        self.line((title, "bold"), (f"  {rest}" if rest else "", "dim"))

    def table(
        self,
        titles: Sequence[str],
        rows: Iterable[Sequence[Cell]],
        *,
        right: Sequence[int] = (),
        prose: bool = False,
        indent: int = 0,
    ) -> None:
        """Aligned columns.

        Args:
            titles: one for each column; none at all: no head.
            rows: cells.
            right: columns to align at the right.
            prose: wrap the last column under itself.
            indent: blanks before each line.
        """
        body = [[c if isinstance(c, Text) else Text(printable(c)) for c in row] for row in rows]
        head = [[Text(title, "dim") for title in titles]] if titles else []
        lines = head + body
        if not lines:
            return
        widths = [max(cell_len(row[i].plain) for row in lines) for i in range(len(lines[0]))]
        for row in lines:
            line = Text(" " * indent)
            for i, cell in enumerate(row[:-1]):
                blank = " " * (widths[i] - cell_len(cell.plain))
                line.append_text(Text(blank) + cell if i in right else cell + Text(blank))
                line.append(" " * _GAP)
            last = row[-1]
            if len(row) - 1 in right:
                last = Text(" " * (widths[-1] - cell_len(last.plain))) + last
            self._finish(line, last, prose)

    def _finish(self, line: Text, last: Text, prose: bool) -> None:
        start = cell_len(line.plain)
        if prose and self._width is not None:
            pieces = [*last.wrap(self.console, max(self._width - start, _LEAST_PROSE))]
        else:
            pieces = [last]
        for at, piece in enumerate(pieces):
            whole = (line if at == 0 else Text(" " * start)) + piece
            whole.rstrip()
            self.console.print(whole, soft_wrap=True)
