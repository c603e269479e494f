"""The packed form as bytes and files; and as bytes that somebody else made, to do harm."""

from __future__ import annotations

import mmap
import struct
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.api.state_dicts.test_packed import pack, shard
from tests.profiles import many
from tests.trees import assert_same

import torchstore_core as ts
from torchstore_core import TensorShard, TorchStoreStateDict
from torchstore_core.clients.values.sharding import ShardList

# ---- bytes --------------------------------------------------------------------------------


STATE_DICT = {"w": torch.arange(50.0), "n": {"i": torch.arange(9), "s": "text"}}


def buffers(data: bytes, tmp_path: Path) -> dict[str, Any]:
    shared = mmap.mmap(-1, len(data))
    shared[:] = data
    path = tmp_path / "file"
    path.write_bytes(data)
    with path.open("rb") as file:
        read_only = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {
        "bytes": data,
        "bytearray": bytearray(data),
        "memoryview": memoryview(bytearray(b"x" * 64 + data))[64:],
        "unaligned": memoryview(bytearray(b"xyz" + data))[3:],
        "mmap": shared,
        "read-only mmap": read_only,
        "tensor": memoryview(torch.frombuffer(bytearray(data), dtype=torch.uint8).numpy()),
    }


def test_any_buffer_is_read_and_a_writable_one_is_not_copied(tmp_path):
    data = pack(STATE_DICT).to_bytes()
    for name, buffer in buffers(data, tmp_path).items():
        packed = TorchStoreStateDict.from_bytes(buffer)
        got = packed.to_state_dict()
        assert_same(got, STATE_DICT)
        got["w"][0] = 77
        zero_copy = struct.pack("f", 77.0) in bytes(memoryview(buffer).cast("B"))
        assert zero_copy == (name in ("bytearray", "memoryview", "mmap", "tensor")), name
        del buffer
        assert got["w"][0] == 77  # the tensors keep their memory


def test_header_and_blob_may_travel_apart():
    packed = pack(STATE_DICT)
    other = TorchStoreStateDict(packed.header, packed.blob.clone())
    assert_same(other.to_state_dict(), STATE_DICT)
    assert other.to_bytes() == packed.to_bytes()


@pytest.mark.parametrize(
    "blob",
    [
        torch.zeros(256, dtype=torch.int8),
        torch.zeros(4, 64, dtype=torch.uint8),
        torch.zeros(512, dtype=torch.uint8)[::2],
        torch.zeros(320, dtype=torch.uint8)[1:257],
        torch.zeros(256, dtype=torch.uint8, device="meta"),
        b"\x00" * 256,
    ],
    ids=["dtype", "dims", "strided", "unaligned", "meta", "bytes"],
)
def test_a_blob_of_another_kind_is_refused(blob):
    packed = pack({"w": torch.zeros(64)})
    with pytest.raises(ts.UnsupportedValueError, match="blob"):
        TorchStoreStateDict(packed.header, blob)


def test_what_has_no_buffer_is_refused():
    strided = memoryview(bytearray(pack(STATE_DICT).to_bytes()))[::2]
    for data in ("text", 7, None, [1], strided):
        with pytest.raises(ts.UnsupportedValueError, match="bytes"):
            TorchStoreStateDict.from_bytes(data)


@pytest.mark.parametrize("mapped", [False, True])
def test_saved_and_loaded(tmp_path, mapped):
    path = tmp_path / "model.tsd"
    state_dict = {**STATE_DICT, "big": torch.randn(300_000)}
    pack(state_dict).save(path)
    assert [found.name for found in tmp_path.iterdir()] == ["model.tsd"]
    packed = TorchStoreStateDict.load(str(path), mmap=mapped)
    got = packed.to_state_dict()
    assert_same(got, state_dict)
    got["w"].zero_()  # stays here
    pack({"new": torch.ones(1)}).save(path)  # replaces the file under what is mapped
    assert torch.equal(got["big"], state_dict["big"])
    assert list(TorchStoreStateDict.load(path).to_state_dict()) == ["new"]


def test_a_save_that_fails_leaves_what_was_there(tmp_path):
    path = tmp_path / "folder"
    path.mkdir()
    with pytest.raises(OSError, match="folder"):
        pack(STATE_DICT).save(path)
    assert [found.name for found in tmp_path.iterdir()] == ["folder"]
    with pytest.raises(FileNotFoundError):
        TorchStoreStateDict.load(tmp_path / "absent")


@pytest.mark.parametrize("mapped", [False, True])
def test_a_truncated_or_longer_or_empty_file_is_refused(tmp_path, mapped):
    data = pack(STATE_DICT).to_bytes()
    path = tmp_path / "file"
    for broken in (b"", data[:10], data[:40], data[:-1], data + b"\x00"):
        path.write_bytes(broken)
        with pytest.raises(ts.ProtocolError):
            TorchStoreStateDict.load(path, mmap=mapped)


