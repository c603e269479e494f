"""A real server under fire: garbage, lies and nonsense by the thousand over its Unix socket.

Every connection ends in a typed failure or is closed; the server lives, its memory and descriptors
stay as they were, its log shows no traceback, and the neighbour beside it notices nothing.
"""

from __future__ import annotations

import array
import contextlib
import os
import socket
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.attacks.hostile import (
    HARMLESS,
    HELLO,
    Cuts,
    Raw,
    Target,
    a_target,
    frame,
    pieces,
)
from tests.profiles import many
from tests.unit.wire.test_messages import body_of, messages_of

from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, encode


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with a_target() as made:
        yield made


# ---- noise ----------------------------------------------------------------------------------


@pytest.mark.hypothesis
def test_garbage_instead_of_a_hello(target: Target) -> None:
    @many()
    @given(st.binary(max_size=80) | st.binary(max_size=80).map(frame), Cuts)
    def attack(stream: bytes, cuts: list[int]) -> None:
        with Raw(target.address) as raw:
            raw.send(*pieces(stream, cuts))
            for reply in raw.finish():
                assert isinstance(reply, m.Failure)
                assert (reply.id, reply.code) == (0, "protocol")

    with target.unharmed():
        attack()


Plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)
TAGS = [cls.__struct_config__.tag for cls in HARMLESS]


@st.composite
def broken(draw: st.DrawFn) -> bytes:
    """The body of something that was nearly a request."""
    kind = draw(st.sampled_from(["bytes", "value", "typed", "field", "cut", "flip", "utf8"]))
    if kind == "bytes":
        return draw(st.binary(max_size=60))
    if kind == "value":
        return msgspec.msgpack.encode(draw(Plain))
    if kind == "typed":
        return msgspec.msgpack.encode(
            [draw(st.sampled_from(TAGS)), *draw(st.lists(Plain, max_size=5))]
        )
    body = bytearray(body_of(draw(st.sampled_from(HARMLESS).flatmap(messages_of))))
    at = draw(st.integers(0, len(body) - 1))
    if kind == "cut":
        return bytes(body[:at])
    if kind == "flip":
        body[at] ^= draw(st.integers(1, 255))
    elif kind == "utf8":
        body[at:at] = b"\xff\xc0\xaf"
    else:
        plain = msgspec.msgpack.decode(body)
        plain[draw(st.integers(0, len(plain) - 1))] = draw(Plain)
        return msgspec.msgpack.encode(plain)
    if body[1:10] == b"\xa8shutdown":  # that one means it
        return b""
    return bytes(body)


@pytest.mark.hypothesis
def test_nearly_messages(target: Target) -> None:
    """Cut, flipped, wrongly typed: whatever still is a message is answered as one."""

    @many()
    @given(st.lists(broken(), min_size=1, max_size=6), Cuts)
    def attack(bodies: list[bytes], cuts: list[int]) -> None:
        with Raw(target.address) as raw:
            stream = b"".join(map(frame, bodies))
            raw.send(encode(HELLO), *pieces(stream, cuts))
            replies = raw.finish()
            assert isinstance(replies[0], m.Welcome)
            closing = [r for r in replies if isinstance(r, m.Failure) and r.code == "protocol"]
            closing = [r for r in closing if "closing this connection" in r.message]
            assert closing in ([], [replies[-1]])
            assert len(replies) <= 1 + len(bodies)

    with target.unharmed():
        attack()


