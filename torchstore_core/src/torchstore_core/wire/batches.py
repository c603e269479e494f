"""Messages on the liveness connection, of which none is too long for it. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torchstore_core.wire import messages as m

#: The most numbers in one message. Each takes at most 10 bytes, so that even twice as many fit into
#: ``messages.MAX_LIVENESS_FRAME``.
MOST_NUMBERS = 1 << 11

#: A lease, and the positions of its entries (None: all of them).
Held = tuple[int, list[int] | None]


def runs(numbers: Sequence[int], most: int = MOST_NUMBERS) -> Iterator[list[int]]:
    """The numbers in order, so many at a time."""
    for start in range(0, len(numbers), most):
        yield list(numbers[start : start + most])


def releases(leases: Sequence[Held], most: int = MOST_NUMBERS) -> Iterator[m.Release]:
    """The messages that release these."""
    for some in runs([lease for lease, positions in leases if positions is None], most):
        yield m.Release(some)
    for held in _batches([one for one in leases if one[1] is not None], most):
        yield m.Release([], [(lease, positions or []) for lease, positions in held])


def aborts(txns: Sequence[int], unsettled: Collection[tuple[int, str]]) -> Iterator[m.Abort]:
    """The messages that abort these puts."""
    for some in runs(txns):
        yield m.Abort(some, list(unsettled))


def resumes(
    life: int,
    txns: Sequence[int],
    leases: Sequence[Held],
    asks: Sequence[int],
    most: int = MOST_NUMBERS,
) -> Iterator[m.Resume]:
    """The messages that say what a client has; see ``messages.Resume``."""
    for some in runs(txns, most):
        yield m.Resume(life, some, [], [])
    for some in runs(asks, most):
        yield m.Resume(life, [], [], some)
    for held in _batches(leases, most):
        yield m.Resume(life, [], held, [])
    yield m.Resume(life, [], [], [], last=True)


def _batches(leases: Sequence[Held], most: int) -> Iterator[list[Held]]:
    batch: list[Held] = []
    count = 0
    for lease, positions in leases:
        for some in [None] if positions is None else runs(positions, most):
            batch.append((lease, some))
            count += 1 + len(some or ())
            if count >= most:
                yield batch
                batch, count = [], 0
    if batch:
        yield batch
