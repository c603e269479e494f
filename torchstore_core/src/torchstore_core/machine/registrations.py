"""Memory of the user that stays registered with a device or a library while it is safe. Torch-free.

Registering memory pins its pages and takes longer than moving a few megabytes, and the same tensors
are moved at every step of a training. So their memory stays registered between transfers, which is
only right as long as it is the same memory. Three things may happen to it that nobody reports:

* its owner dies, and another one gets the address. Entries know their owners by weak references,
  and only serve the owner that they were made for;
* its owner is resized and lies elsewhere, or has another size: another address and size is another
  entry, and the old one goes;
* its owner gives the memory back and gets memory at the same address again, as FSDP does with
  parameters between their uses. The address, the size and the owner are what they were, but what is
  registered are the pages from before. The kernel knows: registered memory is also *locked*
  (``mlock``), and a lock disappears with its mapping. An entry whose lock is gone is stale.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from torchstore_core.errors import TorchStoreError
from torchstore_core.machine.memory_locks import MemoryLock, acquire, release

__all__ = ["SMALLEST", "Held", "Registrations"]

R = TypeVar("R")

#: Smaller memory is not kept: it shares its pages with that of others.
SMALLEST = 64 << 10
# Memory of which a batch uses less than this share is not registered as a whole.
_SHARE = 8
# How often, in seconds, entries are examined that nothing uses.
_EXAMINED_S = 1.0


class _Entry(Generic[R]):
    """Registered memory. ``gone``: it serves no further transfer, and ends with its last one."""

    __slots__ = ("address", "gone", "lock", "nbytes", "owner", "registration", "users")

    def __init__(
        self,
        address: int,
        nbytes: int,
        owner: weakref.ref[object],
        lock: MemoryLock,
        registration: R,
    ) -> None:
        self.address = address
        self.nbytes = nbytes
        self.owner = owner
        self.lock = lock
        self.registration = registration
        self.users = 0
        self.gone = False


class Held(NamedTuple, Generic[R]):
    """What a transfer uses, until :meth:`Registrations.release`.

    Args:
        registrations: of memory, by its address.
        missing: positions of those ranges of the transfer that are in none of it.
    """

    registrations: dict[int, R]
    missing: list[int]
    entries: list[_Entry[R]]


class Registrations(Generic[R]):
    """Registrations that are kept, least recently used first to go. For one thread.

    Args:
        register: registers ``(address, nbytes, owner)``. What it raises of this package's errors
            means that the memory is not kept.
        deregister: undoes that. Called in the thread that uses this, never by a dying owner.
        max_bytes, max_count: bounds of what is kept. What a transfer uses is never removed from
            under it; it is not kept if there is no room beside that.
        on_death: called when an owner has died, in any thread and at any moment: it must neither
            lock nor wait, and have :meth:`sweep` called soon.

    >>> made = Registrations(lambda address, nbytes, owner: nbytes, print, max_bytes=0, max_count=1)
    >>> made.hold([(4096, 8192)], []).missing
    [0]
    """

    def __init__(
        self,
        register: Callable[[int, int, object], R],
        deregister: Callable[[R], None],
        *,
        max_bytes: int,
        max_count: int,
        on_death: Callable[[], None] | None = None,
    ) -> None:
        self._register = register
        self._deregister = deregister
        self._max_bytes = max_bytes
        self._max_count = max_count
        self._on_death = on_death
        self._entries: dict[int, _Entry[R]] = {}  # by address; the least recently used one first
        self._dead: deque[int] = deque()
        self._examined = time.monotonic()
        #: Bytes that are registered here.
        self.nbytes = 0
        #: How often memory has been registered, since the beginning.
        self.made = 0

    def __len__(self) -> int:
        return len(self._entries)

    def hold(
        self, ranges: Iterable[tuple[int, int]], memory: Sequence[tuple[int, int, object]]
    ) -> Held[R]:
        """Have memory registered for a transfer.

        Args:
            ranges: what the transfer touches, as ``(first address, end)``.
            memory: what they may be part of, as ``(address, nbytes, owner)``. The owner's life is
                that of the memory; it can be weakly referenced.
        """
        self.sweep()
        known = {one[0]: one for one in memory if one[1] >= SMALLEST}
        addresses = sorted(known)
        used = dict.fromkeys(addresses, 0)
        places: list[int] = []  # which memory a range is in; 0: in none
        for start, end in ranges:
            at = bisect_right(addresses, start) - 1
            place = addresses[at] if at >= 0 else 0
            if place and end <= place + known[place][1]:
                used[place] += end - start
            else:
                place = 0
            places.append(place)
        held: Held[R] = Held({}, [], [])
        try:
            for address, amount in used.items():
                if amount:
                    self._take(held, *known[address], worth=amount * _SHARE >= known[address][1])
        except BaseException:
            self.release(held)
            raise
        kept = held.registrations
        held.missing.extend([at for at, place in enumerate(places) if place not in kept])
        return held

    def release(self, held: Held[R]) -> None:
        """A transfer has ended: nothing touches its memory any more."""
        while held.entries:
            entry = held.entries.pop()
            entry.users -= 1
            if entry.gone and not entry.users:
                self._end(entry)

    def sweep(self) -> None:
        """Deregister memory whose owner has died, or, every now and then, that is not the same."""
        while self._dead:
            entry = self._entries.get(self._dead.popleft())
            if entry is not None and entry.owner() is None:
                self._drop(entry)
        now = time.monotonic()
        if now - self._examined > _EXAMINED_S:
            self._examined = now
            for entry in list(self._entries.values()):
                if not entry.lock.holds(thoroughly=False):
                    self._drop(entry)

    def close(self) -> None:
        """Deregister everything that no transfer uses, and the rest when its transfers end."""
        for entry in list(self._entries.values()):
            self._drop(entry)

    # ---- inside -----------------------------------------------------------------------------

    def _take(
        self, held: Held[R], address: int, nbytes: int, owner: object, *, worth: bool
    ) -> None:
        entry = self._entries.get(address)
        if entry is not None:
            same = entry.owner() is owner and entry.nbytes == nbytes
            if same and entry.lock.holds():
                self._entries[address] = self._entries.pop(address)  # the most recently used one
            else:
                self._drop(entry)
                entry = None
        if entry is None and worth:
            entry = self._make(address, nbytes, owner)
        if entry is not None:
            entry.users += 1
            held.entries.append(entry)
            held.registrations[address] = entry.registration

    def _make(self, address: int, nbytes: int, owner: object) -> _Entry[R] | None:
        # It is locked first: whatever becomes of it from now on shows.
        if not self._has_room(nbytes) or (lock := acquire(address, nbytes)) is None:
            return None
        try:
            registration = self._register(address, nbytes, owner)
        except TorchStoreError:  # a limit; what the transfer needs of it may still be possible
            release(lock)
            return None
        dead, on_death = self._dead, self._on_death

        def died(_: weakref.ref[object]) -> None:
            dead.append(address)
            if on_death is not None:
                on_death()

        entry = _Entry(address, nbytes, weakref.ref(owner, died), lock, registration)
        self._entries[address] = entry
        self.nbytes += nbytes
        self.made += 1
        return entry

    def _has_room(self, nbytes: int) -> bool:
        """Make room, if that is possible."""
        if nbytes > self._max_bytes or not self._max_count:
            return False
        for entry in list(self._entries.values()):
            if self.nbytes + nbytes <= self._max_bytes and len(self) < self._max_count:
                break
            if not entry.users:
                self._drop(entry)
        return self.nbytes + nbytes <= self._max_bytes and len(self) < self._max_count

    def _drop(self, entry: _Entry[R]) -> None:
        del self._entries[entry.address]
        self.nbytes -= entry.nbytes
        entry.gone = True
        if not entry.users:
            self._end(entry)

    def _end(self, entry: _Entry[R]) -> None:
        # In this order: while it is locked, the pages stay where they are.
        self._deregister(entry.registration)
        release(entry.lock)
