"""Replies that are too large for one frame: split into pages by the server, joined by the client.

A page is a message of the same type and id as the reply, with some of its items. ``continued`` is
set in all pages but the last. All pages show the same state of the store: the reply is built at
once, and only its encoding is deferred, so that a long reply does not delay other clients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from torchstore_core.errors import ProtocolError
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode

#: A reply of up to this many bytes is one frame. 18,000 entries of a state dict take about 2 MB.
MAX_PAGE = 8 << 20
# The pages of a longer reply have about this many bytes; the server encodes one in a millisecond.
_PAGE_NBYTES = 1 << 20
# More items than this are never encoded together, not even to find out how large they are.
_MAX_ITEMS = 1 << 16
# With this few items, encoding them is faster than estimating their size.
_FEW_ITEMS = 64
# The replies that can be paged, and the fields that are split.
_FIELDS: dict[type[m.Message], tuple[str, ...]] = {
    m.KeyList: ("keys",),
    m.Located: ("entries",),
    m.Fetched: ("entries", "names", "paths", "same_as"),
    m.Granted: ("grants",),
    m.RefsReply: ("refs",),
}


def first_frame(message: m.Message) -> bytearray | None:
    """Return a message as one frame; None if it needs several, see :func:`frames`."""
    fields = _FIELDS.get(type(message))
    if (
        fields is not None
        and len(getattr(message, fields[0])) > _FEW_ITEMS
        and _pages_needed(message, fields) > 1
    ):
        return None
    frame = encode(message)
    return frame if len(frame) <= MAX_PAGE else None


def frames(message: m.Message) -> Iterator[bytearray]:
    """Yield the frames of a message of any size. Each is encoded when the caller takes it.

    If a message exceeds ``messages.MAX_FRAME`` and cannot be split, it is replaced by a
    ``Failure``, which affects only its own request.
    """
    fields = _FIELDS.get(type(message), ())
    pending = [message]
    while pending:
        page = pending.pop()
        if (needed := _pages_needed(page, fields)) > 1:
            pending += _split(page, fields, needed)
            continue
        if fields:
            page = msgspec.structs.replace(page, continued=bool(pending))
        frame = encode(page)
        if (
            len(frame) > MAX_PAGE
            and len(pages := _split(page, fields, -(-len(frame) // _PAGE_NBYTES))) > 1
        ):
            pending += pages
        elif len(frame) > m.MAX_FRAME:
            yield encode(_refusal(page, len(frame)))
            return
        else:
            yield frame


def joined(pages: Sequence[m.Message]) -> m.Message:
    """Join the pages of a reply, which are given in order.

    Raises:
        ProtocolError: the pages belong to different replies.
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
    """Estimate, before anything is encoded, into how many pages to split a message.

    Returns 1 if the message may be small enough, or cannot be split.
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
    if items <= _MAX_ITEMS and nbytes <= MAX_PAGE:
        return 1
    if count <= 1 and items <= count + 1:
        return 1
    return max(-(-items // _MAX_ITEMS), -(-nbytes // _PAGE_NBYTES), 2)


def _split(message: m.Message, fields: Sequence[str], parts: int) -> list[m.Message]:
    """Split a page into about ``parts`` pages, in reverse order; into one if that is impossible."""
    items = {name: getattr(message, name) for name in fields}
    count = sum(map(len, items.values()))
    if count == 1 and items.get("entries"):
        return _split_entry(message, parts)
    if count <= 1:
        return [message]
    step = -(-count // max(parts, 2))
    empty = {name: type(some)() for name, some in items.items()}
    columns = getattr(message, "columns", None)
    if columns is not None:  # only the last page has them
        message = msgspec.structs.replace(message, columns=None)
    pages: list[m.Message] = []
    for name, some in items.items():
        listed = list(some.items()) if isinstance(some, dict) else some
        for start in range(0, len(listed), step):
            run = type(some)(listed[start : start + step])
            pages.append(msgspec.structs.replace(message, **(empty | {name: run})))
    if columns is not None:
        pages[-1] = msgspec.structs.replace(pages[-1], columns=columns)
    pages.reverse()
    return pages


def _split_entry(message: m.Message, parts: int) -> list[m.Message]:
    """Split a page with a single entry, which has very many shards or large inline data."""
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
    if isinstance(message, m.Failure):  # its details list too many keys of a batch
        return m.Failure(request_id, message.code, message.message[:1000], None)
    text = (
        f"the answer to this request has {nbytes} bytes, over the limit of {m.MAX_FRAME}; "
        "ask for less at once"
    )
    return m.Failure(request_id, ProtocolError.code, text)
