"""The server halves in this process, for the endpoints of the actor that hosts their volumes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torchstore_core.contracts.transport import Segment, ServerContext, TransportServer
from torchstore_core.errors import TransportError, TransportUnavailableError

__all__ = ["HostedServer", "hosting", "is_hosting"]

_lock = threading.Lock()
_count = 0


class hosting:
    """A context in which volumes are started by an actor whose endpoints serve them."""

    def __enter__(self) -> None:
        _add(1)

    def __exit__(self, *_: object) -> None:
        _add(-1)


def _add(number: int) -> None:
    global _count
    with _lock:
        _count += number


def is_hosting() -> bool:
    """Return whether an actor is starting volumes in this process."""
    return _count > 0


class HostedServer(TransportServer):
    """A server half that works through the endpoints of the actor that hosts its volume."""

    _here: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        cls._here = {}

    @classmethod
    def of(cls, volume_id: str) -> Self:
        """Return the server half of a volume of this process.

        Raises:
            TransportError: the volume is not in this process.
        """
        found: Self | None = cls._here.get(volume_id)
        if found is None:
            raise TransportError(f"volume {volume_id} is not in this process")
        return found

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}
        self._volume_id = ""

    async def start(self, context: ServerContext, segments: Sequence[Segment]) -> bytes:
        if not is_hosting():
            raise TransportUnavailableError("only in a Monarch job: no actor hosts the volume")
        self._segments = {segment.id: segment for segment in segments}
        self._volume_id = context.volume_id
        self._here[context.volume_id] = self
        return context.volume_id.encode()

    async def close(self) -> None:
        if self._here.get(self._volume_id) is self:  # otherwise another one has taken its place
            del self._here[self._volume_id]
        self._segments = {}

    def checked(self, segment: int, offset: int, nbytes: int) -> Segment:
        """Return the segment, if these bytes are in it.

        Raises:
            TransportError: the bytes are not in the segment.
        """
        found = self._segments.get(segment)
        if found is None or offset < 0 or nbytes < 0 or offset + nbytes > found.nbytes:
            raise TransportError(f"{nbytes} bytes at {offset} are not in segment {segment}")
        return found
