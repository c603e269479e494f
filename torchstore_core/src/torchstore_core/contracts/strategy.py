"""The strategy contract: where a put goes, and which copy a get should use.

A strategy is data (a frozen msgspec Struct, so that it crosses processes without pickle) plus two
pure methods that the controller calls with plain facts. Its type is found by entry-point name in
group ``torchstore.strategies``.

Strategies may be nested: a field typed ``Strategy`` takes any other one. See
``docs/writing-a-strategy.md`` and, to test yours, ``torchstore_core.testing``.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

__all__ = ["ClientFacts", "Strategy", "VolumeFacts"]


class ClientFacts(msgspec.Struct, frozen=True, array_like=True):
    """Who asks. ``rank``: RANK, ``local_rank``: LOCAL_RANK, None where there is none. ``host_id``:
    see Topology. ``role``: what else it is than a client, for status and the log; never of a put.
    """

    pid: int
    host_id: str
    hostname: str
    rank: int | None = None
    local_rank: int | None = None
    role: str = ""


class VolumeFacts(msgspec.Struct, frozen=True, array_like=True):
    """One volume: its place in the store's list, its host, and its memory in bytes.

    ``lost``: its memory is gone for good. The controller skips it wherever it is named, so that
    the numbers of the others stay as they are.
    """

    id: str
    index: int
    host_id: str
    capacity_bytes: int
    free_bytes: int
    lost: bool = False


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all strategies.

    Subclass it as ``class Mine(Strategy, frozen=True, tag="mine")`` with the entry-point name as
    the tag; fields are the configuration, and can be hashed.

    Args:
        transport: how the bytes of the store move: one name forces this transport (what it cannot
            move raises TransportUnavailableError), a tuple of names prefers them, in this order.
            None: the cheapest bid. What users block stays blocked.
    """

    transport: str | tuple[str, ...] | None = None

    @property
    def copies(self) -> int:
        """How many volumes a value goes to, at least 1; of fewer living ones, to all of them."""
        return 1

    @property
    def by_key(self) -> bool:
        """Whether a place belongs to a key: then :meth:`place` is called for each key of a batch by
        itself, and the batch is spread; else once, and the batch lies together.
        """
        return False

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """The volumes to try for a put of ``nbytes`` bytes, as positions in ``volumes`` (which are
        their indices), best first.

        The first :attr:`copies` of them that live and have room get the whole batch. An empty
        answer is an error of the strategy.

        Args:
            volumes: all of the store, lost ones too; more than one (with one there is no question).
            keys: of the put; an entry of a state dict is ``<key>/<name>``. With :attr:`by_key` one.
        """
        return range(len(volumes))

    def choose(self, client: ClientFacts, copies: Sequence[VolumeFacts]) -> int:
        """Position in ``copies`` of the copy a get should read. All of them live; the first is the
        one that :meth:`place` preferred. By default the first on the client's host, else the first.
        """
        return next((i for i, v in enumerate(copies) if v.host_id == client.host_id), 0)
