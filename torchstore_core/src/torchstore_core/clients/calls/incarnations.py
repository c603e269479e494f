"""What tells the versions of a store apart from those of an earlier one at the same address, which
lost its memory when its server ended. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from torchstore_core.errors import (
    ConfigurationError,
    ProtocolError,
    UnsupportedValueError,
    VersionGoneError,
)
from torchstore_core.values import ObjectRef
from torchstore_core.wire import messages as m

if TYPE_CHECKING:
    from torchstore_core.clients.calls.clock import Clock
    from torchstore_core.clients.session.channel import Channel
    from torchstore_core.clients.session.session import Session


class Renewed:
    """What this process knows of a store whose earlier incarnation it had joined, too.

    A version number that the caller has from before means nothing now, and to wait for it may be
    to wait for ever. So a number is only waited for if this process can have it from this
    incarnation: it was told a version of the key, or has itself put a version as high.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._highest = 1

    def told(self, keys: Iterable[str]) -> None:
        """This process has been told versions of these keys."""
        self._keys.update(keys)

    def has_put(self, keys: Iterable[str], version: int) -> None:
        """This process has put a version of these keys."""
        self._keys.update(keys)
        self._highest = max(self._highest, version)

    def check(self, keys: Sequence[str], min_version: int, store_name: str) -> None:
        """Raise VersionGoneError if the caller cannot have ``min_version`` from this store."""
        if min_version <= self._highest:
            return
        for key in keys:
            if key not in self._keys:
                raise VersionGoneError(
                    f"version {min_version} of {key!r} is not waited for: store {store_name!r} has "
                    "started again without its memory since this process joined it, and its "
                    "versions have started again, too. Start over without min_version=",
                    key=key,
                    details={"min_version": min_version},
                )


async def check_incarnation(
    session: Session, channel: Channel, clock: Clock, key: str, version: int, incarnation: int
) -> None:
    """Check that a ref belongs to the store of this session.

    Raises:
        VersionGoneError: it belongs to another one.
        StoreClosedError: so it may be this session's store that is gone.
    """
    current = session.welcome.incarnation
    if incarnation in (0, current):
        return
    await channel.call(m.Exists(channel.next_id(), []), m.Flags, clock.left())
    what = f"version {version} of {key!r}" if key else f"object {version:x}"
    raise VersionGoneError(
        f"{what} is not here: the ref is of incarnation {incarnation} of a store, and this is "
        f"incarnation {current} of store {session.welcome.store_name!r}. It belongs to another "
        "store, or this one has started without the memory of an earlier one",
        key=key,
        details={"incarnation": incarnation, "current_incarnation": current},
    )


def check_after(keys: Sequence[str], min_version: int | None, after: object) -> ObjectRef | None:
    """Check an ``after=``.

    Raises:
        UnsupportedValueError: it is not an ObjectRef.
        ConfigurationError: it is that of another key, or comes with ``min_version``.
    """
    if after is None:
        return None
    if not isinstance(after, ObjectRef):
        raise UnsupportedValueError(f"after is an ObjectRef or None, not {after!r}")
    if type(after.version) is not int or not 0 <= after.version < 1 << 62:
        raise UnsupportedValueError(f"{after!r} names no version")
    if list(keys) != [after.key] or min_version is not None:
        raise ConfigurationError(
            f"after={after!r} says what to wait for by itself: give its key alone, and no "
            "min_version="
        )
    return after


def refs_of(keys: Sequence[str], reply: m.Committed, incarnation: int) -> list[ObjectRef]:
    """The refs of the versions in a reply, one for each key."""
    if len(keys) == 1 and type(reply) is m.Committed:  # the usual case, very often
        return [ObjectRef(keys[0], reply.versions[0], incarnation)]
    if type(reply) is m.CommittedIn:
        every = zip(keys, reply.versions, reply.timelines, strict=True)
        return [ObjectRef(key, v, incarnation, timeline) for key, v, timeline in every]
    if len(keys) != len(reply.versions):
        raise ProtocolError(
            f"{len(keys)} keys were put, the server sent {len(reply.versions)} versions"
        )
    return list(map(ObjectRef, keys, reply.versions, repeat(incarnation)))
