"""Every message of the wire round-trips, and nothing that is cut or changed passes for one."""

from __future__ import annotations

import builtins
import functools
import hashlib
import math
import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect as mi
from tests.profiles import each

from torchstore_core.contracts.strategy import ClientFacts
from torchstore_core.machine import topology
from torchstore_core.values import ObjectMeta, StateDictMeta, TensorMeta, TensorSlice
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import HEADER, decode_reply, decode_request, encode

REQUESTS: tuple[type[Any], ...] = typing.get_args(m.Request)
REPLIES: tuple[type[Any], ...] = typing.get_args(m.Reply)
NO_REPLY = (m.Abort, m.Release, m.Keep, m.Cancel, m.Warm, m.ProcessDied, m.CopierEnded, m.Grown)
NO_REPLY = (*NO_REPLY, m.Via, m.ClientDied, m.RelayLost)
NO_REPLY = (*NO_REPLY, m.Unhold, m.Lend, m.LendAll, m.Adopt, m.Claim, m.TakeBack, m.Resume)
UNASKED = (
    m.Warmed,
    m.Lost,
    m.Prefault,
    m.Trim,
    m.WatchProcess,
    m.StartCopier,
    m.MayGrow,
    m.HurrySpill,
)

Text = st.text(max_size=8)
Integer = st.integers(-(2**63), 2**64 - 1)
Plain = st.recursive(
    st.none() | st.booleans() | Integer | st.floats(allow_nan=False) | Text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(Text, inner, max_size=3),
    max_leaves=6,
)


def values(kind: mi.Type) -> st.SearchStrategy[Any]:
    """Any value that a declared type allows."""
    match kind:
        case mi.NoneType():
            return st.none()
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            return Integer
        case mi.FloatType():
            return st.floats(allow_nan=False)
        case mi.StrType():
            return Text
        case mi.BytesType():
            return st.binary(max_size=8)
        case mi.AnyType() | mi.CustomType(cls=builtins.object):
            return Plain
        case mi.ListType():
            return st.lists(values(kind.item_type), max_size=3)
        case mi.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3).map(tuple)
        case mi.TupleType():
            return st.tuples(*map(values, kind.item_types))
        case mi.NamedTupleType():
            return st.builds(kind.cls, *[values(f.type) for f in kind.fields])
        case mi.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.UnionType():
            return st.one_of(*map(values, kind.types))
        case mi.StructType():
            return st.builds(kind.cls, **{f.name: values(f.type) for f in kind.fields})
    raise NotImplementedError(f"{kind} on the wire: say here what it may be")


@functools.cache
def messages_of(cls: type[Any]) -> st.SearchStrategy[Any]:
    return values(mi.type_info(cls))


def body_of(message: Any) -> bytes:
    return bytes(encode(message))[HEADER:]


def decoder(cls: type[Any]) -> Any:
    return decode_request if cls in REQUESTS else decode_reply


@pytest.mark.parametrize("cls", REQUESTS + REPLIES, ids=lambda cls: cls.__name__)
@each()
@given(data=st.data())
def test_a_message_is_whole_or_refused(cls: type[Any], data: st.DataObject) -> None:
    """It comes back as it was sent; one that is cut, or goes on, is none."""
    message = data.draw(messages_of(cls))
    decode, body = decoder(cls), body_of(message)
    again = decode(body)
    assert type(again) is cls
    assert again == message
    assert body_of(again) == body
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(msgspec.DecodeError):
        decode(body[:cut])
    with pytest.raises(msgspec.DecodeError):
        decode(body + data.draw(st.binary(min_size=1, max_size=5)))


