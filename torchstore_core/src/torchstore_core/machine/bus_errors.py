"""Guards for mapped files that may become shorter while they are read. Torch-free.

An access to a page of a mapped file that is gone (another process has truncated the file), or that
the disk cannot read, ends the process by SIGBUS. In a guarded mapping it reads zeros, and the guard
says that something was lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torchstore_core.machine.copying import compiled
from torchstore_core.machine.virtual_memory import when_gone

_guard: Callable[[int, int], int] | None = compiled("guard")
_is_lost: Callable[[int], bool] = compiled("is_lost")
_unguard: Callable[..., None] = compiled("unguard")


def can_guard() -> bool:
    """Return whether mappings can be guarded: only the compiled module can."""
    return _guard is not None


class Guard:
    """Guards a mapping for as long as its owner lives. :func:`can_guard` holds.

    Args:
        address: of the mapping, the beginning of a page.
        nbytes: above 0.
        owner: the object with which the mapping ends.

    Raises:
        OSError: the process may not have a handler of SIGBUS.
    """

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        if _guard is None:
            raise OSError("mappings cannot be guarded without the compiled module")
        self._number = _guard(address, nbytes)
        # What was asked for last is called first: the guard ends before the mapping.
        when_gone(owner, functools.partial(_unguard, self._number))

    @property
    def lost(self) -> bool:
        """Whether something was read that is gone. Asked while the owner lives."""
        return _is_lost(self._number)
