"""Tables and listings for people: nothing of a cell is lost, whatever the width."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest
from rich.text import Text

from torchstore_cli.screen import Screen

Draw = Callable[[Screen], None]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Draws on a screen of some width, or into a pipe; the lines."""

    def draw(what: Draw, width: int | None = None) -> list[str]:
        stream = io.StringIO() if width is None else Terminal()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("NO_COLOR", "1")
        if width is not None:
            monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setattr(sys, "stdout", stream)
        what(Screen())
        monkeypatch.undo()
        return stream.getvalue().splitlines()

    return draw


def test_prose_is_wrapped_under_itself_and_long_words_are_folded(
    drawn: Callable[..., list[str]],
) -> None:
    words, address = "why it is so " * 5, "unix:/" + "x" * 80

    def table(screen: Screen) -> None:
        rows = [("one", words.strip()), ("日本", address), ("a\tb", Text("short"))]
        screen.table(("NAME", "WHY"), rows, prose=True, indent=2)

    for width in (40, 60):
        lines = drawn(table, width)
        assert lines[0] == "  NAME  WHY"
        start = lines[0].index("WHY")
        assert all(len(line) <= width and line == line.rstrip() for line in lines)
        assert lines[-1] == r"  a\tb  short"
        at = next(i for i, line in enumerate(lines) if "日本" in line)
        assert all(line[:start].strip() in ("one", "") for line in lines[1:at])
        assert " ".join(line[start:] for line in lines[1:at]) == words.strip()
        # Two cells wide each, so the line has two characters fewer.
        folded = lines[at][start - 2 :] + "".join(line[start:] for line in lines[at + 1 : -1])
        assert folded == address
    assert drawn(table)[1:3] == [f"  one   {words.strip()}", f"  日本  {address}"]


def test_a_table_that_is_no_prose_is_left_to_the_terminal(
    drawn: Callable[..., list[str]],
) -> None:
    value = "export TORCHSTORE_ADDRESS=" + "x" * 80
    lines = drawn(lambda screen: screen.table((), [("shell", value), ("py", "y")]), 40)
    assert lines == [f"shell  {value}", "py     y"]


def test_columns_at_the_right_end_with_their_titles(drawn: Callable[..., list[str]]) -> None:
    rows = [("1", "a"), ("1000", "日本"), ("20", "c")]
    lines = drawn(lambda screen: screen.table(("N", "KEY"), rows, right=(0,)))
    assert lines == ["   N  KEY", "   1  a", "1000  日本", "  20  c"]
    assert drawn(lambda screen: screen.listing(("N", "KEY"), rows, right=(0,), folds=())) == lines


def test_a_listing_is_folded_only_on_a_terminal_that_is_too_narrow(
    drawn: Callable[..., list[str]],
) -> None:
    key = "k" * 50
    rows = [("1", "日本語日本語", key), ("20", "b", "x")]

    def listing(screen: Screen) -> None:
        screen.listing(("N", "TYPE", "KEY"), rows, right=(0,), folds=(1,))

    whole = [" N  TYPE          KEY", f" 1  日本語日本語  {key}", "20  b             x"]
    assert drawn(listing) == drawn(listing, 68) == whole
    assert drawn(listing, 60)[2:] == [key, "   1  日本語日本語", "x", "  20  b"]
    assert drawn(listing, 13)[2:4] == [key, "   1  日本語…"]


def test_progress_is_for_terminals(drawn: Callable[..., list[str]]) -> None:
    def progress(screen: Screen) -> None:
        with screen.progress("first") as step:
            step("second")

    assert drawn(progress) == []
    assert any("second" in line for line in drawn(progress, 60))
