"""What a program and its writer process tell each other, over a socket pair."""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from torchstore_core.errors import TorchStoreError, from_wire
from torchstore_snapshot import errors as own_errors
from torchstore_snapshot.committing.merging import Part
from torchstore_snapshot.errors import SnapshotError
from torchstore_snapshot.storage.base import Storage
from torchstore_snapshot.storage.opening import open_storage
from torchstore_snapshot.storage.remote import set_environment
from torchstore_snapshot.storage.settings import Settings, using

__all__ = ["Abandon", "Advanced", "Batch", "Begin", "Chunk", "Done", "Failed", "Finish", "Join"]
__all__ += ["NewFile", "Wrote", "from_writer", "receive", "send", "to_writer"]


class NewFile(msgspec.Struct, array_like=True):
    """A file to be written: its name, its first bytes, where its tensors begin, and its size."""

    name: str
    header: bytes
    starts: list[int]
    nbytes: int


class Join(msgspec.Struct, array_like=True, tag=True):
    """The program takes part in a take: from now on, other ranks may wait for it.

    Args:
        job: a number that the program has chosen.
        url, take, rank, size: of the snapshot, of the take, of this rank, and of all ranks.
        environment: variables that say where object stores are, and as whom they are asked: those
            of the program may have changed since the writer was started.
        settings: what file systems are opened with in the program.
    """

    job: int
    url: str
    take: str
    rank: int
    size: int
    environment: dict[str, str] = {}
    settings: Settings = msgspec.field(default_factory=Settings)

    def open(self) -> Storage:
        """Return the storage of the snapshot, opened as in the program. Called by the writer."""
        if self.environment:
            set_environment(self.environment)
        self.settings.apply()
        with using(self.settings.options):
            return open_storage(self.url)


class Begin(msgspec.Struct, array_like=True, tag=True):
    """The files of a take are to be written.

    Args:
        part: what this rank has, without the hashes.
        timeout: seconds that other ranks may take longer than this one.
        claimed: this rank has published the claim of the take, and the writer takes it over.
        metered: the program wants to hear how far writing is.
    """

    job: int
    overwrite: bool
    fsync: bool
    threads: int | None
    timeout: float
    part: Part
    files: list[NewFile]
    claimed: bool = False
    metered: bool = False


class Chunk(msgspec.Struct, array_like=True):
    """A staged tensor: which bytes of which tensor of which file it holds."""

    file: int
    unit: int
    begin: int


class Batch(msgspec.Struct, array_like=True, tag=True):
    """Tensors are staged: as the entries ``"0"``, ``"1"``, ... of a state dict in a store."""

    job: int
    address: str
    key: str
    chunks: list[Chunk]


class Finish(msgspec.Struct, array_like=True, tag=True):
    """Everything is staged."""

    job: int


class Abandon(msgspec.Struct, array_like=True, tag=True):
    """The program gives the take up, at any time. It is not committed, unless it already is."""

    job: int
    error: str


class Wrote(msgspec.Struct, array_like=True, tag=True):
    """A batch is in the files, and is no longer in the store."""

    job: int


class Advanced(msgspec.Struct, array_like=True, tag=True):
    """So many further bytes are in the files."""

    job: int
    nbytes: int


class Done(msgspec.Struct, array_like=True, tag=True):
    """The snapshot is committed."""

    job: int


class Failed(msgspec.Struct, array_like=True, tag=True):
    """The take failed.

    Args:
        code: of the error; empty if it is none of this package's tree, but an OSError.
        errno: 0 unless the storage failed.
        told: the other ranks know of it, as far as this rank can tell them.
    """

    job: int
    code: str
    message: str
    details: dict[str, Any]
    errno: int = 0
    told: bool = True

    def error(self) -> BaseException:
        """Return the error to raise in the program."""
        if not self.code:
            return OSError(self.errno, self.message)
        for name in own_errors.__all__:
            kind: type[SnapshotError] = getattr(own_errors, name)
            if kind.code == self.code:
                return kind(self.message, details=self.details)
        return from_wire(self.code, self.message, None, self.details)

    @classmethod
    def of(cls, job: int, error: BaseException, *, told: bool = True) -> Failed:
        """Describe an error of the writer process."""
        if isinstance(error, TorchStoreError):
            number = error.errno if isinstance(error, OSError) else None
            return cls(job, error.code, error.message, error.details, number or 0, told)
        if isinstance(error, OSError) and error.errno:
            return cls(job, "", error.strerror or str(error), {}, error.errno, told)
        text = f"the writer process failed: {error!r}"
        return cls(job, SnapshotError.code, text, {}, told=told)


to_writer = msgspec.msgpack.Decoder(Join | Begin | Batch | Finish | Abandon)
from_writer = msgspec.msgpack.Decoder(Wrote | Advanced | Done | Failed)
_encoder = msgspec.msgpack.Encoder()
_length = struct.Struct("<Q")


def send(connection: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. Raises OSError if the other side is gone."""
    data = _encoder.encode(message)
    connection.sendall(_length.pack(len(data)) + data, socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> bytes | None:
    """Return the next message; None if the other side has closed the connection."""
    head = _exactly(connection, _length.size)
    if head is None:
        return None
    return _exactly(connection, _length.unpack(head)[0])


def _exactly(connection: socket.socket, nbytes: int) -> bytes | None:
    data = bytearray(nbytes)
    view = memoryview(data)
    while view.nbytes:
        try:
            count = connection.recv_into(view)
        except ConnectionResetError:
            return None
        if not count:
            return None
        view = view[count:]
    return bytes(data)
