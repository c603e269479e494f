"""Short texts in which reports describe values, versions and numbers to people. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torchstore_core.reports.stat import Pending

#: At most this many items of a kind are shown, followed by the number of the others.
MOST_SHOWN = 5


class HasKind(Protocol):
    """A value of some kind: ``Described`` of :mod:`.stat`, or a class with the same properties."""

    @property
    def dtype(self) -> str | None: ...
    @property
    def codec(self) -> str | None: ...
    @property
    def entries(self) -> int | None: ...


class Printer(Protocol):
    """The part of IPython's printer that is used here."""

    def text(self, text: str, /) -> object: ...


def pending_text(p: Pending) -> str:
    """Describe what an unfinished version waits for."""
    done = f"{len(p.committed)}" + (f" of {p.participants}" if p.participants else "")
    text = f"not whole yet: {done} done, {len(p.writing)} writing"
    if p.missing_participants:
        more = len(p.missing_participants) - MOST_SHOWN
        names = ", ".join(p.missing_participants[:MOST_SHOWN]) + (f" and {more} more" * (more > 0))
        text += f", nothing from participant{'s' * (len(p.missing_participants) > 1)} {names}"
    if p.missing:
        name, offset, shape = p.missing[0]
        text += f", boxes missing {len(p.missing)} (the first: {name}{list(offset)}+{list(shape)})"
    return text


def kind_text(found: HasKind) -> str:
    """Return the kind of a value as text."""
    if found.entries is not None:
        return f"state dict ({found.entries:,})"
    return found.dtype if found.dtype is not None else f"object ({found.codec})"


def shape_text(shape: tuple[int, ...]) -> str:
    """Return a shape as text.

    >>> shape_text((256, 512)), shape_text(())
    ('256×512', 'scalar')
    """
    return "×".join(map(str, shape)) or "scalar"


def pretty(what: object, printer: Printer, cycle: bool) -> None:
    """Print ``str(what)``; serves as the ``_repr_pretty_`` that a notebook uses for a result."""
    printer.text(str(what))


def count_text(number: int, what: str) -> str:
    """Return a number with its noun, in the plural if necessary.

    >>> count_text(1, "key"), count_text(2000, "key")
    ('1 key', '2,000 keys')
    """
    return f"{number:,} {what}{'s' if number != 1 else ''}"
