"""Encodes any Python object as bytes and decodes it again, with all types preserved.

Values that msgpack represents exactly are encoded with msgpack; tuples, sets, dtypes, arrays of
numpy and the like are msgpack extensions, so that their types survive. Everything else is pickled.
Pickle is used in this module only, and in clients only: the server stores bytes.

Encoding runs on the event loop and cannot be interrupted, so its time is bounded by the size of the
value in memory. Every object is visited once, however often it occurs in the value. Each byte of
msgpack is copied once for every level of tuples and sets around it, of which there are at most 64.
That takes some microseconds for a config, and about a second for a few million objects: such data
should be tensors, or bytes. Decoding is linear in the number of bytes, because msgpack has no
references.

The memory of large arrays and tensors may be put aside, so that readers can leave it where it is:
see :func:`.pieces.with_aside`. That is another codec, and what is encoded refers to it by its
position.

Pickle refers to classes and functions by name. Where cloudpickle is installed, whatever has no name
that other processes know is sent by value: lambdas, closures and local classes; and the classes and
functions of ``__main__``, such as those of a notebook. A reader that runs the same program has the
latter itself and gets its own ones, so that ``isinstance`` and enums still work between processes
of the same program.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import struct
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from torchstore_core.clients.values.library_values import described, rebuilt
from torchstore_core.clients.values.pieces import (
    LARGE,
    Buffer,
    Pieces,
    is_of_array,
    memory_of,
    utf8_of,
    with_aside,
    without_aside,
)
from torchstore_core.errors import OutOfMemoryError, UnsafeObjectError, UnsupportedValueError
from torchstore_core.values import ObjectMeta

if TYPE_CHECKING:
    import torch

MSGPACK = "msgpack"
PICKLE = "pickle"
# The same, with buffers aside.
_MSGPACK_ASIDE = "msgpack+buffers"
_PICKLE_ASIDE = "pickle+buffers"
_PICKLED = (PICKLE, _PICKLE_ASIDE)
_ASIDE = (_MSGPACK_ASIDE, _PICKLE_ASIDE)
_KNOWN = (MSGPACK, PICKLE, *_ASIDE)

_TUPLE, _SET, _FROZENSET, _BYTEARRAY, _COMPLEX, _INTEGER, _PAIRS, _LIBRARY = range(1, 9)
_MAX_DEPTH = 64
# msgpack writes an object out again each time that it occurs in a value. Objects of up to this many
# bytes are not counted (the reference itself takes 8 bytes in memory, too); the repetitions of
# larger ones may take up to _MAX_REPEATED bytes together.
_SMALL = 256
_MAX_REPEATED = 4 << 20
_ATOMS = frozenset((type(None), bool, float))
_CONTAINERS = frozenset((list, tuple, dict, set, frozenset, bytearray))
_encode = msgspec.msgpack.Encoder().encode
_Ext = msgspec.msgpack.Ext


class NoValue:
    """Base of classes whose objects must be put alone and cannot be one value among others."""

    __slots__ = ()
    _refusal: ClassVar[str]  # the reason, and what to do instead


class _NotExactError(Exception):
    """Raised when decoding msgpack would not return an equal object of the same type."""


def encode_object(key: str, value: Any, *, allow_pickle: bool) -> tuple[ObjectMeta, bytes]:
    """:func:`encode_pieces`, with the bytes in one piece."""
    meta, data = encode_pieces(key, value, allow_pickle=allow_pickle)
    return meta, data if isinstance(data, bytes) else data.joined()


def encode_pieces(
    key: str, value: Any, *, allow_pickle: bool, aside: bool = False
) -> tuple[ObjectMeta, bytes | Pieces]:
    """Encode ``value``. Returns how it is encoded, and the bytes, in which large buffers are those
    of the value itself: it must not change before they have been copied.

    Args:
        aside: the memory of large arrays and tensors goes aside, see :func:`has_aside`.

    Raises:
        UnsafeObjectError: the value needs pickle, which is not allowed.
        UnsupportedValueError: the value cannot be pickled either.
        MemoryError: this process has no memory for the bytes.
    """
    try:
        known = _Known()
        if aside:
            known.aside = []
        packed = _encode(_to_wire(value, set(), known, 0))
        if known.aside:
            return ObjectMeta(_MSGPACK_ASIDE), with_aside(known.spliced(packed), known.aside)
        return ObjectMeta(MSGPACK), Pieces(known.spliced(packed)) if known.large else packed
    except (_NotExactError, UnicodeEncodeError, msgspec.EncodeError):
        # The last of them: msgpack cannot take 4 GiB in one piece.
        if not allow_pickle:
            raise UnsafeObjectError(
                f"{key!r}: a {type(value).__qualname__} needs pickle, which allow_pickle=False "
                "forbids; put tensors, dicts of tensors as state dicts, or numbers, str, bytes and "
                "arrays of less than 4 GiB, and plain containers of these, none in two places",
                key=key,
            ) from None
    try:
        try:
            written = _pickled(value, aside)
        except Exception:
            if "torch" in sys.modules:  # for tensors there is a better error
                _check_tensors(key, value)
            raise
        has_tensors = any(map(written.may_mention, _TENSOR_MARKS))
        if has_tensors and _check_tensors(key, value):
            written = _pickled(value, aside)
        if written.aside:
            return ObjectMeta(_PICKLE_ASIDE), with_aside(written.pieces(), written.aside)
        return ObjectMeta(PICKLE), written.data()
    except (UnsupportedValueError, MemoryError):
        raise
    except Exception as error:
        hint = "" if _cloudpickle() else "; lambdas, local classes and the like need cloudpickle"
        if isinstance(value, Awaitable):
            hint = "; await it, and put what that gives"
        elif isinstance(value, Iterator | AsyncIterator):
            hint = "; put a list of what it yields"
        raise UnsupportedValueError(
            f"{key!r}: a {type(value).__qualname__} cannot be stored: {error}{hint}", key=key
        ) from error


def has_aside(meta: ObjectMeta) -> bool:
    """Whether an object's arrays and tensors keep the memory that it is decoded from, if that can
    be written to.
    """
    return meta.codec in _ASIDE


def decode_object(key: str, meta: ObjectMeta, data: Buffer, *, allow_pickle: bool) -> Any:
    """Decode the object that :func:`encode_pieces` encoded as ``data``.

    Raises:
        UnsafeObjectError: the object was pickled, which is not allowed.
        OutOfMemoryError: this process has no memory for it.
        UnsupportedValueError: the object cannot be rebuilt here, because its class is missing, for
            example.
    """
    if meta.codec not in _KNOWN:
        raise UnsupportedValueError(
            f"{key!r} is encoded as {meta.codec!r}, which is unknown here: install the "
            "torchstore-core that it was put with",
            key=key,
        )
    if meta.codec in _PICKLED and not allow_pickle:
        raise UnsafeObjectError(
            f"{key!r} was stored with pickle, which allow_pickle=False forbids to load", key=key
        )
    try:
        encoded, aside = without_aside(data) if has_aside(meta) else (data, ())
        if aside and aside[0].readonly:
            aside = [memoryview(bytearray(buffer)) for buffer in aside]
        if meta.codec in _PICKLED:
            return pickle.loads(encoded, buffers=aside)
        return _decode(encoded, aside)
    except MemoryError as error:
        raise OutOfMemoryError(
            f"{key!r}: this process has no memory for an object that takes {len(data):,} bytes. "
            "Drop what is not needed, or raise its limits: memory, address space (ulimit -v)",
            key=key,
            details={"requested_bytes": len(data)},
        ) from error
    except Exception as error:
        hint = "is its class importable, or cloudpickle installed where it is put?"
        if meta.codec not in _PICKLED:  # of what other releases have, too: a newer type or dtype
            hint = "install the torchstore-core, torch and numpy here that it was put with"
        elif isinstance(error, ModuleNotFoundError) and str(error.name).startswith("cloudpickle"):
            hint = "it was put by value: install cloudpickle here, too"
        raise UnsupportedValueError(
            f"{key!r} cannot be rebuilt here: {error!r} ({hint})", key=key
        ) from error


class _Known(dict[int, Any]):
    """Immutable objects that were encoded already and are not small, by id(), to encode them only
    once. msgpack still writes them out each time they occur, and with tuples in tuples the size can
    double at every level.

    Attributes:
        large: the large buffers of the value, in order. msgpack is given a mark for each of them
            instead, behind its header.
        aside: the memory of large arrays and views, for which msgpack is given its position; None:
            it is among the large buffers.
    """

    _repeated = 0
    _mark = b""
    large: Sequence[Buffer] = ()
    aside: list[Buffer] | None = None

    def count_repeated(self, nbytes: int) -> None:
        """Count repeated bytes. Beyond the limit pickle is used, which repeats nothing."""
        self._repeated += nbytes
        if self._repeated > _MAX_REPEATED:
            raise _NotExactError

    def kept(self, buffer: Buffer) -> Any:
        """What stands for the memory of an array or a view."""
        if len(buffer) < LARGE:
            return buffer
        if self.aside is None:
            return self.apart(b"\xc6" + _length(len(buffer)), buffer)
        self.aside.append(buffer)
        return len(self.aside) - 1

    def apart(self, header: bytes, buffer: Buffer) -> msgspec.Raw:
        """What stands for a large buffer: its header, in which its length goes last."""
        if not self._mark:
            self._mark = os.urandom(16)  # nothing in a value can be equal to it
            found: list[Buffer] = []
            self.large, self._add = found, found.append
        self._add(buffer)
        return msgspec.Raw(header + self._mark)

    def extension(self, tag: int, data: bytes, before: int) -> Any:
        """An extension with ``data``, in which buffers stand that were large: those after the first
        ``before`` ones.
        """
        inside = self.large[before:]
        if not inside:
            return _Ext(tag, data)
        nbytes = len(data) + sum(map(len, inside)) - len(self._mark) * len(inside)
        return msgspec.Raw(b"\xc9" + _length(nbytes) + bytes((tag,)) + data)

    def spliced(self, packed: bytes) -> list[Buffer]:
        """The pieces of a value, with its large buffers where the marks are."""
        if not self.large:
            return [packed]
        first, *others = packed.split(self._mark)
        pairs = zip(self.large, others, strict=True)
        return [first, *[piece for pair in pairs for piece in pair]]


def _length(nbytes: int) -> bytes:
    """A length in msgpack, which goes up to 4 GiB."""
    if nbytes >= 1 << 32:
        raise _NotExactError
    return nbytes.to_bytes(4, "big")


def _record_large(known: _Known, value: str | bytes) -> None:
    """Record a str or bytes object that is not small, and count it if it is repeated."""
    if id(value) in known:
        known.count_repeated(len(value))
    known[id(value)] = value


def _to_wire(value: Any, seen: set[int], known: _Known, depth: int) -> Any:
    kind = type(value)
    if kind is str:
        if len(value) > _SMALL:
            _record_large(known, value)
            if len(value) >= LARGE:
                data = utf8_of(value)
                return known.apart(b"\xdb" + _length(len(data)), data)
        return value
    if kind is int:
        if -(1 << 63) <= value < 1 << 64:
            return value
        length = value.bit_length() // 8 + 1
        return _Ext(_INTEGER, value.to_bytes(length, "little", signed=True))
    if kind in _ATOMS:
        return value
    if kind is bytes:
        if len(value) > _SMALL:
            _record_large(known, value)
            if len(value) >= LARGE:
                return known.apart(b"\xc6" + _length(len(value)), value)
        return value
    if kind is complex:
        return _Ext(_COMPLEX, _encode([value.real, value.imag]))
    if depth > _MAX_DEPTH:
        raise _NotExactError
    if kind not in _CONTAINERS:
        return _of_library(value, seen, known)
    depth += 1
    apart = len(known.large)
    if kind is tuple or kind is frozenset:
        if known and (made := known.get(id(value))) is not None:
            known.count_repeated(len(made.data))
            return made
        before = len(seen)
        inner = [x if type(x) in _ATOMS else _to_wire(x, seen, known, depth) for x in value]
        data = _encode(inner)
        made = known.extension(_TUPLE if kind is tuple else _FROZENSET, data, apart)
        # Everything in it is immutable, too, and none of it is large.
        if len(data) > _SMALL and len(seen) == before and len(known.large) == apart:
            known[id(value)] = made
        return made
    # Two references to one mutable object must remain references to one object, and a cycle must
    # remain a cycle: that needs pickle.
    if id(value) in seen:
        raise _NotExactError
    seen.add(id(value))
    if kind is list:
        return [x if type(x) in _ATOMS else _to_wire(x, seen, known, depth) for x in value]
    if kind is dict:
        for k in value:
            if type(k) is not str or len(k) > _SMALL:
                break
        else:
            return {
                k: v if type(v) in _ATOMS else _to_wire(v, seen, known, depth)
                for k, v in value.items()
            }
        pairs = [
            [_to_wire(k, seen, known, depth), _to_wire(v, seen, known, depth)]
            for k, v in value.items()
        ]
        return known.extension(_PAIRS, _encode(pairs), apart)
    if kind is bytearray:
        if len(value) >= LARGE:
            header = b"\xc9" + _length(len(value)) + bytes((_BYTEARRAY,))
            return known.apart(header, value)
        return _Ext(_BYTEARRAY, bytes(value))
    members = [_to_wire(x, seen, known, depth) for x in value]
    return known.extension(_SET, _encode(members), apart)


def _of_library(value: Any, seen: set[int], known: _Known) -> Any:
    found = described(value)
    if found is None:
        raise _NotExactError
    apart = len(known.large)
    if found.what in ("array", "view"):  # which are mutable
        if id(value) in seen:
            raise _NotExactError
        seen.add(id(value))
    stored = None if found.data is None else known.kept(found.data)
    return known.extension(_LIBRARY, _encode((found.what, found.details, stored)), apart)


def _decode(data: Buffer, aside: Sequence[memoryview]) -> Any:
    return msgspec.msgpack.decode(data, ext_hook=partial(_extension, aside))


def _extension(aside: Sequence[memoryview], tag: int, data: memoryview) -> Any:
    if tag == _BYTEARRAY:
        return bytearray(data)
    if tag == _LIBRARY:
        return rebuilt(data, aside)
    if tag == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    inner = _decode(data, aside)
    if tag == _TUPLE:
        return tuple(inner)
    if tag == _SET:
        return set(inner)
    if tag == _FROZENSET:
        return frozenset(inner)
    if tag == _COMPLEX:
        return complex(*inner)
    if tag == _PAIRS:
        return dict(inner)
    raise ValueError(f"extension {tag} is unknown here")


# ---- classes and functions that other processes cannot import -----------------------------

# Names of the program's main module: in the program, and in processes spawned by multiprocessing.
_MAIN_MODULES = ("__main__", "__mp_main__")
_MAIN_MARK = b"_main__"
# The opcode of a frame, its length, and the size of what is before the first one (the version of
# the protocol). Large strings, bytes and arrays lie between frames.
_FRAME, _FRAME_LENGTH, _START = 0x95, struct.Struct("<Q"), 2
# Identifies a process that runs no file, such as a notebook, and its forks.
_PROCESS_ID = os.urandom(8).hex()


def _pickled(value: Any, aside: bool) -> _Written:
    """Pickle by name where readers know the names, and by value otherwise."""
    try:
        written = _dumped(pickle.Pickler, value, aside)
    except (pickle.PicklingError, AttributeError, TypeError):
        if (cloudpickle := _cloudpickle()) is None:
            raise
        return _by_value(cloudpickle, value, aside)
    if not written.may_mention(_MAIN_MARK):
        return written
    names = _MainNameFinder()
    _with_tensors(names).dump(value)
    if not names.found or (cloudpickle := _cloudpickle()) is None:
        return written
    try:
        definitions = _by_value(cloudpickle, names.found, aside=False)
    except (pickle.PicklingError, AttributeError, TypeError):
        return written  # they use something that cannot be sent: only the same program can read it
    own = _OfProgram(_program(), definitions.joined(), written.joined(), written.aside)
    return _dumped(pickle.Pickler, own, aside)


class _Written:
    """What a pickler writes: a file for it, and then the pickle in pieces.

    Attributes:
        aside: the memory that is not in the pickle, see :meth:`keep`.
    """

    __slots__ = ("_chunks", "aside", "write")

    def __init__(self) -> None:
        self.aside: list[memoryview] = []
        self._chunks: list[bytes | bytearray | pickle.PickleBuffer] = []
        #: Takes what lies between two large buffers, or one of these.
        self.write = self._chunks.append

    def keep(self, buffer: pickle.PickleBuffer) -> bool:
        """Take large memory of an array or a tensor aside. Returns whether it is to be written, as
        that of others is: what rebuilds these may rely on getting bytes, or a bytearray.
        """
        memory = buffer.raw()
        if len(memory) < LARGE or not is_of_array(memory):
            return True
        self.aside.append(memory)
        return False

    def _pairs(self) -> list[tuple[bytes, Buffer]]:
        """The large buffers, each with what lies before it; and the last one, which is empty."""
        found: list[tuple[bytes, Buffer]] = []
        frames: list[bytes] = []
        for at, chunk in enumerate(self._chunks):
            # An array may lie in memory column by column.
            buffer = chunk.raw() if isinstance(chunk, pickle.PickleBuffer) else chunk
            if len(buffer) < LARGE or _is_frame(buffer, 0 if at else _START):
                frames.append(bytes(buffer))
            else:
                found.append((b"".join(frames), buffer))
                frames = []
        return [*found, (b"".join(frames), b"")]

    def may_mention(self, mark: bytes) -> bool:
        """Whether the pickle may refer to something with ``mark`` in its name. Large buffers are
        not searched, because that would take as long as pickling them.
        """
        if len(self._chunks) == 1:
            return mark in self.joined()
        return any(mark in frames for frames, _ in self._pairs())

    def pieces(self) -> list[Buffer]:
        """The pickle, in which large buffers are pieces of their own."""
        return [one for pair in self._pairs() for one in pair]

    def data(self) -> bytes | Pieces:
        """The pickle, in one piece if it has no large buffers."""
        if len(self._chunks) == 1 and isinstance(only := self._chunks[0], bytes):  # very often
            return only
        pairs = self._pairs()
        return pairs[0][0] if len(pairs) == 1 else Pieces([one for pair in pairs for one in pair])

    def joined(self) -> bytes:
        """The pickle in one piece."""
        data = self.data()
        return data if isinstance(data, bytes) else data.joined()


def _is_frame(buffer: Buffer, at: int) -> bool:
    """Whether this looks like a frame. A large buffer that does is only copied once more."""
    length = len(buffer) - at - 1 - _FRAME_LENGTH.size
    return buffer[at] == _FRAME and _FRAME_LENGTH.unpack_from(buffer, at + 1)[0] == length


def _dumped(pickler: Any, value: Any, aside: bool) -> _Written:
    written = _Written()
    keep = written.keep if aside else None
    made = pickler(written, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=keep)
    _with_tensors(made).dump(value)
    return written


def _cloudpickle() -> Any | None:
    """Import cloudpickle when it is needed; None if it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle


