"""``hash``: the key alone decides the volume, whichever client puts it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from torchstore_core.contracts.hooks import hookimpl
from torchstore_core.contracts.strategy import ClientFacts, Strategy, VolumeFacts

_MASK = (1 << 64) - 1


class HashStrategy(Strategy, frozen=True, tag="hash"):
    """Rendezvous hashing: each key ranks the volumes by a hash of both, and goes to the highest.

    The same key always goes to the same volume, alone or in a batch, from any process. Keys are
    spread evenly, and when a volume is lost or added, only the keys on that volume move. An entry
    of a state dict is a key (``<key>/<name>``), so a state dict is spread over all volumes; all
    shards of a tensor lie on one volume. When a volume is full, further puts go to the volume that
    is ranked next.
    """

    @property
    def by_key(self) -> bool:
        """Always true: the place depends on the key."""
        return True

    def place(
        self,
        client: ClientFacts,
        volumes: Sequence[VolumeFacts],
        nbytes: int,
        keys: Sequence[str] = (),
    ) -> Sequence[int]:
        """Return the volumes in the order in which the (first) key ranks them."""
        return _ranked(keys[0] if keys else "", tuple([v.id for v in volumes]))


@lru_cache(maxsize=1 << 15)  # the same keys are put again in every step
def _ranked(key: str, ids: tuple[str, ...]) -> tuple[int, ...]:
    own = _hash(key)
    return tuple(sorted(range(len(ids)), key=lambda at: (-_mixed(own, _hash_id(ids[at])), at)))


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


_hash_id = lru_cache(maxsize=4096)(_hash)


def _mixed(key: int, volume: int) -> int:
    """Return 64 bits that depend on all bits of both numbers (the finalizer of SplitMix64)."""
    z = (key ^ (volume * 0x9E3779B97F4A7C15)) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


@hookimpl
def torchstore_strategy() -> type[Strategy]:
    """See ``torchstore_core.contracts.hooks``."""
    return HashStrategy
