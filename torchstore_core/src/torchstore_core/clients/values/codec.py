"""Any Python object to bytes and back, with the same types.

msgpack where that is exact; tuples, sets and the like travel as extensions, so that they come back
as what they were. Pickle only for the rest, only here, only in clients. The server keeps bytes.

It runs on the event loop and cannot be interrupted, so its time is bounded by what the value takes
in memory: every object is looked at once, however often it is in the value; msgpack has each of its
bytes copied once for every level of tuples and sets around it, of which there are at most 64. That
is some microseconds for a config, and about a second for some million objects: such data should be
tensors, or bytes. Decoding is linear in the bytes, for msgpack refers to nothing twice.

Pickle refers to classes and functions by name. What has no name that others know is sent by value,
where cloudpickle is installed: lambdas, closures, local classes; and classes and functions of
``__main__``, a notebook, say. A reader that runs the same program has the latter itself, and gets
its own ones, so that ``isinstance`` and enums go on to work between processes of one program.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
import threading
from functools import cache
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from torchstore_core.errors import UnsafeObjectError, UnsupportedValueError
from torchstore_core.values import ObjectMeta

if TYPE_CHECKING:
    import torch

__all__ = ["NoValue", "decode_object", "encode_object"]

MSGPACK = "msgpack"
PICKLE = "pickle"

_TUPLE, _SET, _FROZENSET, _BYTEARRAY, _COMPLEX, _INTEGER, _PAIRS = range(1, 8)
_MAX_DEPTH = 64
# What is in a value more than once is written more than once: if it has up to so many bytes,
# without being counted (each reference takes 8 in memory, too); else up to so many together.
_SMALL = 256
_MAX_REPEATED = 4 << 20
_ATOMS = frozenset((type(None), bool, float))
_CONTAINERS = frozenset((list, tuple, dict, set, frozenset, bytearray))
_encode = msgspec.msgpack.Encoder().encode
_Ext = msgspec.msgpack.Ext


class NoValue:
    """A base of classes whose objects are no values that a key may have beside others."""

    __slots__ = ()
    _refusal: ClassVar[str]  # why not, and what to do


class _NotExactError(Exception):
    """msgpack would not give back the same object."""


def encode_object(key: str, value: Any, *, allow_pickle: bool) -> tuple[ObjectMeta, bytes]:
    """Bytes of ``value`` and how they are encoded.

    Raises:
        UnsafeObjectError: it needs pickle and that is not allowed.
        UnsupportedValueError: it cannot be pickled either.
    """
    try:
        return ObjectMeta(MSGPACK), _encode(_to_wire(value, set(), {}, 0))
    except (_NotExactError, UnicodeEncodeError):
        if not allow_pickle:
            raise UnsafeObjectError(
                f"{key!r}: a {type(value).__qualname__} needs pickle, which allow_pickle=False "
                "forbids; put tensors, numbers, str, bytes, and plain containers of them, none of "
                "them in two places",
                key=key,
            ) from None
    try:
        try:
            data = _pickled(value)
        except Exception:
            if "torch" in sys.modules:  # of a tensor we can say more
                _check_tensors(key, value)
            raise
        if _may_name(_REBUILT, data):
            _check_tensors(key, value)
        return ObjectMeta(PICKLE), data
    except UnsupportedValueError:
        raise
    except Exception as error:
        hint = "" if _cloudpickle() else "; lambdas, local classes and the like need cloudpickle"
        raise UnsupportedValueError(
            f"{key!r}: a {type(value).__qualname__} cannot be stored: {error}{hint}", key=key
        ) from error


def decode_object(
    key: str, meta: ObjectMeta, data: bytes | bytearray, *, allow_pickle: bool
) -> Any:
    """The object that :func:`encode_object` made ``data`` of.

    Raises:
        UnsafeObjectError: it was pickled and that is not allowed.
        UnsupportedValueError: it cannot be rebuilt here (its class is missing, say).
    """
    if meta.codec not in (MSGPACK, PICKLE):
        raise UnsupportedValueError(f"{key!r} is encoded as {meta.codec!r}, unknown here", key=key)
    if meta.codec == PICKLE and not allow_pickle:
        raise UnsafeObjectError(
            f"{key!r} was stored with pickle, which allow_pickle=False forbids to load", key=key
        )
    try:
        if meta.codec == MSGPACK:
            return msgspec.msgpack.decode(data, ext_hook=_extension)
        return pickle.loads(data)
    except Exception as error:
        hint = "is its class importable, or cloudpickle installed where it is put?"
        if isinstance(error, ModuleNotFoundError) and str(error.name).startswith("cloudpickle"):
            hint = "it was put by value: install cloudpickle here, too"
        raise UnsupportedValueError(
            f"{key!r} cannot be rebuilt here: {error!r} ({hint})", key=key
        ) from error


# What was encoded already, cannot change, and is not small, by id: a second time it is the same
# again. msgpack writes it out again, too, and of tuples in tuples that doubles with every level;
# at 0: how many bytes were written again.
_Known = dict[int, Any]


def _again(known: _Known, nbytes: int) -> None:
    """Once more ``nbytes``: too many are pickle's business, which writes everything once."""
    known[0] = known.get(0, 0) + nbytes
    if known[0] > _MAX_REPEATED:
        raise _NotExactError


