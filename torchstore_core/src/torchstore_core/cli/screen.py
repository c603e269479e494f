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
        lines: list[list[Cell]] = [[Text(title, "dim") for title in titles]] if titles else []
        lines += [[c if isinstance(c, Text) else printable(c) for c in row] for row in rows]
        if not lines:
            return
        sizes = [[cell_len(str(cell)) for cell in line] for line in lines]
        widths = [max(column) for column in zip(*sizes, strict=True)]
        gap = " " * _GAP
        start = indent + sum(widths[:-1]) + _GAP * (len(widths) - 1)
        out: list[list[Cell]] = []
        for cells, taken in zip(lines, sizes, strict=True):
            parts: list[Cell] = [" " * indent]
            for i, cell in enumerate(cells):
                blank = " " * (widths[i] - taken[i])
                parts += (blank, cell, gap) if i in right else (cell, blank, gap)
            if prose and self._width is not None and start + taken[-1] > self._width:
                first, *others = self._wrapped(cells[-1], max(self._width - start, _LEAST_PROSE))
                out += [[*parts[:-3], first], *([" " * start, more] for more in others)]
            else:
                out.append(parts)
        self._print(out)

    def _wrapped(self, cell: Cell, width: int) -> list[Text]:
        text = cell if isinstance(cell, Text) else Text(cell)
        return [*text.wrap(self.console, width)]

    def _print(self, lines: Iterable[Sequence[Cell]]) -> None:
        if self.console.color_system is None:  # many times faster, for many keys into a pipe
            plain = ("".join(map(str, line)).rstrip() + "\n" for line in lines)
            self.console.file.write("".join(plain))
            return
        styled = [Text.assemble(*line) for line in lines]
        for text in styled:
            text.rstrip()
        self.console.print(Text("\n").join(styled), soft_wrap=True)