# cloudpickle's registry of modules to pickle by value is shared by all threads. The lock is
# reentrant because an object that is pickled may itself put something.
_registering = threading.RLock()


def _after_fork_in_child() -> None:
    global _registering
    _registering = threading.RLock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_after_fork_in_child)


def _by_value(cloudpickle: Any, value: Any, aside: bool) -> _Written:
    with _registering:
        return _with_main_by_value(cloudpickle, value, aside)


def _with_main_by_value(cloudpickle: Any, value: Any, aside: bool) -> _Written:
    spawned: ModuleType | None = sys.modules.get("__mp_main__")
    if spawned is None or spawned.__name__ in (
        "__main__",  # the same module, and known to cloudpickle by this name
        *cloudpickle.list_registry_pickle_by_value(),
    ):
        return _dumped(cloudpickle.Pickler, value, aside)
    cloudpickle.register_pickle_by_value(spawned)
    try:
        return _dumped(cloudpickle.Pickler, value, aside)
    finally:
        cloudpickle.unregister_pickle_by_value(spawned)


class _MainNameFinder(pickle.Pickler):
    """Collects the classes and functions of ``__main__`` that a pickle refers to."""

    def __init__(self) -> None:
        super().__init__(_NullWriter(), protocol=pickle.HIGHEST_PROTOCOL)
        self.found: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ in _MAIN_MODULES:
            self.found[obj.__qualname__] = obj
        return NotImplemented


