"""References that own: a version lives as long as any process has one. Torch-free."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from torchstore_core.clients.session.holder import Holder, StorePlace, holder_of
from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    UnsupportedValueError,
)
from torchstore_core.machine.switches import is_on
from torchstore_core.machine.threads import at_fork
from torchstore_core.values import ObjectRef

T = TypeVar("T")

#: The environment variable that has every reference remember the line that made it.
TRACE = "TORCHSTORE_TRACE_REFS"
_PACKAGE = __name__.partition(".")[0]


@dataclasses.dataclass(init=False, repr=False, eq=False)
class _Encoded:
    """The fields that a reference is encoded with. Nothing makes one, so it needs no methods, which
    take most of the time that importing this module takes.
    """

    ref: ObjectRef
    store: StorePlace
    ticket: int


class HeldRef:
    """A reference to one version, or to an object without a key, which keeps it alive.

    ``put_object`` and ``hold`` return one. What it refers to can be read with ``get`` as long as
    any process has a reference to it, also after its key was overwritten or deleted; when the last
    one is gone, its memory is free again, within a second. A process stops holding a reference when
    the object is collected (``del``, or its scope ends), or when the process ends, however it ends.
    A forked child holds what its parent held at the fork.

    As that may be late (an exception that is kept keeps the variables of its functions), a ``with``
    block ends a reference when the block ends, and ``release`` at once.

    References can be pickled, encoded by msgspec (decode them with this class as the type), put
    into queues of ``multiprocessing``, and passed to actors. While one is on its way, it is held,
    too: until it was received or its sender has ended, and for a grace period after that. The
    period is 10 s, or what ``TORCHSTORE_REF_GRACE`` says (in seconds) where the server is started;
    a put that finds no room waits until it is over for what was received, then a second is enough.
    The same bytes may be decoded several times, each within the grace period after the time before;
    later, only while another reference keeps the version alive. Bytes that nobody ever decodes hold
    the version until the process that has encoded them ends, or until ``free``.

    A value that is put with references in it (an object, or an entry of a state dict) keeps what
    they refer to as long as it is there itself. They are of the store that it is put into.

    A receiver on the host of the sender holds a reference from the moment when it is decoded. On
    another host, it has to have joined the store; otherwise it holds it from its first call on.

    Two references are equal if they name the same version. A copy (``copy.copy``) is the reference
    itself, since it does not change. What ``dataclasses.asdict`` makes of one keeps nothing alive.

    >>> import asyncio, pickle
    >>> import torchstore_core as ts
    >>> async def main():
    ...     await ts.initialize(capacity=64 << 20)
    ...     ref = await ts.put_object([1, 2, 3])
    ...     received = pickle.loads(pickle.dumps(ref))
    ...     del ref
    ...     print(await ts.get(received))
    ...     await ts.put("policy", 1)
    ...     with await ts.hold("policy") as before:
    ...         await ts.put("policy", 2)
    ...         print(await ts.get(before), await ts.get("policy"))
    ...     await ts.shutdown()
    >>> asyncio.run(main())
    [1, 2, 3]
    1 2
    """

    __slots__ = ("__weakref__", "_holder", "_ident", "_place", "_ref", "_ticket")

    if TYPE_CHECKING:
        _holder: Holder | None
        _ident: int
        _place: StorePlace
        _ref: ObjectRef
        _ticket: int

    # msgspec encodes and decodes it as a dataclass, and reads the fields in this order.
    __dataclass_fields__: ClassVar[dict[str, Any]] = _Encoded.__dataclass_fields__
    __dataclass_params__: ClassVar[Any] = vars(_Encoded)["__dataclass_params__"]
    __annotations__ = _Encoded.__annotations__

    def __init__(self) -> None:
        raise TypeError("a HeldRef is returned by put_object and by hold")

    @classmethod
    def beginning(cls, holder: Holder) -> Beginning:
        """A reference whose hold is about to be requested; for the client's own use."""
        return Beginning(holder)

    # ---- what it refers to ----------------------------------------------------------------

    @property
    def ref(self) -> ObjectRef:
        """What it refers to, as a reference that keeps nothing alive."""
        return self._ref

    @ref.setter
    def ref(self, ref: ObjectRef) -> None:  # a decoder sets ref, store and ticket, each once
        _set_once(self, "_ref", ref)

    @property
    def key(self) -> str:
        """The key; empty for an object without one."""
        return self._ref.key

    @property
    def version(self) -> int:
        """The version of the key; the number of an object without one."""
        return self._ref.version

    @property
    def store_name(self) -> str:
        """The name of the store that it belongs to."""
        return self._place.name

    def __repr__(self) -> str:
        if not self.key:
            return f"HeldRef(object {self.version:x})"
        return f"HeldRef(key={self.key!r}, version={self.version})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HeldRef):
            return NotImplemented
        return self._ref == other._ref

    def __hash__(self) -> int:
        return hash(self._ref)

    def __copy__(self) -> HeldRef:
        return self

    def __deepcopy__(self, memo: object) -> HeldRef:
        return self

    # ---- its end --------------------------------------------------------------------------

    def release(self) -> None:
        """End this reference now, as if it had been collected: it keeps nothing alive any more, and
        is an ``ObjectRef`` in all but name. Others of the same version, here and elsewhere, are
        not touched. Does not block; does nothing the second time.
        """
        with _lock:
            _waiting.pop(id(self), None)
            holder, self._holder = self._holder, None
        if holder is not None:
            holder.end(self._ident)

    def __enter__(self) -> HeldRef:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.release()

    def __del__(self) -> None:
        if _waiting:
            _waiting.pop(id(self), None)
        holder = getattr(self, "_holder", None)
        if holder is not None:
            holder.end(self._ident)

    # ---- sending and receiving ------------------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (self._ref, self._place, self._lend())

    def _lend(self) -> int:
        # Without a holder, it is being decoded, or could not claim what it is yet: then it is
        # passed on as it came.
        holder: Holder | None = getattr(self, "_holder", None)
        if holder is None:
            return self._ticket
        ticket = holder.lend(self._ident)
        if ticket and _encoding.is_of_value:
            _encoding.lent = _encoding.lent or Lent()
            _encoding.lent.add(holder, ticket)
        return ticket

    @property
    def store(self) -> StorePlace:
        """Where it belongs, for its receiver."""
        return self._place

    @store.setter
    def store(self, place: StorePlace) -> None:
        _set_once(self, "_place", place)

    @property
    def ticket(self) -> int:
        """For encoders: every time that this is read, the reference is on its way once more. But
        not if ``dataclasses`` reads it, whose ``asdict`` and the like make nothing of it that can
        be received.
        """
        if sys._getframe(1).f_globals.get("__name__") == dataclasses.__name__:
            return 0
        return self._lend()

    @ticket.setter
    def ticket(self, ticket: int) -> None:
        _set_once(self, "_ticket", ticket)

    def __post_init__(self) -> None:
        self._holder = None
        self._ident = 0
        if not self._claim():
            with _lock:
                _waiting[id(self)] = weakref.ref(self)

    def _claim(self) -> bool:
        """Hold what has arrived, if its store can be reached; returns whether it does now."""
        holder = holder_of(self._place)
        if holder is None:
            return False
        self._ident = holder.next_id()
        holder.claim(self._ident, self._ticket, self._ref, caller())
        self._holder = holder
        return True


