"""The entries of a reply."""

from __future__ import annotations

from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import spread


def entries_of(columns: m.EntryColumns) -> list[m.Entry]:
    """The entries of a reply in columns, one by one."""
    volume, segment = columns.volume, columns.segment
    rows = zip(columns.version_of(), *each_of(columns), columns.places(), strict=True)
    return [
        m.Entry(version, meta, nbytes, None, m.Grant(volume, segment, offset))
        for version, meta, nbytes, offset in rows
    ]


def each_of(columns: m.EntryColumns) -> tuple[list[TensorMeta], list[int]]:
    """What each of the values is, and its size in bytes."""
    of = columns.kind_of()
    metas = [kind.meta for kind in columns.kinds]
    return spread(metas, of), spread([kind.nbytes for kind in columns.kinds], of)