@given(data=st.data())
def test_a_wrong_type_in_a_field_is_refused(data: st.DataObject) -> None:
    """Whatever a field does not declare, it does not take; least of all silently converted."""
    cls = data.draw(st.sampled_from([cls for cls in REQUESTS if cls.__struct_fields__]))
    fields = mi.type_info(cls).fields  # type: ignore[union-attr]
    plain = msgspec.msgpack.decode(body_of(data.draw(messages_of(cls))))
    at = data.draw(st.integers(0, len(fields) - 1))
    wrong: dict[type[mi.Type], list[Any]] = {
        mi.IntType: ["1", 1.5, None, True, [1]],
        mi.StrType: [1, b"x", None, ["x"]],
        mi.BytesType: ["x", 1, None],
        mi.BoolType: [0, 1, "true", None],
        mi.ListType: [None, 5, "ab", {"a": 1}, [[[None]]], [{}]],
        mi.DictType: [None, 5, "ab", [1], {1: 2}],
        mi.StructType: [None, 5, "ab", {}, []],
        mi.LiteralType: [None, 5, "nothing of these", b"begin"],
        mi.UnionType: ["ab", {"a": 1}, True],  # of a list, a struct or a number with nothing
    }
    declared = fields[at].type
    if not isinstance(declared, mi.UnionType) or mi.IntType not in map(type, declared.types):
        wrong[mi.UnionType].append(5)
    plain[1 + at] = data.draw(st.sampled_from(wrong[type(declared)]))
    with pytest.raises(msgspec.ValidationError):
        decode_request(msgspec.msgpack.encode(plain))


ITEM = m.PutItem("k", TensorMeta("uint8", (4,)), 2, None, TensorSlice((0,), (2,), (4,)))
PUT = m.Put(1, 2, [ITEM], 3, m.Publication("sd", "0", 2, True, 3, True))
FETCH = m.Fetch(1, 2, "sd", 3, [m.Want("w", 0, ((0, 1), (2, 3)))], 5)


