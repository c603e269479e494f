"""Long replies: what is cut into pages is the same when it is joined, and no page is too long."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.support import turn

from torchstore_core.errors import ProtocolError
from torchstore_core.server.serving.sending import Sender
from torchstore_core.values import TensorMeta
from torchstore_core.wire import batches, paging
from torchstore_core.wire import messages as m
from torchstore_core.wire.columns import kinds_of, pack
from torchstore_core.wire.framing import HEADER, decode_reply, encode

MAX_PAGE = 600
META = TensorMeta("uint8", (7, 5))
Int = st.integers(0, 1 << 40)
Text = st.text(max_size=30)
Grant = st.builds(m.Grant, Int, Int, Int)
Data = st.binary(max_size=200)
Part = st.builds(m.Part, st.just((0, 1)), st.just((2, 3)), Int, st.none() | Data, st.none() | Grant)
Entry = st.builds(
    m.Entry,
    Int,
    st.just(META),
    Int,
    st.none() | Data,
    st.none() | Grant,
    st.none() | st.lists(Part, max_size=12),
)
Reply = st.one_of(
    st.builds(m.KeyList, Int, st.lists(Text, max_size=60)),
    st.builds(m.Located, Int, st.lists(Entry, max_size=12), st.booleans()),
    st.builds(m.Granted, Int, st.lists(st.none() | Grant, max_size=60)),
    st.builds(
        m.Fetched,
        Int,
        Int,
        st.lists(st.none() | Entry, max_size=12),
        st.lists(Text, max_size=30),
        st.dictionaries(Int, st.binary(max_size=60), max_size=12),
        st.lists(st.tuples(Int, Int), max_size=12),
        st.booleans(),
    ),
)


#: A value of which there are more shards than fit on a page.
PARTS = [m.Part((0, at), (2, 3), 6, bytes([at]) * 90, None) for at in range(20)]
SHARDS = m.Entry(1, META, 35, None, None, PARTS)
COLUMNS = m.EntryColumns(*kinds_of([META], [35]), [1], 5, 0, pack([64]))


@pytest.fixture(scope="module", autouse=True)
def small_pages() -> Iterator[None]:
    """Limits so low that small replies are long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paging, "MAX_PAGE", MAX_PAGE)
        patch.setattr(paging, "_PAGE_NBYTES", MAX_PAGE // 3)
        patch.setattr(paging, "_MAX_ITEMS", 40)
        patch.setattr(paging, "_FEW_ITEMS", 2)
        yield


def decoded(frames: list[bytearray]) -> list[m.Reply]:
    return [decode_reply(bytes(frame[HEADER:])) for frame in frames]


@given(Reply)
def test_pages_are_the_reply_again(reply: m.Reply) -> None:
    whole = paging.first_frame(reply)
    pages = decoded([whole] if whole is not None else list(paging.frames(reply)))
    assert [page.continued for page in pages] == [True] * (len(pages) - 1) + [False]
    assert {page.id for page in pages} == {reply.id}
    assert (pages[0] if whole is not None else paging.joined(pages)) == reply


@pytest.mark.parametrize(
    "reply",
    [
        m.KeyList(1, ["k"] * 1000),
        m.Located(1, [m.Entry(1, META, 35, b"")] * 1000, False),
        m.Fetched(1, 1, [None] * 1000, [], {}, [], False),
        m.Granted(1, [m.Grant(0, 0, 0)] * 1000),
        m.Located(1, [SHARDS], True),
        m.Located(1, [m.Entry(1, META, 35, b""), SHARDS, SHARDS, m.Entry(1, META, 35, b"")], True),
        m.Fetched(1, 1, [SHARDS, None], ["w", "b"], {0: b"w"}, [(1, 0)], True),
        m.Fetched(1, 1, [], ["w"] * 1000, {}, [], True, columns=COLUMNS),
    ],
    ids=lambda reply: type(reply).__name__,
)
def test_every_reply_that_grows_with_a_request_is_cut(reply: m.Reply) -> None:
    assert paging.first_frame(reply) is None
    pages = decoded(list(paging.frames(reply)))
    assert len(pages) > 1
    assert paging.joined(pages) == reply


@given(Reply)
def test_a_page_is_small_unless_it_is_one_item(reply: m.Reply) -> None:
    for frame in paging.frames(reply):
        if len(frame) <= MAX_PAGE:
            continue
        (page,) = decoded([frame])
        items = [getattr(page, name) for name in structs.asdict(page)]
        lists = [some for some in items if isinstance(some, list | dict)]
        assert sum(map(len, lists)) == 1
        parts = getattr(page, "entries", [None])[0]
        assert parts is None or parts.parts is None or len(parts.parts) <= 1


def test_a_page_is_encoded_when_it_is_asked_for() -> None:
    """So that one costs the server a page's time, however long the reply is."""
    keys = [f"{i:04}" for i in range(4000)]
    pages = paging.frames(m.KeyList(7, [*keys[:-1], "\ud800"]))  # the last cannot be encoded
    first = next(pages)
    assert len(first) <= MAX_PAGE
    assert decoded([first])[0].keys == keys[: len(decoded([first])[0].keys)]
    with pytest.raises(UnicodeEncodeError):
        list(pages)


@pytest.mark.parametrize(
    "reply",
    [
        m.Committed(5, list(range(1000))),
        m.KeyList(5, ["k" * 1000]),
        m.Located(5, [m.Entry(1, META, 1000, bytes(1000))], False),
    ],
    ids=["not cut", "one key", "one entry"],
)
def test_what_cannot_be_cut_fails_alone(reply: m.Reply, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MAX_FRAME", 900)
    *_, last = decoded(list(paging.frames(reply)))
    assert isinstance(last, m.Failure)
    assert (last.id, last.code) == (5, ProtocolError.code)
    assert "over the limit of 900" in last.message


def test_an_error_with_endless_details_keeps_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "MAX_FRAME", 5000)
    missing = [f"key {i}" for i in range(1000)]
    failure = m.Failure(5, "key-not-found", "1000 keys " * 300, missing[0], {"missing": missing})
    (short,) = decoded(list(paging.frames(failure)))
    assert (short.id, short.code, short.details) == (5, "key-not-found", {})
    assert short.message.startswith("1000 keys ")


@pytest.mark.parametrize("pages", [[m.KeyList(1, []), m.Granted(1, [])], [m.Done(1), m.Done(1)]])
def test_pages_of_different_replies_are_refused(pages: list[m.Reply]) -> None:
    with pytest.raises(ProtocolError, match="do not go together"):
        paging.joined(pages)


@given(
    st.lists(Int, max_size=20),
    st.lists(st.tuples(Int, st.lists(Int, min_size=1, max_size=20)), max_size=8),
)
def test_what_is_given_back_fits_frames(
    whole: list[int], parts: list[tuple[int, list[int]]]
) -> None:
    held = [*((lease, None) for lease in whole), *parts]
    releases = list(batches.releases(held, most=7))
    assert [lease for one in releases for lease in one.leases] == whole
    given_back = [(lease, at) for one in releases for lease, some in one.parts for at in some]
    assert given_back == [(lease, at) for lease, some in parts for at in some]
    sizes = [len(one.leases) + sum(1 + len(at) for _, at in one.parts) for one in releases]
    assert all(0 < size <= 2 * 7 for size in sizes)


def test_nothing_is_too_long_for_a_liveness_connection() -> None:
    """Whatever the numbers are, and however many."""
    large = (1 << 63) - 1
    numbers = [large] * 5000
    held: list[batches.Held] = [(large, None)] * 5000
    held += [(large, numbers), *[(large, [large])] * 5000, (large, numbers[:2047])]
    messages: list[m.Message] = [*batches.releases(held), *batches.aborts(numbers, [(0, "shm")])]
    messages += batches.resumes(large, numbers, held, numbers)
    messages += map(m.TakeBack, batches.runs(numbers))
    lengths = [len(encode(one)) - HEADER for one in messages]
    assert max(lengths) <= m.MAX_LIVENESS_FRAME
    assert len(messages) < 60


async def drained(sent: list[bytearray], count: int) -> list[m.Reply]:
    for _ in range(2 * count):
        await turn()
    return decoded(sent)


async def test_short_replies_overtake_long_ones_and_long_ones_take_turns() -> None:
    sent: list[bytearray] = []
    sender = Sender(sent.append)
    for number in (1, 2):
        sender.send(m.KeyList(number, [f"{i:0100}" for i in range(30)]))
    sender.send(m.Done(3))
    assert decoded(sent) == [m.Done(3)]
    order = [reply.id for reply in await drained(sent, 40)]
    assert order[:5] == [3, 1, 2, 1, 2]
    for number in (1, 2):
        pages = [reply for reply in decoded(sent) if reply.id == number]
        assert paging.joined(pages).keys == [f"{i:0100}" for i in range(30)]


async def test_no_pages_for_a_client_that_does_not_read_or_does_not_wait() -> None:
    sent: list[bytearray] = []
    sender = Sender(sent.append)
    sender.send(m.KeyList(1, [f"{i:0100}" for i in range(30)]))
    sender.send(m.KeyList(2, [f"{i:0100}" for i in range(30)]))
    sender.pause()
    assert await drained(sent, 40) == []
    sender.cancel(1)
    sender.resume()
    assert {reply.id for reply in await drained(sent, 40)} == {2}
    count = len(sent)
    sender.send(m.KeyList(3, [f"{i:0100}" for i in range(30)]))
    sender.close()
    await drained(sent, 40)
    assert len(sent) == count
