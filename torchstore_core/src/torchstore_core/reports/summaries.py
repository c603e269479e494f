"""The words in which reports describe values, versions and numbers to people. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchstore_core.reports.stat import Pending

__all__ = ["MOST_SHOWN", "count_text", "kind_text", "pending_text", "pretty", "shape_text"]

#: So many of a kind are shown, and how many more there are.
MOST_SHOWN = 5


class HasKind(Protocol):
    """A value of some kind: ``Described`` of :mod:`.stat`, or what has the same names."""

    @property
    def dtype(self) -> str | None: ...
    @property
    def codec(self) -> str | None: ...
    @property
    def entries(self) -> int | None: ...


class Printer(Protocol):
    """Of IPython, as far as it is used here."""

    def text(self, text: str, /) -> object: ...


def pending_text(p: Pending) -> str:
    """What a version that is not whole yet waits for."""
    done = f"{len(p.committed)}" + (f" of {p.participants}" if p.participants else "")
    text = f"not whole yet: done {done}, writing {len(p.writing)}"
    if p.missing_participants:
        more = len(p.missing_participants) - MOST_SHOWN
        names = ", ".join(p.missing_participants[:MOST_SHOWN]) + (f" and {more} more" * (more > 0))
        text += f", nothing from {names}"
    if p.missing:
        name, offset, shape = p.missing[0]
        text += f", boxes missing {len(p.missing)} (the first: {name}{list(offset)}+{list(shape)})"
    return text


def kind_text(found: HasKind) -> str:
    """What kind of value it is."""
    if found.entries is not None:
        return f"state dict ({found.entries:,})"
    return found.dtype if found.dtype is not None else f"object ({found.codec})"


def shape_text(shape: tuple[int, ...]) -> str:
    """A shape.

    >>> shape_text((256, 512)), shape_text(())
    ('256×512', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"


def pretty(what: object, printer: Printer, cycle: bool) -> None:
    """``_repr_pretty_`` of what has a text for people: what a notebook shows of its last line."""
    printer.text(str(what))


def count_text(number: int, what: str) -> str:
    """How many of something.

    >>> count_text(1, "key"), count_text(2000, "key")
    ('1 key', '2,000 keys')
    """
    return f"{number:,} {what}{'s' if number != 1 else ''}"