# What a reference refers to before the server has answered.
_UNKNOWN = ObjectRef("", 0)


class Beginning:
    """A reference whose hold is about to begin; it ends with the block, unless it is returned from
    there.

    It exists before the server is asked: if the answer never arrives, its end is what takes the
    hold back, or refuses the hold if the request arrives after that.
    """

    __slots__ = ("_ref", "ident")

    def __init__(self, holder: Holder) -> None:
        self.ident = holder.next_id()
        made = self._ref = HeldRef.__new__(HeldRef)
        made._holder = holder
        made._ident = self.ident
        made._place = holder.place
        made._ticket = 0
        holder.live[self.ident] = _UNKNOWN

    def __enter__(self) -> Beginning:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        holder = self._ref._holder
        if error is None or holder is None:
            return
        self._ref._holder = None  # who keeps the error has its frames, and in them the reference
        if isinstance(error, TorchStoreError) and not isinstance(
            error, StoreTimeoutError | StoreClosedError
        ):  # the server has answered that there is no hold
            holder.live.pop(self.ident, None)
        else:
            holder.end(self.ident)

    def refers(self, ref: ObjectRef) -> HeldRef:
        """The server has begun the hold, of this version."""
        made = self._ref
        made._ref = ref
        if made._holder is not None:
            made._holder.live[self.ident] = ref
        return made


