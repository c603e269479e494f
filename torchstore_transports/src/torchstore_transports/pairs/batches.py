"""How a batch of copies is cut into messages, in the same way by both halves. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchstore_core.contracts.transport import Copy

__all__ = ["MESSAGE_MAX", "Message", "Run", "groups", "messages", "parts"]

#: Size of the largest message in bytes, which bounds how much one wait of a pair is for.
MESSAGE_MAX = 8 << 20
# Pieces of at least this size are messages of their own, which need no staging. Smaller ones are
# gathered, because a message costs about as much as copying this many bytes.
_ALONE_MIN = 256 << 10
# The receiver of a put acknowledges this many bytes, or messages, at once.
_GROUP_BYTES = 32 << 20
_GROUP_MESSAGES = 64

Run = tuple[int, int]


class Message(NamedTuple):
    """A message: the ``(position, nbytes)`` runs of memory that it consists of, in order."""

    runs: list[Run]
    nbytes: int


def messages(runs: Iterable[Run]) -> Iterator[Message]:
    """Cut ``(position, nbytes)`` runs into messages.

    Only the sizes of the runs determine the cuts, so that the other end, whose runs have the same
    sizes at other positions, cuts in the same way. Adjacent runs of a message are joined after
    that.

    >>> [message.nbytes for message in messages([(0, 5), (5, 3), (100, 9 << 20)])]
    [8, 8388608, 1048576]
    >>> next(messages([(0, 5), (5, 3)])).runs
    [(0, 8)]
    """
    gathered: list[Run] = []
    total = 0
    for position, nbytes in runs:
        if nbytes >= _ALONE_MIN:
            if gathered:
                yield _joined(gathered, total)
                gathered, total = [], 0
            for at in range(0, nbytes, MESSAGE_MAX):
                size = min(MESSAGE_MAX, nbytes - at)
                yield Message([(position + at, size)], size)
            continue
        if total + nbytes > MESSAGE_MAX:
            yield _joined(gathered, total)
            gathered, total = [], 0
        if nbytes:
            gathered.append((position, nbytes))
            total += nbytes
    if gathered:
        yield _joined(gathered, total)


def groups(given: Iterable[Message]) -> Iterator[list[Message]]:
    """Divide messages into groups that are acknowledged together, in the same way at both ends.

    >>> [len(group) for group in groups(messages([(0, 80 << 20)]))]
    [4, 4, 2]
    """
    group: list[Message] = []
    total = 0
    for message in given:
        group.append(message)
        total += message.nbytes
        if total >= _GROUP_BYTES or len(group) >= _GROUP_MESSAGES:
            yield group
            group, total = [], 0
    if group:
        yield group


def _joined(runs: Sequence[Run], total: int) -> Message:
    joined: list[Run] = []
    for position, nbytes in runs:
        if joined and sum(joined[-1]) == position:
            joined[-1] = (joined[-1][0], joined[-1][1] + nbytes)
        else:
            joined.append((position, nbytes))
    return Message(joined, total)


def parts(copies: Sequence[Copy], most_copies: int, most_bytes: int) -> Iterator[list[Copy]]:
    """Cut a batch into parts that one request can describe, of at most ``most_copies`` copies and,
    unless a single copy is larger, ``most_bytes`` bytes.

    >>> [len(part) for part in parts([Copy(0, 0, 0, 4)] * 5, 2, 100)]
    [2, 2, 1]
    """
    part: list[Copy] = []
    total = 0
    for copy in copies:
        if part and (len(part) >= most_copies or total + copy.nbytes > most_bytes):
            yield part
            part, total = [], 0
        part.append(copy)
        total += copy.nbytes
    if part:
        yield part
