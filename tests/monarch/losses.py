"""What the tests of killed processes ask a job about its store."""

from __future__ import annotations

from tests.monarch import acts
from tests.monarch.jobs import Job
from tests.support import until, until_none

import torchstore_core as ts

__all__ = [
    "AT_ONCE_S",
    "MB",
    "REPAIRED_S",
    "books_are",
    "end_store",
    "is_lost",
    "is_repaired",
    "leased_nothing",
    "put_hold_and_die",
    "says_lost",
    "try_get",
]

MB = 1 << 20
# The engine itself sees a killed process after some 9 s: on one host nobody waits for it.
AT_ONCE_S = 7.0
REPAIRED_S = 60.0


async def end_store(job: Job) -> None:
    """What a test has killed is no longer its store's; nothing else of the store is left."""
    await job.root(acts.shutdown)
    await until_none(job.left)


async def says_lost(job: Job, worker: int, key: str) -> bool:
    """Whether a get of a worker ends with that the key is lost."""
    try:
        await job.at(worker, acts.get, key)
    except ts.ObjectLostError as error:
        return error.key == key
    except ts.TransportError:  # the engine knows it, the server does not yet
        return False
    return False


async def is_lost(index: int) -> bool:
    return bool((await ts.status()).volumes[index].lost)


async def is_repaired() -> bool:
    """Whether nothing lacks copies."""
    repair = (await ts.status()).repair
    return not (repair.values or repair.scanning)


async def leased_nothing() -> bool:
    return (await acts.books())[1:] == (0, 0)


async def try_get(job: Job, worker: int, key: str) -> object:
    try:
        return await job.at(worker, acts.get_shape, key)
    except ts.StoreClosedError:
        return None


async def books_are(job: Job, *expected: int) -> bool:
    books = await job.root(acts.books)
    return bool(books == expected)


async def put_hold_and_die(job: Job) -> None:
    """Worker 1 is killed. What it held is free at once, whatever its host: that watches it."""
    await job.at(1, acts.put_ones_and_hold, "held")
    await job.at(1, acts.begin_put, "unfinished", 2 * MB)
    await until(lambda: books_are(job, 3, MB, 2 * MB))
    await job.root(acts.kill, await job.at(1, acts.pid))
    await until(lambda: books_are(job, 1, 0, 0), AT_ONCE_S)
    await job.root(acts.put_ones, "after", MB)
    assert await job.at(0, acts.get_shape, "after") == ((MB,), [1])
    assert job.ended() is None


async def begins_anew(job: Job) -> bool:
    """Start a store, unless one whose end nobody has seen yet has the name."""
    try:
        await job.root(acts.initialize)
    except ts.ConfigurationError:
        return False
    return True