# ---- hostile bytes ------------------------------------------------------------------------

PREFIX = 32


def file_of(header: bytes, blob: bytes, *, version: int = 1) -> bytes:
    """A file as the format's description says, around any header."""
    lengths = struct.pack("<QQ", len(header), len(blob))
    start = struct.pack("<8sII", b"\x89tsdict\n", version, zlib.crc32(lengths + header))
    padding = bytes(-(PREFIX + len(header)) % 64)
    return start + lengths + header + padding + blob


def header_of(*entries: Any, participants: Any = 1, participant: Any = "") -> bytes:
    return msgspec.msgpack.encode([list(entries), participants, participant])


def entry(*parts: Any, name: Any = "w", path: Any = b"", codec: Any = "", data: Any = b"") -> Any:
    return [name, path, list(parts), codec, data]


def test_the_file_is_as_described():
    packed = pack({"w": torch.ones(16)})
    header = header_of(entry([0, 64, "float32", [16], None]))
    assert packed.header == header
    assert packed.to_bytes() == file_of(header, bytes(torch.ones(16).numpy().data))


def test_every_truncation_is_refused():
    data = pack(STATE_DICT).to_bytes()
    for size in range(len(data)):
        with pytest.raises(ts.ProtocolError):
            TorchStoreStateDict.from_bytes(data[:size])


def test_every_flipped_bit_before_the_blob_is_refused():
    packed = pack(STATE_DICT)
    data = bytearray(packed.to_bytes())
    for at in range(PREFIX + len(packed.header)):
        for bit in (1, 16, 128):
            data[at] ^= bit
            with pytest.raises(ts.ProtocolError):
                TorchStoreStateDict.from_bytes(data)
            data[at] ^= bit
    assert_same(TorchStoreStateDict.from_bytes(data).to_state_dict(), STATE_DICT)


@given(st.binary(max_size=300))
def test_garbage_is_refused(data):
    for garbage in (data, b"\x89tsdict\n" + data, file_of(data, b"")[:PREFIX] + data):
        with pytest.raises(ts.ProtocolError):
            TorchStoreStateDict.from_bytes(garbage)


HUGE = (1 << 63) - 1
WHOLE = [0, 64, "float32", [16], None]


def sliced(*fields: Any, shape: Any = (16,)) -> Any:
    return [0, 64, "float32", list(shape), list(fields)]


