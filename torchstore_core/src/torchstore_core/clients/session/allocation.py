"""Memory of a store that a client fills in place. Torch-free."""

from __future__ import annotations

import contextlib
import weakref

from torchstore_core.contracts.transport import Mapping, SupportsMapThrough
from torchstore_core.errors import TransportError
from torchstore_core.machine.virtual_memory import make_own
from torchstore_core.values import TensorMeta

# Those of this process, of whichever session, by the address of their tensor.
_live: weakref.WeakValueDictionary[int, Allocation] = weakref.WeakValueDictionary()


def is_allocated(address: int) -> bool:
    """Whether a tensor that begins there is in memory of a store, and has not been put. It will
    have other memory at the same address when it is, so nobody may go on writing to this.
    """
    found = _live.get(address)
    return found is not None and found.owner() is not None


class Allocation:
    """A mapping of memory that was granted to an unfinished put, for one tensor.

    Args:
        txn: the put.
        meta: of the tensor.
        place: the volume, the segment, and the offset of the memory.
        link: that has mapped it.

    Attributes:
        address: of the tensor's first byte.
        owner: of the mapping, as a weak reference: the tensors on it keep it alive.
    """

    def __init__(
        self,
        txn: int,
        meta: TensorMeta,
        place: tuple[int, int, int],
        link: SupportsMapThrough,
        mapping: Mapping,
    ) -> None:
        self.txn = txn
        self.meta = meta
        self.volume, self._segment, self._offset = place
        self.address, self._before, self.nbytes = mapping.address, mapping.offset, mapping.nbytes
        self.owner = weakref.ref(mapping.owner)
        self._link = link
        self._turn = [None]
        _live[self.address] = self

    def claim(self) -> bool:
        """Whether the caller is the one that puts the tensor; others copy it. Atomic."""
        try:
            self._turn.pop()
        except IndexError:
            return False
        return True

    def give_back(self) -> None:
        """What claimed it has changed nothing."""
        self._turn.append(None)

    def make_private(self) -> None:
        """From now on, what is written to the tensor is not in the store.

        Raises:
            TransportError: the link is closed, or the kernel refuses it.
        """
        mapping = Mapping(self.address, self._before, self.nbytes, self.owner())
        self._link.make_private(self._segment, self._offset, mapping)

    def make_own(self) -> bool:
        """Give the tensor memory of its own, with the same bytes. False: there is none."""
        with contextlib.suppress(OSError):
            make_own(self.nbytes, self.address)
            return True
        return False

    def leave(self) -> None:
        """The memory is about to be somebody else's: what is written to the tensor from now on must
        not get there.
        """
        owner = self.owner()  # without it, other memory may be there
        if owner is not None and self.claim():
            with contextlib.suppress(TransportError):
                self.make_private()

    def leave_in_child(self) -> None:
        """The same in a forked child, where it is still the parent's to fill."""
        owner = self.owner()  # without it, other memory may be there
        if owner is not None and not self.make_own():
            with contextlib.suppress(TransportError):
                self.make_private()
