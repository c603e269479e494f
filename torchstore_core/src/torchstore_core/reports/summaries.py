"""What the store tells of itself and of a key, in a few lines for people. Torch-free."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Protocol

from torchstore_core.reports.units import human_bytes, human_duration

if TYPE_CHECKING:
    from torchstore_core.wire import messages as m

__all__ = ["found_text", "kind_text", "pending_text", "pretty", "shape_text", "status_text"]

_MOST = 5


class Described(Protocol):
    """A value of some kind: see ``messages.Described``."""

    @property
    def dtype(self) -> str | None: ...
    @property
    def codec(self) -> str | None: ...
    @property
    def entries(self) -> int | None: ...


class Printer(Protocol):
    """Of IPython, as far as it is used here."""

    def text(self, text: str, /) -> object: ...


def status_text(status: m.StatusReport) -> str:
    """A store: memory, keys, volumes, and what is not as it should be."""
    living = [v for v in status.volumes if not v.lost]
    lines = [
        f"store {status.store_name!r}, up {human_duration(status.uptime_s)}, "
        f"controller pid {status.controller_pid}, strategy {status.strategy}",
        f"{_count(status.keys, 'key')}, {_count(len(status.sessions), 'session')}, "
        f"{sum(status.operations.values()):,} operations so far "
        f"({status.operations_per_s:,.1f}/s)",
    ]
    lines += [
        f"volume {v.id}: {human_bytes(v.used_bytes)} of {human_bytes(v.capacity_bytes)} used, "
        f"{human_bytes(v.leased_bytes)} leased, {human_bytes(v.unfinished_bytes)} being written"
        for v in living[:_MOST]
    ]
    if len(living) > _MOST:
        lines.append(f"and {_count(len(living) - _MOST, 'volume')} more")
    lines += [f"volume {v.id} is lost: {v.lost}" for v in status.volumes if v.lost]
    if status.pending_versions:
        lines.append(
            f"{_count(status.pending_versions, 'unfinished version')}, "
            f"{human_bytes(status.pending_bytes)}"
        )
        lines += [
            f"  version {p.version} of {p.key!r}: {pending_text(p)}" for p in status.pending[:_MOST]
        ]
    lines += [f"plug-in {name}: {error}" for name, error in status.plugin_errors.items()]
    return "\n".join(lines)


def found_text(found: m.Found) -> str:
    """A key: what it is, where it lies, who put it."""
    shape = "" if found.shape is None else f" {shape_text(found.shape)}"
    creator = found.creator
    rank = "" if creator.rank is None else f", rank {creator.rank}"
    age = human_duration(time.time() - found.created)
    lines = [
        f"{found.key!r} version {found.version}: {kind_text(found)}{shape}, "
        f"{human_bytes(found.nbytes)}",
        f"  in {'the controller' if found.inline else found.volume or 'no volume'}, "
        f"{_count(found.leases, 'lease')}",
        f"  put {age} ago by pid {creator.pid} on {creator.hostname}{rank}",
    ]
    if len(found.versions) > 1:
        lines.append(f"  kept, too: version {', '.join(map(str, found.versions[:-1]))}")
    if found.lost:
        lines.append(f"  lost: {found.lost}")
    lines += [f"  version {p.version}: {pending_text(p)}" for p in found.pending]
    return "\n".join(lines)


def pending_text(p: m.Pending) -> str:
    """What a version that is not whole yet waits for."""
    done = f"{len(p.committed)}" + (f" of {p.participants}" if p.participants else "")
    text = f"not whole yet: done {done}, writing {len(p.writing)}"
    if p.missing_participants:
        more = len(p.missing_participants) - _MOST
        who = ", ".join(p.missing_participants[:_MOST]) + (f" and {more} more" * (more > 0))
        text += f", nothing from {who}"
    if p.missing:
        name, offset, shape = p.missing[0]
        text += f", boxes missing {len(p.missing)} (the first: {name}{list(offset)}+{list(shape)})"
    return text


def kind_text(found: Described) -> str:
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


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' if number != 1 else ''}"
