"""Which volumes are in this process, for the endpoints of the actor that hosts them."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from torchstore_core.errors import TransportError

__all__ = ["Hosted", "hosting", "is_hosting"]

T = TypeVar("T")
_lock = threading.Lock()
_count = 0


class hosting:
    """While volumes are started in it: this process is an actor whose endpoints serve them."""

    def __enter__(self) -> None:
        _add(1)

    def __exit__(self, *_: object) -> None:
        _add(-1)


def _add(number: int) -> None:
    global _count
    with _lock:
        _count += number


def is_hosting() -> bool:
    """Whether volumes are being started by an actor."""
    return _count > 0


class Hosted(Generic[T]):
    """Server halves of one transport, by volume id."""

    def __init__(self) -> None:
        self._halves: dict[str, T] = {}

    def add(self, volume_id: str, half: T) -> None:
        """From now on it is found."""
        self._halves[volume_id] = half

    def remove(self, volume_id: str, half: T) -> None:
        """It is not found any more. Does nothing if another one took its place."""
        if self._halves.get(volume_id) is half:
            del self._halves[volume_id]

    def __getitem__(self, volume_id: str) -> T:
        """The one of a volume of this process.

        Raises:
            TransportError: it is not here.
        """
        found = self._halves.get(volume_id)
        if found is None:
            raise TransportError(f"volume {volume_id} is not in this process")
        return found
