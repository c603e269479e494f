"""Replies that are too large for one frame: cut into pages by the server, joined by the client.

A page is a message of the reply's own type and id that has some of its items and says
``continued``; the last one does not. All pages are of one moment: the reply is made at once, and
only its encoding is put off, so that a long one delays nobody else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torchstore_core.errors import ProtocolError
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode

__all__ = ["MAX_PAGE", "first_frame", "frames", "joined"]

#: A reply up to this size, in bytes, is one frame. 18,000 entries of a state dict have about 2 MB.
MAX_PAGE = 8 << 20
# Pages of a longer one have about this many bytes: a millisecond of the server's time.
_PAGE = 1 << 20
# So many items are never encoded together, not even to see how large they are.
_MANY = 1 << 16
# With so few items it is quicker to encode them than to weigh them.
_FEW = 64
# What comes in pages, and which of its fields are cut.
_FIELDS: dict[type[m.Message], tuple[str, ...]] = {
    m.KeyList: ("keys",),
    m.Located: ("entries",),
    m.Fetched: ("entries", "names", "paths", "same_as"),
    m.Granted: ("grants",),
}


def first_frame(message: m.Message) -> bytearray | None:
    """The one frame of a message; None if it takes several, see :func:`frames`."""
    fields = _FIELDS.get(type(message))
    if (
        fields is not None
        and len(getattr(message, fields[0])) > _FEW
        and _pages_needed(message, fields) > 1
    ):
        return None
    frame = encode(message)
    return frame if len(frame) <= MAX_PAGE else None


def frames(message: m.Message) -> Iterator[bytearray]:
    """The frames of a message of any size, encoded one by one as they are asked for.

    What cannot be cut and is over ``messages.MAX_FRAME`` becomes a ``Failure`` of that request
    alone.
    """
    fields = _FIELDS.get(type(message), ())
    todo = [message]
    while todo:
        page = todo.pop()
        if (needed := _pages_needed(page, fields)) > 1:
            todo += _cut(page, fields, needed)
            continue
        if fields:
            page = msgspec.structs.replace(page, continued=bool(todo))
        frame = encode(page)
        if len(frame) > MAX_PAGE and len(pages := _cut(page, fields, -(-len(frame) // _PAGE))) > 1:
            todo += pages
        elif len(frame) > m.MAX_FRAME:
            yield encode(_refusal(page, len(frame)))
            return
        else:
            yield frame


def joined(pages: Sequence[m.Message]) -> m.Message:
    """The reply of which these are the pages, in order.

    Raises:
        ProtocolError: they are pages of different replies.
    """
    kind = type(pages[-1])
    if kind not in _FIELDS or any(type(page) is not kind for page in pages):
        raise ProtocolError("the pages of a reply do not go together")
    whole: dict[str, Any] = {}
    for name in _FIELDS[kind]:
        empty = type(getattr(pages[-1], name))()
        for page in pages:
            items = getattr(page, name)
            if isinstance(empty, dict):
                empty.update(items)
            elif name == "entries" and items and empty and items[0] and items[0].resumed:
                last, first = empty[-1], items[0]
                empty[-1] = msgspec.structs.replace(last, parts=[*last.parts, *first.parts])
                empty += items[1:]
            else:
                empty += items
        whole[name] = empty
    return msgspec.structs.replace(pages[-1], **whole)


def _pages_needed(message: m.Message, fields: Sequence[str]) -> int:
    """Into how many pages to cut a message before any of it is encoded; 1: it may be small, or it
    cannot be cut.
    """
    count = items = sum([len(getattr(message, name)) for name in fields])
    nbytes = 0
    if "entries" in fields:
        for entry in message.entries:  # type: ignore[attr-defined]
            if entry is None:
                continue
            if entry.data is not None:
                nbytes += len(entry.data)
            elif entry.parts is not None:
                items += len(entry.parts)
                nbytes += sum([len(part.data) for part in entry.parts if part.data is not None])
    if items <= _MANY and nbytes <= MAX_PAGE:
        return 1
    if count <= 1 and items <= count + 1:
        return 1
    return max(-(-items // _MANY), -(-nbytes // _PAGE), 2)


def _cut(message: m.Message, fields: Sequence[str], parts: int) -> list[m.Message]:
    """About so many pages with the items of one, the first one last; one if it cannot be cut."""
    items = {name: getattr(message, name) for name in fields}
    count = sum(map(len, items.values()))
    if count == 1 and items.get("entries"):
        return _cut_entry(message, parts)
    if count <= 1:
        return [message]
    step = -(-count // max(parts, 2))
    empty = {name: type(some)() for name, some in items.items()}
    pages: list[m.Message] = []
    for name, some in items.items():
        listed = list(some.items()) if isinstance(some, dict) else some
        for start in range(0, len(listed), step):
            run = type(some)(listed[start : start + step])
            pages.append(msgspec.structs.replace(message, **(empty | {name: run})))
    pages.reverse()
    return pages


def _cut_entry(message: m.Message, parts: int) -> list[m.Message]:
    """One entry in very many shards, or in shards whose bytes come with it."""
    (entry,) = message.entries  # type: ignore[attr-defined]
    if entry is None or entry.parts is None or len(entry.parts) < 2:
        return [message]
    step = -(-len(entry.parts) // max(parts, 2))
    pages: list[m.Message] = []
    for start in range(0, len(entry.parts), step):
        some = msgspec.structs.replace(
            entry, parts=entry.parts[start : start + step], resumed=entry.resumed or start > 0
        )
        pages.append(msgspec.structs.replace(message, entries=[some]))
    pages.reverse()
    return pages


def _refusal(message: m.Message, nbytes: int) -> m.Failure:
    request_id: int = getattr(message, "id", 0)
    if isinstance(message, m.Failure):  # of a batch of very many keys: its details are too long
        return m.Failure(request_id, message.code, message.message[:1000], None)
    text = (
        f"the answer to this request has {nbytes} bytes, over the limit of {m.MAX_FRAME}; "
        "ask for less at once"
    )
    return m.Failure(request_id, ProtocolError.code, text)
