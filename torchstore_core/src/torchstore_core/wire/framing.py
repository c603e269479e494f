"""Frames: a little-endian u32 length, followed by one msgpack message."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from torchstore_core.errors import ProtocolError, TorchStoreError
from torchstore_core.wire import messages

__all__ = [
    "HEADER",
    "FrameReader",
    "asked_protocol",
    "decode_reply",
    "decode_request",
    "encode",
    "framed",
    "portable",
]

HEADER = 4
_MAX_DETAILS = 64 << 10
Data = TypeVar("Data", bytes, memoryview)
_encode_into = msgspec.msgpack.Encoder().encode_into
_length = struct.Struct("<I")
_pack_length, _length_of = _length.pack_into, _length.unpack_from
_DECODED = {"decode_request": messages.Request, "decode_reply": messages.Reply}

if TYPE_CHECKING:
    decode_request = msgspec.msgpack.Decoder(messages.Request).decode
    decode_reply = msgspec.msgpack.Decoder(messages.Reply).decode


def __getattr__(name: str) -> Any:
    """Make a decoder when it is first used. That takes a millisecond or two, most processes use
    only one of the two, and a program that imports the package may use none.
    """
    if name not in _DECODED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = globals()[name] = msgspec.msgpack.Decoder(_DECODED[name]).decode
    return made


class _First(msgspec.Struct, array_like=True):
    """How a Hello and an Attach begin, in every version of the protocol."""

    kind: Literal["hello", "attach"]
    id: int
    protocol: int


def asked_protocol(body: bytes) -> tuple[str, int] | None:
    """Return who sends a first message, of any version of the protocol, and which one it speaks;
    None: it is no such message.

    >>> asked_protocol(msgspec.msgpack.encode(["hello", 1, 7, {"fields": "unknown here"}]))
    ('client', 7)
    """
    try:
        first = msgspec.msgpack.decode(body, type=_First)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return "client" if first.kind == "hello" else "volume", first.protocol


def encode(message: messages.Message) -> bytearray:
    """Return a message as one complete frame."""
    frame = bytearray(256)
    _encode_into(message, frame, HEADER)
    _pack_length(frame, 0, len(frame) - HEADER)
    return frame


def framed(message: msgspec.Struct) -> bytes:
    """Return a message of another protocol (between the halves of a plug-in, say) as one complete
    frame.
    """
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(HEADER, "little") + body


def portable(error: TorchStoreError) -> tuple[str, dict[str, Any]]:
    """Return the message and details of an error that a plug-in has raised, as they can be sent:
    not too long, and without details that are not plain data.

    >>> portable(ProtocolError("no", details={"volume": 1}))
    ('no', {'volume': 1})
    >>> portable(ProtocolError("no", details={"volume": object()}))
    ('no', {})
    """
    message = str(error.message)[: messages.MAX_REASON].encode(errors="replace").decode()
    details: dict[str, Any] = {}
    try:
        body = msgspec.msgpack.encode(error.details)
        if len(body) <= _MAX_DETAILS:
            details = msgspec.msgpack.decode(body, type=dict[str, Any])
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError):
        return message, {}
    return message, details


class FrameReader:
    """Splits a byte stream into frame bodies. Buffers at most one incomplete frame.

    Args:
        limit: the largest body in bytes. A frame that announces more raises before it is buffered.

    >>> reader = FrameReader(limit=100)
    >>> list(reader.feed(bytes([2, 0, 0, 0, 65])))
    []
    >>> list(reader.feed(bytes([66, 1, 0, 0, 0, 67])))
    [b'AB', b'C']
    """

    __slots__ = ("_buffer", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: Data) -> list[Data | bytes]:
        """Return the frame bodies that ``data`` completes. Of a memoryview they may be parts.

        Raises:
            ProtocolError: a frame announces more than ``limit`` bytes.
        """
        buffer = self._buffer
        size = len(data) - HEADER
        if not buffer and 0 <= size <= self.limit and _length_of(data)[0] == size:
            return [data[HEADER:]]  # the usual case: exactly one complete frame arrived
        buffer += data
        bodies: list[Data | bytes] = []
        start = 0
        while len(buffer) - start >= HEADER:
            (size,) = _length_of(buffer, start)
            if size > self.limit:
                raise ProtocolError(
                    f"frame of {size} bytes is over the limit of {self.limit}; "
                    "split the batch, or the other side does not speak this protocol"
                )
            end = start + HEADER + size
            if len(buffer) < end:
                break
            bodies.append(bytes(buffer[start + HEADER : end]))
            start = end
        if start:
            del buffer[:start]
        return bodies
