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
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from torchstore_core.errors import TorchStoreError
from torchstore_transports.registered.memory_locks import MemoryLock, acquire, release

__all__ = ["SMALLEST", "Held", "Registrations"]

R = TypeVar("R")
#: Memory and its owner: address, bytes, owner.
Known = tuple[int, int, object]

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
        register: registers memory, given as ``(address, nbytes, owner)``, in one call, and returns
            a registration for each. What it raises of this package's errors means that none of it
            is registered; then each is tried alone, and not kept if it is refused.
        deregister: undoes registrations. Called in the thread that uses this, never by a dying
            owner.
        max_bytes, max_count: bounds of what is kept. What a transfer uses is never removed from
            under it; it is not kept if there is no room beside that.
        on_death: called when an owner has died, in any thread and at any moment: it must neither
            lock nor wait, and have :meth:`sweep` called soon.

    >>> made = Registrations(lambda memory: memory, print, max_bytes=0, max_count=1)
    >>> made.hold([(4096, 8192)], []).missing
    [0]
    """

    def __init__(
        self,
        register: Callable[[Sequence[Known]], Sequence[R]],
        deregister: Callable[[Sequence[R]], None],
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

    def hold(self, ranges: Iterable[tuple[int, int]], memory: Sequence[Known]) -> Held[R]:
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
            self._take(held, [(known[at], amount) for at, amount in used.items() if amount])
        except BaseException:
            self.release(held)
            raise
        kept = held.registrations
        held.missing.extend([at for at, place in enumerate(places) if place not in kept])
        return held

    def release(self, held: Held[R]) -> None:
        """A transfer has ended: nothing touches its memory any more."""
        for entry in held.entries:
            entry.users -= 1
        self._end([entry for entry in held.entries if entry.gone and not entry.users])
        held.entries.clear()

    def sweep(self) -> None:
        """Deregister memory whose owner has died, or, every now and then, that is not the same."""
        gone: dict[int, _Entry[R]] = {}
        while self._dead:
            entry = self._entries.get(self._dead.popleft())
            if entry is not None and entry.owner() is None:
                gone[entry.address] = entry
        now = time.monotonic()
        if now - self._examined > _EXAMINED_S:
            self._examined = now
            held = self._entries.items()
            gone |= {at: one for at, one in held if not one.lock.holds(thoroughly=False)}
        self._drop(gone.values())

    def close(self) -> None:
        """Deregister everything that no transfer uses, and the rest when its transfers end."""
        self._drop(list(self._entries.values()))

    # ---- inside -----------------------------------------------------------------------------

    def _take(self, held: Held[R], wanted: Sequence[tuple[Known, int]]) -> None:
        """Have memory registered of which a transfer uses so many bytes."""
        stale: list[_Entry[R]] = []
        fresh: list[Known] = []
        for known, amount in wanted:
            address, nbytes, owner = known
            entry = self._entries.get(address)
            if entry is not None:
                same = entry.owner() is owner and entry.nbytes == nbytes
                if same and entry.lock.holds():
                    self._entries[address] = self._entries.pop(address)  # the most recently used
                    self._use(held, entry)
                    continue
                stale.append(entry)
            if amount * _SHARE >= nbytes:
                fresh.append(known)
        self._drop(stale)
        for entry in self._make(fresh):
            self._use(held, entry)

    @staticmethod
    def _use(held: Held[R], entry: _Entry[R]) -> None:
        entry.users += 1
        held.entries.append(entry)
        held.registrations[entry.address] = entry.registration

    def _make(self, memory: Sequence[Known]) -> list[_Entry[R]]:
        locked = self._lock(memory)
        made = self._registered([known for known, _ in locked])
        entries: list[_Entry[R]] = []
        for (known, lock), registration in zip(locked, made, strict=True):
            if registration is None:
                release(lock)
            else:
                entries.append(self._enter(known, lock, registration[0]))
        self.made += len(entries)
        return entries

    def _lock(self, memory: Sequence[Known]) -> list[tuple[Known, MemoryLock]]:
        """Lock memory for which there is room, or room can be made. It is locked first: whatever
        becomes of it from now on shows.
        """
        locked: list[tuple[Known, MemoryLock]] = []
        spare = iter([entry for entry in self._entries.values() if not entry.users])
        nbytes = self.nbytes
        for known in memory:
            if known[1] > self._max_bytes:
                continue
            while nbytes + known[1] > self._max_bytes or len(self) + len(locked) >= self._max_count:
                if (entry := next(spare, None)) is None:
                    break
                nbytes -= entry.nbytes
                self._drop([entry])
            else:
                if (lock := acquire(known[0], known[1])) is not None:
                    locked.append((known, lock))
                    nbytes += known[1]
        return locked

    def _registered(self, memory: Sequence[Known]) -> list[tuple[R] | None]:
        """Register memory. What a limit refuses is None; it may still be possible to register what
        the transfer needs of it.
        """
        if not memory:
            return []
        try:
            return [(one,) for one in self._register(memory)]
        except TorchStoreError:
            if len(memory) == 1:
                return [None]
        return [one for known in memory for one in self._registered([known])]

    def _enter(self, known: Known, lock: MemoryLock, registration: R) -> _Entry[R]:
        address, nbytes, owner = known
        dead, on_death = self._dead, self._on_death

        def died(_: weakref.ref[object]) -> None:
            dead.append(address)
            if on_death is not None:
                on_death()

        entry = _Entry(address, nbytes, weakref.ref(owner, died), lock, registration)
        self._entries[address] = entry
        self.nbytes += nbytes
        return entry

    def _drop(self, entries: Collection[_Entry[R]]) -> None:
        for entry in entries:
            del self._entries[entry.address]
            self.nbytes -= entry.nbytes
            entry.gone = True
        self._end([entry for entry in entries if not entry.users])

    def _end(self, entries: Sequence[_Entry[R]]) -> None:
        if not entries:
            return
        # In this order: while it is locked, the pages stay where they are.
        self._deregister([entry.registration for entry in entries])
        for entry in entries:
            release(entry.lock)