HOSTILE = {
    "no header": b"",
    "another type": msgspec.msgpack.encode({"entries": []}),
    "nested without end": b"\x91" * 10_000,
    "an array of 4 billion": b"\xdd\xff\xff\xff\xff",
    "too few fields": msgspec.msgpack.encode([[]]),
    "not Unicode": header_of(entry(WHOLE)).replace(b"float32", b"fl\xff\xff\xff\xff\xff"),
    "no participants": header_of(participants=0),
    "negative participants": header_of(participants=-1),
    "too many participants": header_of(participants=1 << 64 - 1),
    "offset outside": header_of(entry([256, 64, "float32", [16], None])),
    "end outside": header_of(entry([192, 128, "float32", [32], None])),
    "negative offset": header_of(entry([-64, 64, "float32", [16], None])),
    "offset that wraps around": header_of(entry([(1 << 64) - 64, 64, "float32", [16], None])),
    "unaligned offset": header_of(entry([4, 64, "float32", [16], None])),
    "negative size": header_of(entry([0, -64, "float32", [-16], None])),
    "two negative extents": header_of(entry([0, 64, "float32", [-4, -4], None])),
    "too small": header_of(entry([0, 32, "float32", [16], None])),
    "too large": header_of(entry([0, 128, "float32", [16], None])),
    "huge": header_of(entry([0, HUGE, "uint8", [HUGE], None])),
    "a product that wraps around": header_of(entry([0, 0, "uint8", [1 << 32, 1 << 32], None])),
    "empty with huge extents": header_of(entry([0, 0, "uint8", [0, HUGE, HUGE], None])),
    "many dimensions": header_of(entry([0, 4, "float32", [1] * 100, None])),
    "overlap": header_of(
        entry([0, 128, "uint8", [128], None]), entry([64, 64, "uint8", [64], None], name="v")
    ),
    "one place, two dtypes": header_of(entry(WHOLE), entry([0, 64, "int32", [16], None], name="v")),
    "unknown dtype": header_of(entry([0, 64, "float31", [16], None])),
    "a name of torch that is no dtype": header_of(entry([0, 64, "load", [16], None])),
    "quantised": header_of(entry([0, 64, "qint8", [64], None])),
    "another local shape": header_of(entry(sliced((0,), (8,), (16,), (), ()))),
    "slice outside": header_of(entry(sliced((1,), (16,), (16,), (), ()))),
    "negative slice": header_of(entry(sliced((-1,), (16,), (16,), (), ()))),
    "slice of other dimensions": header_of(entry(sliced((0, 0), (16,), (16, 16), (), ()))),
    "coordinates outside": header_of(entry(sliced((0,), (16,), (16,), (2,), (2,)))),
    "coordinates of another mesh": header_of(entry(sliced((0,), (16,), (16,), (2, 2), (1,)))),
    "parts without slices": header_of(entry(WHOLE, [64, 64, "float32", [16], None])),
    "parts of two tensors": header_of(
        entry(
            sliced((0,), (16,), (32,), (), ()),
            [64, 64, "float32", [16], [[0], [16], [48], [], []]],
        )
    ),
    "object and tensor": header_of(entry(WHOLE, codec="msgpack")),
    "no name": header_of(entry(WHOLE, name="")),
    "one name twice": header_of(entry(WHOLE), entry(WHOLE)),
    "unreadable path": header_of(entry(WHOLE, path=b"\xff")),
    "path without end": header_of(entry(WHOLE, path=msgspec.msgpack.encode(["a"] * 5000))),
    "an entry inside of another": header_of(
        entry(WHOLE, name="a"), entry(WHOLE, name="a.b", path=msgspec.msgpack.encode(["a", "b"]))
    ),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_header_is_refused(what):
    errors = (ts.ProtocolError, ts.UnsupportedValueError)
    for blob in (256, 0):
        with pytest.raises(errors):
            TorchStoreStateDict.from_bytes(file_of(HOSTILE[what], bytes(blob)))
    with pytest.raises(errors):
        TorchStoreStateDict(HOSTILE[what], torch.zeros(256, dtype=torch.uint8))


def test_lengths_that_lie_are_refused_before_memory_is_taken():
    data = bytearray(pack(STATE_DICT).to_bytes())
    for at in (16, 24):
        for size in (1 << 40, HUGE, (1 << 64) - 1):
            lying = data.copy()
            lying[at : at + 8] = struct.pack("<Q", size)
            with pytest.raises(ts.ProtocolError):
                TorchStoreStateDict.from_bytes(lying)


def test_another_version_and_a_blob_of_odd_size_are_refused():
    header = header_of(entry(WHOLE))
    assert TorchStoreStateDict.from_bytes(file_of(header, bytes(64))).nbytes == 64
    with pytest.raises(ts.ProtocolError, match="version 2"):
        TorchStoreStateDict.from_bytes(file_of(header, bytes(64), version=2))
    with pytest.raises(ts.ProtocolError, match="multiple"):
        TorchStoreStateDict.from_bytes(file_of(header, bytes(65)))


def test_an_unknown_codec_is_refused_when_it_is_needed():
    packed = TorchStoreStateDict.from_bytes(file_of(header_of(entry(codec="marshal")), b""))
    with pytest.raises(ts.UnsupportedValueError, match="marshal"):
        packed.to_state_dict()


FUZZED = pack(
    {
        "a": {"w": torch.ones(5, 3), "l": [torch.ones(2, dtype=torch.bfloat16), 5]},
        "s": shard(torch.ones(2, 2), (2, 0), 4, 2, mesh_shape=(2,), coordinates=(1,)),
        "o": ("x", 2.5),
    }
)


@given(
    st.lists(st.tuples(st.integers(0, len(FUZZED.header) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(FUZZED.header)),
    st.binary(max_size=3),
)
@many()
def test_a_changed_header_with_a_right_checksum_is_refused_or_stays_inside_of_the_blob(
    changes, at, more
):
    header = bytearray(FUZZED.header)
    for place, byte in changes:
        header[place] = byte
    header[at:at] = more
    try:
        packed = TorchStoreStateDict(bytes(header), FUZZED.blob)
        leaves = packed.leaves()
        assert isinstance(packed.to_state_dict(), dict)
    except (ts.ProtocolError, ts.UnsupportedValueError, ts.UnsafeObjectError):
        return
    low, high = FUZZED.blob.data_ptr(), FUZZED.blob.data_ptr() + FUZZED.nbytes
    for leaf in leaves:
        for value in leaf.value if isinstance(leaf.value, ShardList) else [leaf.value]:
            tensor = value.tensor if isinstance(value, TensorShard) else value
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                assert low <= tensor.data_ptr()
                assert tensor.data_ptr() + tensor.nbytes <= high
                assert tensor.is_contiguous()
