"""Lines and tables for people, on rich: aligned, and coloured on a terminal only. (NO_COLOR: not
even there; FORCE_COLOR: elsewhere, too.)

A line that is too long is left to the terminal, so that what one copies from it is whole; but the
last column of a table that is prose is wrapped, under itself, and a table of many columns may be
folded. Into a pipe nothing is wrapped or folded.
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
_LEAST_CELL = 4

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
        plain = bool(os.environ.get("NO_COLOR"))  # neither bold nor dim: nothing but the text
        self.console = Console(
            stderr=stderr,
            highlight=False,
            markup=False,
            emoji=False,
            color_system=None if plain else "auto",
        )
        wraps = self.console.file.isatty() or "COLUMNS" in os.environ
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
        folds: Sequence[int] = (),
        indent: int = 0,
    ) -> None:
        """Aligned columns.

        Args:
            titles: one for each column; none at all: no head.
            rows: cells.
            right: columns to align at the right.
            prose: wrap the last column under itself.
            folds: columns that may be shortened. If the lines are too long, the last column goes on
                a line of its own, whole, above the others; if they still are, these get shorter.
            indent: blanks before each line.
        """
        lines: list[list[Cell]] = [[Text(title, "dim") for title in titles]] if titles else []
        lines += [[c if isinstance(c, Text) else printable(c) for c in row] for row in rows]
        if not lines:
            return
        sizes = [[cell_len(str(cell)) for cell in line] for line in lines]
        widths = [max(column) for column in zip(*sizes, strict=True)]
        if folds and self._width is not None and indent + _line(widths) > self._width:
            self._folded(lines, widths, right, folds, indent)
            return
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

    def _folded(
        self,
        lines: Sequence[Sequence[Cell]],
        widths: list[int],
        right: Sequence[int],
        folds: Sequence[int],
        indent: int,
    ) -> None:
        widths = widths[:-1]
        room = (self._width or 0) - indent - _GAP
        while _line(widths) > room:
            widest = max(folds, key=lambda i: widths[i])
            if widths[widest] <= _LEAST_CELL:
                break  # not even so
            widths[widest] -= 1
        gap = " " * _GAP
        out: list[list[Cell]] = []
        for *cells, last in lines:
            parts: list[Cell] = []
            for i, cell in enumerate(cells):
                text = cell.copy() if isinstance(cell, Text) else Text(cell)
                text.truncate(widths[i], overflow="ellipsis")
                blank = " " * (widths[i] - text.cell_len)
                parts += (blank, text, gap) if i in right else (text, blank, gap)
            out += [[" " * indent, last], [" " * (indent + _GAP), *parts]]
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


def _line(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)