@pytest.mark.hypothesis
def test_a_conversation_cut_anywhere_and_replayed(target: Target) -> None:
    put = m.Put(2, 1, [m.PutItem("fuzz/r", TensorMeta("uint8", (5000,)), 5000)])
    lines = [HELLO, put, m.Commit(3, 1), m.Locate(4, 2, [m.Want("fuzz/r")], -1), m.Release([2])]
    said = b"".join(bytes(encode(line)) for line in lines)

    @many()
    @given(st.integers(0, len(said)), st.integers(0, 3), Cuts)
    def attack(cut: int, times: int, cuts: list[int]) -> None:
        with Raw(target.address) as raw:
            raw.send(*pieces(said * times + said[:cut], cuts))
            replies = raw.finish()
            for reply in replies:
                assert isinstance(reply, (m.Welcome, m.Granted, m.Committed, m.Located, m.Failure))
            if times >= 2:  # one Hello is enough
                assert isinstance(replies[-1], m.Failure)

    with target.unharmed():
        attack()


# ---- the hello ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, m.PROTOCOL_VERSION - 1, m.PROTOCOL_VERSION + 1, -1, 2**63])
def test_another_version_is_refused_by_name(target: Target, version: int) -> None:
    with target.unharmed(), Raw(target.address) as raw:
        raw.send(encode(msgspec.structs.replace(HELLO, protocol=version)), encode(m.Status(2)))
        failure = raw.refused()
        assert f"client speaks protocol {version}, this server {m.PROTOCOL_VERSION}" in (
            failure.message
        )


@pytest.mark.parametrize(
    ("kind", "peer", "further", "version", "older"),
    [
        ("hello", "client", [], m.PROTOCOL_VERSION - 1, "the client's"),
        ("attach", "volume", [], m.PROTOCOL_VERSION - 1, "the volume's"),
        ("hello", "client", [{"other": "fields"}], m.PROTOCOL_VERSION + 1, "the server's"),
    ],
)
def test_so_is_one_whose_first_message_has_other_fields(
    target: Target, kind: str, peer: str, further: list[object], version: int, older: str
) -> None:
    body = msgspec.msgpack.encode([kind, 1, version, *further])
    with target.unharmed(), Raw(target.address) as raw:
        raw.send(len(body).to_bytes(HEADER, "little") + body)
        message = raw.refused().message
    assert f"{peer} speaks protocol {version}, this server {m.PROTOCOL_VERSION}" in message
    assert f"{older} is the older one" in message


def test_anything_before_the_hello_is_refused(target: Target) -> None:
    with target.unharmed():
        for request in (m.Status(1), m.Shutdown(1), m.Put(1, 1, []), m.Release([1])):
            with Raw(target.address) as raw:
                raw.send(encode(request), encode(HELLO))
                assert "the first message must be a Hello" in raw.refused().message


def test_a_second_hello_is_refused(target: Target) -> None:
    with target.unharmed(), Raw(target.address) as raw:
        raw.send(encode(HELLO), encode(m.Status(2)), encode(HELLO), encode(m.Status(3)))
        welcome, status, failure = raw.finish()
        assert isinstance(welcome, m.Welcome)
        assert isinstance(status, m.StatusReply)
        assert (failure.id, failure.code) == (0, "protocol")
        assert "one Hello" in failure.message


@pytest.mark.parametrize("token", [b"x", bytes(16), bytes(10_000)])
def test_a_wrong_session_token_opens_nothing(target: Target, token: bytes) -> None:
    with target.unharmed(), Raw(target.address) as raw:
        raw.send(encode(msgspec.structs.replace(HELLO, session=token)), encode(m.Status(2)))
        (failure,) = raw.finish()
        assert isinstance(failure, m.Failure)
        assert (failure.id, failure.code) == (1, "store-closed")


def test_the_token_of_a_session_that_ended_opens_nothing(target: Target) -> None:
    with target.unharmed():
        with Raw(target.address) as raw:
            raw.send(encode(HELLO))
            (welcome,) = raw.finish()
        target.settle(lambda: joined(target, welcome.session) == "store-closed")


def joined(target: Target, token: bytes) -> str:
    with Raw(target.address) as raw:
        raw.send(encode(msgspec.structs.replace(HELLO, session=token)))
        (reply,) = raw.finish()
        return reply.code if isinstance(reply, m.Failure) else ""