def _long(known: _Known, value: str | bytes) -> None:
    """One that is not small is written."""
    if id(value) in known:
        _again(known, len(value))
    known[id(value)] = value


def _to_wire(value: Any, seen: set[int], known: _Known, depth: int) -> Any:
    kind = type(value)
    if kind is str:
        if len(value) > _SMALL:
            _long(known, value)
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
            _long(known, value)
        return value
    if kind is complex:
        return _packed(_COMPLEX, [value.real, value.imag])
    if depth > _MAX_DEPTH or kind not in _CONTAINERS:
        raise _NotExactError
    depth += 1
    if kind is tuple or kind is frozenset:
        if known and (made := known.get(id(value))) is not None:
            _again(known, len(made.data))
            return made
        before = len(seen)
        inner = [x if type(x) in _ATOMS else _to_wire(x, seen, known, depth) for x in value]
        data = _encode(inner)
        made = _Ext(_TUPLE if kind is tuple else _FROZENSET, data)
        if len(data) > _SMALL and len(seen) == before:  # nothing in it can change either
            known[id(value)] = made
        return made
    # Two references to one mutable object must stay two references to one object (and a cycle a
    # cycle): that is pickle's business.
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
        return _packed(_PAIRS, pairs)
    if kind is bytearray:
        return _Ext(_BYTEARRAY, bytes(value))
    return _packed(_SET, [_to_wire(x, seen, known, depth) for x in value])


def _packed(tag: int, value: Any) -> _Ext:
    return _Ext(tag, _encode(value))


def _extension(tag: int, data: memoryview) -> Any:
    if tag == _BYTEARRAY:
        return bytearray(data)
    if tag == _INTEGER:
        return int.from_bytes(data, "little", signed=True)
    inner = msgspec.msgpack.decode(data, ext_hook=_extension)
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


# ---- what has no name that others know ----------------------------------------------------

# What the program's own module is called in it, and in processes that multiprocessing has spawned.
_MAINS = ("__main__", "__mp_main__")
_MARK = b"_main__"
# Opcodes of strings and bytes, which lie outside of a pickle's frames if they are large (64 KiB),
# and how many bytes of length follow.
_LARGE = 64 << 10
_FRAME = 0x95
_STRINGS = {0x42: 4, 0x58: 4, 0x8D: 8, 0x8E: 8, 0x96: 8}
# Of a process without a file that it runs (a notebook), and of its forks.
_HERE = os.urandom(8).hex()


def _pickled(value: Any) -> bytes:
    """By name where readers know the names, else by value."""
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        if (cloudpickle := _cloudpickle()) is None:
            raise
        return _by_value(cloudpickle, value)
    if not _may_name(_MARK, data):
        return data
    names = _Names()
    names.dump(value)
    if not names.found or (cloudpickle := _cloudpickle()) is None:
        return data
    try:
        definitions = _by_value(cloudpickle, names.found)
    except (pickle.PicklingError, AttributeError, TypeError):
        return data  # they use what cannot be sent: for readers of the same program alone
    own = _OfProgram(_program(), definitions, data)
    return pickle.dumps(own, protocol=pickle.HIGHEST_PROTOCOL)