@pytest.mark.parametrize(
    ("message", "path", "wrong"),
    [
        (PUT, (3, 0, 1), [None, {}, [], ["t", "uint8"], ["u", "uint8", [4]], ["t", 8, [4]]]),
        (PUT, (3, 0, 1, 2), [None, 4, "4", ["4"], [1.5], [None], {"0": 4}]),
        (PUT, (3, 0, 4), [5, "ab", [], [[0]], [[0], [2]], {"offsets": [0]}]),
        *((PUT, (3, 0, 4, at), [None, 0, "0", ["0"], [0.5], [[0]]]) for at in range(5)),
        (PUT, (3, 0, 5), [None, "path", 5, [1]]),
        (PUT, (3, 0, 6), [None, "0", 0.5, True, [0]]),
        (PUT, (4,), [None, "1", 1.0]),
        (PUT, (5,), [5, "ab", [], ["sd"], ["sd", "0"], {"key": "sd"}]),
        (PUT, (5, 0), [None, 5, b"sd"]),
        (PUT, (5, 1), [None, 0, ["0"]]),
        (PUT, (5, 2), [None, "2", 2.0, True]),
        (PUT, (5, 3), [None, 1, "true"]),
        (PUT, (5, 4), [None, "3", True]),
        (PUT, (5, 5), [None, 0]),
        (FETCH, (5,), [5, "w", {"w": None}, ["w"], [None], [[]]]),
        (FETCH, (5, 0, 2), [[], [[0]], [[0], [1], [2]], ["ab", "cd"], [[0], ["1"]], 5, {}]),
        (m.Release([1], [(2, [0])]), (2, 0), [[], [2], [2, 0], [2, [0], 1], ["2", [0]], 2]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, m.Message) else str(value),
)
def test_a_wrong_type_inside_of_a_field_is_refused(
    message: Any, path: tuple[int, ...], wrong: list[Any]
) -> None:
    for value in wrong:
        plain = msgspec.msgpack.decode(body_of(message))
        inner = plain
        for at in path[:-1]:
            inner = inner[at]
        inner[path[-1]] = value
        with pytest.raises(msgspec.ValidationError):
            decode_request(msgspec.msgpack.encode(plain))


def test_what_is_left_out_at_the_end_has_its_default() -> None:
    """So that the messages of what most do stay small."""

    def shortened(message: Any, *path: int, to: int) -> Any:
        plain = msgspec.msgpack.decode(body_of(message))
        inner = plain
        for at in path:
            inner = inner[at]
        del inner[to:]
        return decoder(type(message))(msgspec.msgpack.encode(plain))

    assert shortened(PUT, to=4) == m.Put(1, 2, [ITEM], 0, None)
    item = shortened(PUT, 3, 0, to=3).items[0]
    assert item == m.PutItem("k", ITEM.meta, 2, None, None, b"", -1)
    assert shortened(PUT, 3, 0, 4, to=3).items[0].part == TensorSlice((0,), (2,), (4,), (), ())
    assert shortened(PUT, 5, to=3).group == m.Publication("sd", "0", 2)
    assert shortened(FETCH, 5, 0, to=1).wants == [m.Want("w", 0, None)]
    assert shortened(m.Release([1], [(1, [2])]), to=2) == m.Release([1], [])
    part = m.Part((0,), (2,), 2, b"ab", None)
    entry = m.Entry(1, ITEM.meta, 4, None, None, [part])
    assert shortened(m.Located(1, [entry], True), 2, 0, to=4).entries == [
        m.Entry(1, ITEM.meta, 4, None, None, None)
    ]
    pending = [m.Pending(3, 4, ["0"], ["1"], [("w", (0,), (1,))])]
    creator = ClientFacts(1, "", "")
    whole = m.Found("k", 2, StateDictMeta(3), 4, "", -1, -1, 0, 0.0, creator, 5, [1, 2], pending)
    stated = msgspec.msgpack.decode(body_of(m.StatReply(1, whole)))
    for name in ("parts", "versions", "pending", "lost", "copies"):
        del stated[2][name]
    found = decode_reply(msgspec.msgpack.encode(stated)).found
    assert (found.parts, found.versions, found.pending) == (1, [], [])


@pytest.mark.parametrize(
    ("meta", "tag"), [(TensorMeta("f", (1,)), "t"), (ObjectMeta("x"), "o"), (StateDictMeta(1), "s")]
)
def test_what_is_stored_keeps_its_kind(meta: Any, tag: str) -> None:
    body = body_of(m.Located(1, [m.Entry(1, meta, 0)], False))
    entry = decode_reply(body).entries[0]
    assert type(entry.meta) is type(meta)
    assert entry.meta == meta
    assert msgspec.msgpack.decode(body)[2][0][1][0] == tag


def test_an_entry_of_a_large_state_dict_takes_few_bytes() -> None:
    """18,000 of them go in one message, far below the largest frame."""
    meta = TensorMeta("bfloat16", (4096, 2048))
    part = TensorSlice((1024, 0), (1024, 2048), (4096, 2048), (4,), (1,))
    name = "model.layers.17.mlp.experts.101.down_proj.weight"
    item = m.PutItem(name, meta, 4 << 20, None, part, b"\x95" + bytes(40))
    group = m.Publication("policy", "17", 64)
    assert len(encode(m.Put(1, 1, [item] * 18_000, 0, group))) < 18_000 * 150
    wants = [m.Want(name, 0, ((1024, 0), (1024, 2048)))] * 18_000
    assert len(encode(m.Fetch(1, 1, "policy", 0, wants, 0))) < 18_000 * 75
    grant = m.Grant(0, 0, 1 << 40)
    entry = m.Entry(
        7, meta, 16 << 20, None, None, [m.Part((1024, 0), (1024, 2048), 1, None, grant)]
    )
    fetched = m.Fetched(1, 7, [entry] * 18_000, [name] * 18_000, {}, [], True)
    assert len(encode(fetched)) < 18_000 * 125


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\x90",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode({}),
        msgspec.msgpack.encode(["no-such-message", 1]),
        msgspec.msgpack.encode([1, 1]),
        msgspec.msgpack.encode(["status"]),
        msgspec.msgpack.encode({"type": "status", "id": 1}),
        msgspec.msgpack.encode(["welcome", 1, 1, b"", "", None, [], []]),
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa5abort\xdd\xff\xff\xff\xff",
    ],
    ids=repr,
)
def test_what_is_no_request_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_request(body)


