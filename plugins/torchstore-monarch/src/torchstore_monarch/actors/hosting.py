"""Which volumes are in this process, for the endpoints of the actor that hosts them."""

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


class HostedServer(TransportServer):
    """A server half that works through the endpoints of the actor that hosts its volume."""

    _here: ClassVar[dict[str, Any]]

    def __init_subclass__(cls) -> None:
        cls._here = {}

    @classmethod
    def of(cls, volume_id: str) -> Self:
        """That of a volume of this process.

        Raises:
            TransportError: it is not here.
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
        if self._here.get(self._volume_id) is self:  # else another one took its place
            del self._here[self._volume_id]
        self._segments = {}

    def checked(self, segment: int, offset: int, nbytes: int) -> Segment:
        """The segment, if these bytes are in it.

        Raises:
            TransportError: they are not.
        """
        found = self._segments.get(segment)
        if found is None or offset < 0 or nbytes < 0 or offset + nbytes > found.nbytes:
            raise TransportError(f"{nbytes} bytes at {offset} are not in segment {segment}")
        return found
