"""Frames: any split of the stream gives the same frames, and limits hold before memory is taken."""

from __future__ import annotations

import doctest
import itertools
import tracemalloc
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchstore_core.errors import ProtocolError
from torchstore_core.wire import framing
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, FrameReader, decode_reply, decode_request, encode

LIMIT = 300
Bodies = st.lists(st.binary(max_size=40) | st.binary(min_size=200, max_size=LIMIT), max_size=8)


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(HEADER, "little") + body


def fed(reader: FrameReader, chunks: Sequence[bytes]) -> list[bytes]:
    return [body for chunk in chunks for body in reader.feed(chunk)]


def split(stream: bytes, cuts: Sequence[int]) -> list[bytes]:
    """The stream in pieces; equal cuts give empty ones."""
    edges = [0, *sorted(c % (len(stream) + 1) for c in cuts), len(stream)]
    return [stream[a:b] for a, b in itertools.pairwise(edges)]


@given(Bodies, st.lists(st.integers(0, 4000), max_size=12))
def test_any_split_gives_the_same_frames(bodies: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(frame, bodies))
    assert fed(FrameReader(LIMIT), split(stream, cuts)) == bodies


@given(Bodies)
def test_one_byte_at_a_time(bodies: list[bytes]) -> None:
    stream = b"".join(map(frame, bodies))
    assert fed(FrameReader(LIMIT), [stream[i : i + 1] for i in range(len(stream))]) == bodies


@given(Bodies, st.binary(min_size=1, max_size=LIMIT), st.data())
def test_an_unfinished_frame_is_never_given_out(
    bodies: list[bytes], last: bytes, data: st.DataObject
) -> None:
    stream = b"".join(map(frame, bodies))
    tail = frame(last)
    cut = data.draw(st.integers(0, len(tail) - 1))
    reader = FrameReader(LIMIT)
    assert fed(reader, [stream + tail[:cut]]) == bodies
    assert fed(reader, [tail[cut:]]) == [last]
    assert fed(reader, [stream]) == bodies


@given(Bodies, st.integers(LIMIT + 1, 2**32 - 1), st.lists(st.integers(0, 4000), max_size=6))
def test_a_frame_over_the_limit_raises_whatever_the_split(
    bodies: list[bytes], size: int, cuts: list[int]
) -> None:
    stream = b"".join(map(frame, bodies)) + size.to_bytes(HEADER, "little")
    got: list[bytes] = []
    reader = FrameReader(LIMIT)
    chunks = (reader.feed(chunk) for chunk in split(stream, cuts))
    with pytest.raises(ProtocolError, match=f"frame of {size} bytes is over the limit of {LIMIT}"):
        got.extend(itertools.chain.from_iterable(chunks))
    assert got == bodies[: len(got)]


def test_the_limit_itself_is_allowed_and_can_be_raised() -> None:
    reader = FrameReader(LIMIT)
    body = bytes(LIMIT)
    assert reader.feed(frame(body)) == [body]
    large = frame(bytes(LIMIT + 1))
    for chunks in ([large], [large[:7], large[7:]]):
        with pytest.raises(ProtocolError):
            fed(FrameReader(LIMIT), chunks)
    reader.limit = LIMIT + 1
    assert reader.feed(large) == [large[HEADER:]]


def test_an_announcement_takes_no_memory() -> None:
    """What is announced is believed only as it arrives."""
    tracemalloc.start()
    try:
        readers = [FrameReader(m.MAX_FRAME) for _ in range(100)]
        for reader in readers:
            assert reader.feed(m.MAX_FRAME.to_bytes(HEADER, "little") + b"x") == []
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_finished_frame_leaves_nothing_behind() -> None:
    size = 8 << 20
    stream = frame(bytes(size))
    tracemalloc.start()
    try:
        reader = FrameReader(m.MAX_FRAME)
        for start in range(0, len(stream), 1 << 18):
            bodies = reader.feed(stream[start : start + (1 << 18)])
        assert [len(body) for body in bodies] == [size]
        del bodies
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


@given(st.integers(0, 2**63), st.lists(st.text(max_size=300), max_size=50))
def test_encode_writes_one_whole_frame(ident: int, keys: list[str]) -> None:
    """Also when the message outgrows the buffer it starts in."""
    message = m.Exists(ident, keys)
    data = encode(message)
    assert int.from_bytes(data[:HEADER], "little") == len(data) - HEADER
    (body,) = FrameReader(m.MAX_FRAME).feed(bytes(data))
    assert decode_request(body) == message
    assert encode(message) == data


def test_a_request_is_no_reply() -> None:
    body = bytes(encode(m.Status(1)))[HEADER:]
    assert decode_request(body) == m.Status(1)
    with pytest.raises(msgspec.ValidationError):
        decode_reply(body)


def test_examples() -> None:
    result = doctest.testmod(framing)
    assert result.attempted
    assert not result.failed