# ---- size -----------------------------------------------------------------------------------


def test_what_announces_too_much_is_refused_before_it_comes(target: Target) -> None:
    with target.unharmed():
        for greeted, limit in ((False, m.MAX_HELLO_FRAME), (True, m.MAX_FRAME)):
            for size in (limit + 1, 2**31, 2**32 - 1):
                with Raw(target.address) as raw:
                    if greeted:
                        raw.greet()
                    raw.send(size.to_bytes(HEADER, "little"))
                    assert f"frame of {size} bytes" in raw.refused().message


def test_much_is_announced_and_little_comes(target: Target) -> None:
    """Twenty connections that promise 64 MB each, and send it by the byte."""
    with target.unharmed(), contextlib.ExitStack() as stack:
        before = target.rss()
        raws = [stack.enter_context(Raw(target.address)) for _ in range(20)]
        for raw in raws:
            raw.greet()
            raw.send(m.MAX_FRAME.to_bytes(HEADER, "little"))
        for _ in range(200):
            for raw in raws:
                raw.send(b"\x91")
        rounds = target.neighbour.rounds
        target.settle(lambda: target.neighbour.rounds > rounds + 5)
        assert target.rss() < before + (4 << 20)
        for raw in raws[:10]:
            assert raw.finish() == []  # half of a message is none


def test_the_largest_frame_comes_whole(target: Target) -> None:
    """As one value, as nothing the server knows, and as a million entries."""
    head = msgspec.msgpack.encode(["keys", 7, ""])[:-1]
    text = head + b"\xdb" + (m.MAX_FRAME - len(head) - 5).to_bytes(4, "big")
    text += b"z" * (m.MAX_FRAME - len(text))
    with target.unharmed(growth=24 << 20):
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(frame(text))
            assert raw.finish() == [m.KeyList(7, [])]
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(frame(bytes(m.MAX_FRAME)))
            raw.refused()
        with Raw(target.address) as raw:
            raw.greet()
            raw.send(encode(m.Exists(8, ["k"] * 1_000_000)))
            assert raw.finish() == [m.Flags(8, [False] * 1_000_000)]


@pytest.mark.parametrize("depth", [100, 10_000, 5_000_000])
@pytest.mark.parametrize("opening", [b"\x91", b"\x81\xa1k", b"\x81\x91"])
def test_deep_nesting(target: Target, depth: int, opening: bytes) -> None:
    """Where a message has a field, where it has none (fields of the future are skipped), and
    instead of a message.
    """
    deep = opening * depth
    with target.unharmed(growth=24 << 20):
        for body in (
            deep,
            b"\x92\xa5abort" + deep,
            b"\x93\xa5abort\x90" + deep,
            b"\x94\xa7release\x90\x90" + deep,
        ):
            with Raw(target.address) as raw:
                raw.greet()
                raw.send(frame(body), encode(m.Status(5)))
                raw.refused()


# ---- the socket -----------------------------------------------------------------------------


def test_descriptors_that_nobody_asked_for(target: Target) -> None:
    """The kernel passes them along with bytes; the server must not end up with them."""
    with target.unharmed(), open(os.devnull) as null:
        for _ in range(100):
            with Raw(target.address) as raw:
                rights = array.array("i", [null.fileno()] * 50)
                raw.socket.sendmsg(
                    [encode(HELLO)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
                )
                (welcome,) = raw.finish()
                assert isinstance(welcome, m.Welcome)


def test_connections_that_come_and_go(target: Target) -> None:
    """At every point of the greeting, and many at once."""
    hello = bytes(encode(HELLO))
    with target.unharmed():
        for cut in (0, 1, 4, 5, len(hello) - 1, len(hello)):
            with contextlib.ExitStack() as stack:
                for _ in range(60):
                    raw = stack.enter_context(Raw(target.address))
                    raw.send(hello[:cut])