def _cloudpickle() -> Any | None:
    """Only imported when it is needed; None if it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle


# What is by value is a register of all threads. Whatever is pickled may itself put something.
_registering = threading.RLock()


def _after_fork_in_child() -> None:
    global _registering
    _registering = threading.RLock()  # a thread of the parent may have had it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _by_value(cloudpickle: Any, value: Any) -> bytes:
    with _registering:
        return _with_main_by_value(cloudpickle, value)


def _with_main_by_value(cloudpickle: Any, value: Any) -> bytes:
    spawned: ModuleType | None = sys.modules.get("__mp_main__")
    if spawned is None or spawned.__name__ in (
        "__main__",  # the same module, and known to cloudpickle by this name
        *cloudpickle.list_registry_pickle_by_value(),
    ):
        return bytes(cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    cloudpickle.register_pickle_by_value(spawned)
    try:
        return bytes(cloudpickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))
    finally:
        cloudpickle.unregister_pickle_by_value(spawned)


def _may_name(mark: bytes, data: bytes) -> bool:
    """Whether a pickle may refer to something with ``mark`` in its name. Without looking into large
    strings, which would take as long as pickling them.
    """
    if len(data) < _LARGE:
        return mark in data
    at = 2  # after the protocol
    while at < len(data):
        width = 8 if data[at] == _FRAME else _STRINGS.get(data[at])
        if width is None:
            return data.find(mark, at) >= 0
        start = at + 1 + width
        end = start + int.from_bytes(data[at + 1 : start], "little")
        if data[at] == _FRAME and data.find(mark, start, end) >= 0:
            return True
        at = end
    return False


class _Names(pickle.Pickler):
    """Finds the classes and functions of ``__main__`` that a pickle refers to."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL)
        self.found: dict[str, Any] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ in _MAINS:
            self.found[obj.__qualname__] = obj
        return NotImplemented


class _Nowhere:
    def write(self, data: Any) -> int:
        return len(data)


# ---- tensors inside of objects ------------------------------------------------------------

# What torch calls its functions that make tensors of a pickle.
_REBUILT = b"_rebuild_"


def _check_tensors(key: str, value: Any) -> None:
    """torch pickles the bytes that a storage has, and makes up those that it lacks when they are
    loaded; of some dtypes it pickles what it cannot load.

    Raises:
        UnsupportedValueError: a tensor inside of the object is of this kind.
    """
    import torch

    from torchstore_core.clients.values.tensors import check_storage

    cloudpickle = _cloudpickle()
    base: Any = pickle.Pickler if cloudpickle is None else cloudpickle.Pickler

    class Tensors(base):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, torch.Tensor):
                check_storage(key, obj)
                if not _comes_back(obj.dtype):
                    raise UnsupportedValueError(
                        f"{key!r}: torch cannot unpickle a tensor of {obj.dtype}, so it cannot be "
                        "stored inside of an object; put it by itself, or in a state dict",
                        key=key,
                    )
                return type(None), ()
            return NotImplemented if cloudpickle is None else super().reducer_override(obj)

    with _registering:
        Tensors(_Nowhere(), protocol=pickle.HIGHEST_PROTOCOL).dump(value)


@cache
def _comes_back(dtype: torch.dtype) -> bool:
    """Whether torch can unpickle what it pickles of a dtype."""
    import torch

    try:
        one = pickle.loads(pickle.dumps(torch.empty(1, dtype=dtype, device="cpu")))
    except (pickle.PicklingError, ArithmeticError, AttributeError, LookupError, RuntimeError):
        return False
    except (TypeError, ValueError):
        return False
    return isinstance(one, torch.Tensor) and one.dtype == dtype


class _OfProgram:
    """A pickle, and what it names of the program that made it; becomes the value when loaded."""

    def __init__(self, program: str, definitions: bytes, data: bytes) -> None:
        self._parts = program, definitions, data

    def __reduce__(self) -> tuple[Any, ...]:
        return _load_of_program, self._parts


def _load_of_program(program: str, definitions: bytes, data: bytes) -> Any:
    return _Definitions(program, definitions, data).load()


class _Definitions(pickle.Unpickler):
    """Takes what the pickle names of ``__main__`` from this one if it is the same program; else, or
    if there is no such name (it was defined under ``if __name__ == "__main__"``), from what came
    along.
    """

    def __init__(self, program: str, definitions: bytes, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self._same = program == _program()
        self._definitions = definitions
        self._made: dict[str, Any] | None = None

    def find_class(self, module: str, name: str) -> Any:
        if module not in _MAINS:
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
    """Which program this process runs."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return os.path.realpath(file) if file else _HERE
