"""The strategy contract: where a put goes, and which copy a get should use.

A strategy is data (a frozen msgspec Struct, so that it can be sent to another process without
pickle) plus pure methods, which the controller calls with plain values. The class is found by
its entry-point name in the group ``torchstore.strategies``.

Strategies may be nested: a field of type ``Strategy`` accepts any other strategy. See
``docs/writing-a-strategy.md`` and, to test your own, ``torchstore_core.testing``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["ClientFacts", "Strategy", "VolumeFacts"]


class ClientFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts about the client that puts or gets.

    ``rank`` is RANK and ``local_rank`` is LOCAL_RANK, or None if the variable is not set. For
    ``host_id``, see Topology. ``role`` describes, for the status and the log, a process that is not
    an ordinary client; it is empty for puts and gets.
    """

    pid: int
    host_id: str
    hostname: str
    rank: int | None = None
    local_rank: int | None = None
    role: str = ""


class VolumeFacts(msgspec.Struct, frozen=True, array_like=True):
    """Facts about a volume: its position in the store's list, its host, and its memory in bytes.

    ``host_id`` tells hosts apart, and is a random number for each start of a machine unless
    TORCHSTORE_HOST_ID names it; ``hostname`` is what people call the host. ``free_bytes`` does not
    count what would leave memory (``when_full=``) if there were no room otherwise.

    ``lost``: the volume's memory is permanently lost, or nothing may be placed there because it is
    drained. It stays in the list, so that the indices of the other volumes do not change, and the
    controller skips it if a strategy returns it.
    """

    id: str
    index: int
    host_id: str
    capacity_bytes: int
    free_bytes: int
    lost: bool = False
    hostname: str = ""


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """Base class of all strategies.

    Subclass it as ``class Mine(Strategy, frozen=True, tag="mine")``, with the entry-point name as
    the tag. The fields are the configuration, and must be hashable.

    Args:
        transport: how the bytes of the store are moved. A single name forces this transport (what
            it cannot move raises TransportUnavailableError); a tuple of names prefers them, in
            this order; None takes the cheapest bid. What users block stays blocked.
    """

    transport: str | tuple[str, ...] | None = None

    @property
    def copies(self) -> int:
        """How many volumes store a value, at least 1; if fewer are alive, all of these store it."""
        return 1

    @property
    def by_key(self) -> bool:
        """Whether the place of a value depends on its key. If so, :meth:`place` is called for each
        key of a batch separately, so that the batch is spread; otherwise it is called once, and the
        batch is stored together.
        """
        return False

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """Return the volumes to try for a put of ``nbytes`` bytes, best first, as positions in
        ``volumes`` (which are also their indices).

        The first :attr:`copies` of them that are alive and have room get the whole batch. Returning
        no volume is an error of the strategy.

        Args:
            volumes: all volumes of the store, including lost ones. There are at least two: a store
                with a single volume does not call the strategy.
            keys: the keys of the put; an entry of a state dict is ``<key>/<name>``. With
                :attr:`by_key` there is exactly one.
        """
        return range(len(volumes))

    def place_copy(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        key: str,
        copies: Sequence[int],
    ) -> Sequence[int]:
        """Return the volumes to try for a further copy of a value, because a volume that had one
        was lost or is drained: best first, as positions in ``volumes``.

        The first of them that is alive, has room and no copy yet gets it; if none has, any other
        volume does. The default is what :meth:`place` returns. A strategy that keeps copies apart
        overrides this: a volume that is best for a new value may be beside a copy that is left.

        Args:
            client: the process that put the value.
            volumes: see :meth:`place`; those that are drained are marked as lost.
            key: the key of the value.
            copies: the positions of the volumes whose copies stay; if there is none, the value is
                still on a volume that is drained.
        """
        return self.place(client, volumes, nbytes, (key,))

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        """Return the position in ``copies`` of the copy that a get should read.

        All of them are alive, and the first is the one that :meth:`place` preferred. The default
        is the first copy on the client's host, or else the first of all.
        """
        return next((i for i, v in enumerate(copies) if v.host_id == client.host_id), 0)
