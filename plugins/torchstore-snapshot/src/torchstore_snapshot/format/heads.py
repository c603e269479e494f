"""The head of a manifest: which snapshot it is, and when it was committed in the order of those
beside it. It stands in the first bytes of the file with a hash of its own, so that it can be read
without the rest, and also if the rest is damaged or of a newer version.
"""

from __future__ import annotations

import re

import msgspec

from torchstore_snapshot.format.hashes import digest_of

__all__ = ["HEAD_BYTES", "Head", "found_head", "make_head"]

#: So many bytes from the beginning of a manifest contain its head.
HEAD_BYTES = 512

_HEAD = re.compile(rb'\{"format":"[^"]*","version":\d+,"head":(\{[^{}]*\})')


class Head(msgspec.Struct, frozen=True):
    """What can be read of a manifest on its own.

    Args:
        take: the id of the take that wrote the snapshot.
        sequence: see :class:`~torchstore_snapshot.format.manifest.Manifest`.
        digest: the hash of both.
    """

    take: str
    sequence: int
    digest: str


_heads = msgspec.json.Decoder(Head)


def make_head(take: str, sequence: int) -> Head:
    """Return the head of a manifest."""
    return Head(take, sequence, _digest(take, sequence))


def found_head(data: bytes) -> Head | None:
    """Return the head from the first bytes of a manifest; None if there is none that is whole.

    >>> from torchstore_snapshot.format import manifest
    >>> data = manifest.encode(manifest.Manifest("t", 0.0, 1, (), {}, sequence=7))
    >>> found_head(data[:200]).sequence
    7
    >>> found_head(data[:200].replace(b":7,", b":8,")) is None
    True
    """
    found = _HEAD.match(data)
    if found is None:
        return None
    try:
        head = _heads.decode(found[1])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return head if head.digest == _digest(head.take, head.sequence) else None


def _digest(take: str, sequence: int) -> str:
    return digest_of(f"{take} {sequence}".encode())