def _set_once(ref: HeldRef, name: str, value: object) -> None:
    if hasattr(ref, name):
        raise AttributeError("a HeldRef does not change")
    setattr(ref, name, value)


def _received(ref: ObjectRef, place: StorePlace, ticket: int) -> HeldRef:
    """Rebuild a reference that was pickled."""
    made = HeldRef.__new__(HeldRef)
    made._ref, made._place, made._ticket = ref, place, ticket
    made.__post_init__()
    return made


# References whose store could not be reached when they arrived, by id(): equal ones are apart.
_waiting: dict[int, weakref.ref[HeldRef]] = {}
# Reentrant, because what a finalizer releases may end while this is held.
_lock = threading.RLock()


def claim_waiting() -> None:
    """Claim what has arrived before its store could be reached: there is a new session."""
    if not _waiting:
        return
    with _lock:
        for number, found in _waiting.copy().items():
            ref = found()
            if ref is not None and ref._claim():
                _waiting.pop(number, None)


at_fork(_lock)


# ---- references in values -----------------------------------------------------------------


class Lent:
    """The references that a value has in it, which were encoded with it. If it is not sent, they
    are not in flight any more when this is collected.

    Attributes:
        is_sent: whether a put with the value was sent, which says what is lent.
    """

    __slots__ = ("_pid", "_tickets", "is_sent")

    def __init__(self) -> None:
        self._tickets: dict[Holder, list[int]] = {}
        self._pid = os.getpid()
        self.is_sent = False

    def add(self, holder: Holder, ticket: int) -> None:
        """One more was encoded; it is held by ``holder``."""
        self._tickets.setdefault(holder, []).append(ticket)

    def at(self, key: str, place: StorePlace) -> list[int]:
        """The tickets, for the store that is to keep them with the value of ``key``.

        Raises:
            UnsupportedValueError: one belongs to another store.
        """
        for holder in self._tickets:
            if holder.place.incarnation != place.incarnation:
                raise UnsupportedValueError(
                    f"{key!r} has a reference in it to what is in store {holder.place.name!r}, "
                    f"which store {place.name!r} cannot keep alive there. Put its `ref`, which "
                    "keeps nothing alive, or the bytes that pickle makes of it, which are in "
                    "flight as long as this process lives",
                    key=key,
                )
        return [number for numbers in self._tickets.values() for number in numbers]

    def take_back(self) -> None:
        """Nobody has the value, but for the store that it was sent to, if it was. A forked child
        has only a copy of this.
        """
        tickets, self._tickets = self._tickets, {}
        if self._pid != os.getpid():
            return
        for holder, numbers in tickets.items():
            holder.take_back(numbers)

    def __del__(self) -> None:
        if not self.is_sent:
            self.take_back()


class _Encoding(threading.local):
    is_of_value = False
    lent: Lent | None = None


_encoding = _Encoding()


def lending(encode: Callable[[], T]) -> tuple[T, Lent | None]:
    """Encode a value; returns what that returns, and the references that are in the value."""
    before = _encoding.is_of_value, _encoding.lent
    _encoding.is_of_value, _encoding.lent = True, None
    try:
        return encode(), _encoding.lent
    finally:
        _encoding.is_of_value, _encoding.lent = before


# ---- which line made it -------------------------------------------------------------------


def caller() -> str:
    """The innermost line of the program that is not of this package, as ``file:line in function``;
    empty unless references are traced.
    """
    if not is_on(TRACE):
        return ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _OF_NO_USER:
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "unknown"


# A reference is received within a decoder, which tells nobody anything.
_OF_NO_USER = frozenset(
    (_PACKAGE, "pickle", "copyreg", "multiprocessing", "cloudpickle", "asyncio")
)
