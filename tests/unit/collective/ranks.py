"""Processes that put to a controller, for tests of what becomes of it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from msgspec import structs
from tests.unit.server.test_controller import HERE, facts, volumes

from torchstore_core.contracts.strategy import Strategy
from torchstore_core.server.controller import Controller
from torchstore_core.values import ObjectMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m

__all__ = ["Rank", "a_store", "content", "newest", "numbers", "obj", "pending", "piece", "ranks"]
__all__ += ["rows", "tensor", "tied", "used"]

CAPACITY = 1 << 16


@contextmanager
def a_store(capacity: int = CAPACITY) -> Iterator[Controller]:
    """A controller whose memory is all free again at the end, when everybody is gone."""
    with volumes(capacity) as records:
        controller = Controller(records, Strategy(), prefault=False)
        yield controller
        for session in list(controller.sessions.values()):
            controller.close_session(session)
        controller.delete([*controller.catalog.newest, *controller.catalog.histories], strict=False)
        (volume,) = records
        assert (volume.used, volume.inline, volume.leased, volume.unfinished) == (0,) * 4


def used(controller: Controller) -> int:
    return controller.volumes[0].used


# ---- what is put --------------------------------------------------------------------------


def tensor(name: str, size: int = 640) -> m.PutItem:
    """A whole tensor of bytes."""
    return m.PutItem(name, TensorMeta("uint8", (size,)), size)


def piece(
    name: str,
    start: int,
    stop: int,
    size: int,
    mesh: tuple[int, ...] = (),
    at: tuple[int, ...] = (),
) -> m.PutItem:
    """The elements from ``start`` to ``stop`` of a tensor of bytes."""
    part = TensorSlice((start,), (stop - start,), (size,), mesh, at)
    data = b"" if start == stop else None
    return m.PutItem(name, TensorMeta("uint8", (size,)), stop - start, data, part)


def obj(name: str, data: bytes = b"1") -> m.PutItem:
    """Something that is no tensor, inline."""
    return m.PutItem(name, ObjectMeta("x"), len(data), data)


def tied(name: str, index: int) -> m.PutItem:
    """The same as an earlier item."""
    return m.PutItem(name, ObjectMeta("x"), 0, b"", same_as=index)


class Rank:
    """One process: one of ``participants`` that put the state dict ``key``; None: it puts keys."""

    _numbers = itertools.count(1)

    def __init__(
        self,
        controller: Controller,
        who: str = "",
        participants: int | None = None,
        key: str = "k",
        rank: int | None = None,
    ) -> None:
        self.controller = controller
        self.who = who
        self.participants = participants
        self.key = key
        self.rank = rank
        whose = structs.replace(facts(next(self._numbers)), rank=rank)
        self.session = controller.open_session(whose, HERE)
        self.grants: list[m.Grant | None] = []

    def begin(
        self,
        *items: m.PutItem,
        version: int = 0,
        partial: bool = False,
        keep: int = 1,
        fill: int = 0,
        participants: int | None = None,
        rewind: bool = False,
    ) -> int:
        """Put without a commit; the put's id. Granted memory is filled with ``fill``. If all of it
        was inline, it is committed: then the id is minus the version.
        """
        count = participants or self.participants
        group = None
        if count is not None:
            group = m.Publication(self.key, self.who, count, partial, keep)
        txn = next(self._numbers)
        kind = m.Rewind if rewind else m.Put
        versions, grants = self.controller.put(
            self.session, kind(1, txn, list(items), version, group)
        )
        self.grants = grants or []
        asked = [item for item in items if item.data is None and item.same_as < 0]
        for item, grant in zip(asked, self.grants, strict=grants is not None):
            if grant is not None:
                memory = self.controller.volumes[grant.volume].memory
                os.pwrite(memory.fd, bytes([fill]) * item.nbytes, grant.offset)
        return -versions[0] if grants is None else txn

    def commit(self, txn: int) -> int:
        """The version."""
        return self.controller.commit(self.session, txn)[0]

    def put(self, *items: m.PutItem, **how: Any) -> int:
        """Put all of it; the version."""
        txn = self.begin(*items, **how)
        return -txn if txn < 0 else self.commit(txn)

    def abort(self, *txns: int) -> None:
        self.controller.abort(self.session, txns)

    def die(self) -> None:
        self.controller.close_session(self.session)

    def again(self) -> Rank:
        """The next process that is this participant."""
        return Rank(self.controller, self.who, self.participants, self.key, self.rank)


# ---- what can be read ---------------------------------------------------------------------


def content(controller: Controller, key: str = "k", version: int = 0) -> Any:
    """The bytes of a value or tensor; of a state dict those of every entry, by name."""
    session = controller.open_session(facts(), HERE)
    try:
        wants = [m.Want(key, version)]
        ((entry,), _) = controller.locate(session, m.Locate(1, 1, wants, 1 << 62))
        if entry.data is None and entry.parts is None:
            reply = controller.fetch(session, m.Fetch(1, 1, key, version, None, 1 << 62))
            assert reply.version == entry.version
            pairs = zip(reply.names, reply.entries, strict=True)
            return {name: _bytes(one) for name, one in pairs if one is not None}
        return _bytes(entry)
    finally:
        controller.close_session(session)


def _bytes(entry: m.Entry) -> bytes:
    if entry.parts is None:
        assert entry.data is not None
        return entry.data
    made = bytearray(entry.nbytes)
    for part in entry.parts:
        assert part.data is not None
        made[part.offset[0] : part.offset[0] + part.shape[0]] = part.data
    return bytes(made)


def newest(controller: Controller, key: str = "k") -> int:
    """The newest version; 0 if there is none."""
    return controller.catalog.newest_version(key)


# ---- state dicts of ranks ------------------------------------------------------------------


def ranks(store: Controller, count: int = 2) -> list[Rank]:
    """All participants of a state dict."""
    return [Rank(store, str(who), count) for who in range(count)]


def rows(rank: Rank, fill: int, **how: int) -> int:
    """Put a rank's half of a tensor of 200 bytes, an entry of both, and one of its own."""
    half = 100 * int(rank.who)
    items = piece("w", half, half + 100, 200), tensor("all", 64), obj(f"own{rank.who}")
    return rank.put(*items, fill=fill, **how)


def numbers(store: Controller, key: str = "k", version: int = 0) -> set[int]:
    """The fills that a state dict, or a tensor, is made of."""
    got = content(store, key, version)
    if isinstance(got, bytes):
        return set(got)
    return {n for name, data in got.items() if not name.startswith("own") for n in data}


def pending(store: Controller, key: str = "k") -> list[tuple[int, list[str], list[str]]]:
    """The versions on their way, who is done with them, and who writes."""
    return [(p.version, p.committed, p.writing) for p in store.catalog.pending(key)]