class _NullWriter:
    def write(self, data: bytes | pickle.PickleBuffer) -> int:
        return memoryview(data).nbytes  # what lies outside of the frames may be a PickleBuffer


# ---- tensors inside of objects ------------------------------------------------------------


_TABLE: Any = pickle.Pickler.dispatch_table


def _with_tensors(pickler: Any) -> Any:
    """Have a pickler write the elements of plain tensors. What torch writes for each is a file of
    the whole storage that it is a part of.
    """
    if "torch" in sys.modules:  # otherwise there are none
        others = getattr(pickler, "dispatch_table", copyreg.dispatch_table)
        # Not as an attribute: one of a class, like that of cloudpickle, would stay what counts.
        _TABLE.__set__(pickler, {**others, **_plain_tensors()})
    return pickler


@cache
def _plain_tensors() -> dict[type, Any]:
    """How to pickle tensors that are nothing but elements, a dtype and a shape."""
    import torch

    from torchstore_core.clients.values.tensors import address_of, compact

    def reduced(tensor: torch.Tensor) -> Any:
        if (full := compact(tensor)) is None:
            return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        # Smaller memory is copied at once. What is detached keeps it if ``.data`` is replaced.
        held = full.detach() if full.nbytes >= LARGE else full
        memory = memory_of(held, address_of("", held), held.nbytes, lambda k: address_of(k, held))
        what = pickle.PickleBuffer(memory), tuple(full.shape), full.dtype
        return tensor_on, what if full.is_contiguous() else (*what, full.stride())

    return {torch.Tensor: reduced}