def test_requests_carry_an_id_and_say_so() -> None:
    """The reply repeats it; only the messages without a reply have none."""
    for cls in REQUESTS:
        assert ("id" in cls.__struct_fields__) is (cls not in NO_REPLY), cls
    for cls in REPLIES:
        assert ("id" in cls.__struct_fields__) is (cls not in UNASKED), cls


def test_every_message_is_in_one_union_under_one_tag() -> None:
    declared = {
        cls
        for cls in vars(m).values()
        if isinstance(cls, type) and issubclass(cls, m.Message) and cls is not m.Message
    }
    assert declared == {*REQUESTS, *REPLIES}
    tags = [cls.__struct_config__.tag for cls in REQUESTS + REPLIES]
    assert len(set(tags)) == len(tags)
    assert all(isinstance(tag, str) for tag in tags)


#: The version of the protocol, and what its messages consist of.
PROTOCOL = (19, "62087c2fdaa16a6d")


def shape(kind: mi.Type, structs: dict[str, object]) -> str:
    """What a declared type has on the wire; ``structs`` gets that of each struct in it, by name."""
    match kind:
        case mi.StructType():
            config, name = kind.cls.__struct_config__, kind.cls.__name__
            if name not in structs:
                structs[name] = ()
                named = ["" if config.array_like else f.encode_name for f in kind.fields]
                types = [shape(f.type, structs) for f in kind.fields]
                required = [f.required for f in kind.fields]
                structs[name] = (config.tag, config.array_like, named, types, required)
            return name
        case mi.UnionType():
            return "|".join(sorted(shape(one, structs) for one in kind.types))
        case mi.TupleType():
            return f"({','.join(shape(one, structs) for one in kind.item_types)})"
        case mi.ListType() | mi.VarTupleType():
            return f"[{shape(kind.item_type, structs)}]"
        case mi.DictType():
            return f"{{{shape(kind.key_type, structs)}:{shape(kind.value_type, structs)}}}"
        case mi.NamedTupleType():
            return f"({','.join(shape(f.type, structs) for f in kind.fields)})"
        case mi.LiteralType():
            return repr(sorted(kind.values))
    return type(kind).__name__


def test_who_changes_a_message_raises_the_version_of_the_protocol() -> None:
    """A process of another release is refused by that number alone: with the same one, it would
    take a message for what it is not. Messages that only volumes and servers exchange count, too.
    """
    structs: dict[str, object] = {}
    for union in (m.Request, m.Reply):
        shape(mi.type_info(union), structs)
    found = hashlib.sha256(repr(sorted(structs.items())).encode()).hexdigest()[:16]
    assert (m.PROTOCOL_VERSION, found) == PROTOCOL, (
        "the messages have changed since this version of the protocol: raise PROTOCOL_VERSION in "
        f"wire/messages.py, and write it down here with {found!r}"
    )


def test_a_refusal_is_read_by_every_release() -> None:
    """The first message and its refusal begin as they always have, whatever the version."""
    hello = msgspec.msgpack.decode(
        body_of(m.Hello(1, 7, b"", topology.probe(), ClientFacts(1, "", "")))
    )
    assert hello[:3] == ["hello", 1, 7]
    refusal = msgspec.msgpack.decode(body_of(m.Failure(1, "protocol", "why")))
    assert refusal == ["failure", 1, "protocol", "why", None, {}]


def test_messages_are_immutable() -> None:
    with pytest.raises(AttributeError):
        m.Status(1).id = 2  # type: ignore[misc]


def test_a_small_put_stays_small() -> None:
    """What a put costs beside its bytes: it is in every small put's time."""
    item = m.PutItem("layer.0.weight", TensorMeta("float32", (256,)), 1024, bytes(1024))
    assert len(encode(m.Put(7, 7, [item]))) < 1024 + 64


def test_numbers_survive_exactly() -> None:
    for number in (0.1, math.pi, 5e-324, -0.0, math.inf):
        body = body_of(m.Failure(1, "x", "x", None, {"n": number}))
        assert math.copysign(1, decode_reply(body).details["n"]) == math.copysign(1, number)
        assert decode_reply(body).details["n"] == number