def tensor_on(
    data: Any, shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A tensor on a writable buffer. Pickles name this function, and snapshots keep pickles: it has
    to stay where it is, and to take these arguments.
    """
    from torchstore_core.clients.values.tensors import from_buffer

    return from_buffer(data, 0, shape, dtype, stride)


# The name of every function with which torch unpickles tensors, or storages, contains one of these.
_TENSOR_MARKS = (b"_rebuild_", b"_load_from_bytes")


def _check_tensors(key: str, value: Any) -> bool:
    """Check that torch can restore the tensors inside of an object. Returns whether some of them
    had to be waited for: what was pickled of these before may be anything.

    If a storage lacks bytes of its tensor, torch pickles only those that exist, and makes up the
    others when it loads them. Tensors of some dtypes, and storages alone, it can pickle but not
    load.

    Raises:
        UnsupportedValueError: the object contains such a tensor.
    """
    import torch

    from torchstore_core.clients.values.tensors import check_storage, is_fake, result_of, storable

    cloudpickle = _cloudpickle()
    base: Any = pickle.Pickler if cloudpickle is None else cloudpickle.Pickler
    waited = False

    class Tensors(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                if (result := result_of(obj)) is not None:
                    nonlocal waited
                    waited, obj = True, result
                if is_fake(obj) or not _can_unpickle(obj.dtype):
                    storable(key, obj)  # fake and quantised ones have their own errors
                    raise UnsupportedValueError(
                        f"{key!r}: torch cannot unpickle a tensor of {obj.dtype}, so it cannot be "
                        "stored inside of an object; put it by itself, or in a state dict",
                        key=key,
                    )
                if obj.layout is torch.strided:  # others have no storage, and are pickled in parts
                    check_storage(key, obj)
                return type(None), ()
            if isinstance(obj, torch.UntypedStorage):
                raise UnsupportedValueError(
                    f"{key!r}: torch cannot unpickle an UntypedStorage; put a tensor of its bytes, "
                    "which torch.empty(0, dtype=torch.uint8).set_(storage) makes without a copy",
                    key=key,
                )
            return NotImplemented if cloudpickle is None else super().reducer_override(obj)

    with _registering:
        Tensors(_NullWriter(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return waited


@cache
def _can_unpickle(dtype: torch.dtype) -> bool:
    """Whether torch can unpickle tensors of a dtype that it has pickled."""
    import torch

    try:
        one = pickle.loads(pickle.dumps(torch.empty(1, dtype=dtype, device="cpu")))
    except (pickle.PicklingError, ArithmeticError, AttributeError, LookupError, RuntimeError):
        return False
    except (TypeError, ValueError):
        return False
    return isinstance(one, torch.Tensor) and one.dtype == dtype


class _OfProgram:
    """A pickle, with the definitions that it refers to in the program that made it. Unpickling it
    returns the value itself.
    """

    def __init__(
        self, program: str, definitions: bytes, data: bytes, aside: Sequence[memoryview]
    ) -> None:
        self._parts = program, definitions, data, *map(pickle.PickleBuffer, aside)

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_of_program, self._parts


def _load_of_program(program: str, definitions: bytes, data: bytes, *aside: memoryview) -> Any:
    return _Definitions(program, definitions, data, aside).load()


class _Definitions(pickle.Unpickler):
    """Resolves the names of ``__main__`` that a pickle refers to.

    If this process runs the same program, they are taken from its own ``__main__``. Otherwise, or
    if the name is missing there (because it was defined under ``if __name__ == "__main__"``), the
    definition that was sent with the pickle is used.
    """

    def __init__(
        self, program: str, definitions: bytes, data: bytes, aside: Sequence[memoryview]
    ) -> None:
        super().__init__(io.BytesIO(data), buffers=aside)
        self._same = program == _program()
        self._definitions = definitions
        self._made: dict[str, Any] | None = None

    def find_class(self, module: str, name: str) -> Any:
        if module not in _MAIN_MODULES:
            return super().find_class(module, name)
        if self._same:
            try:
                return super().find_class("__main__", name)
            except AttributeError:
                pass
        if self._made is None:
            self._made = pickle.loads(self._definitions)
        return self._made[name]


def _program() -> str:
    """Identify the program that this process runs."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.realpath(file) if file else _PROCESS_ID
