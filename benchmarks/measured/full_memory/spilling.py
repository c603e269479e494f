"""Commands of a measured process: more values than memory, through a store that spills them."""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import torchstore_core as ts

_PIECE = 8 << 20
# As many as the store has.
_WRITERS, _READERS = 2, 4
# Puts, or gets, that the client has under way.
_AT_ONCE = 3
_SMALL = "small"
_WITH_ROOM = "with-room"
_PAUSE_S = 0.002


class MoreThanMemory:
    """Commands on a store with a directory to spill to.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._values: list[torch.Tensor] = []
        self._raw_fd = -1

    def open(self, capacity: int, count: int, nbytes: int, seed: int) -> dict[str, Any]:
        """Start a store that spills to the current directory's disk, with one small value in it."""
        self._folder = tempfile.TemporaryDirectory(prefix="torchstore-bench-", dir=".")
        random = torch.Generator().manual_seed(seed)
        words = nbytes // 8
        self._values = [
            torch.randint(-(1 << 62), 1 << 62, (words,), generator=random) for _ in range(count)
        ]

        async def start() -> dict[str, Any]:
            client = await ts.initialize(
                capacity=capacity, prefault=capacity, spill=self._folder.name
            )
            await ts.put(_SMALL, torch.ones(256))
            return {"address": client.address, "server_pid": (await ts.status()).controller_pid}

        return self._run(start())  # type: ignore[no-any-return]

    def open_with_room(self) -> None:
        """Start a second store, which has room for all values."""
        room = sum(value.nbytes for value in self._values) + _PIECE

        async def start() -> None:
            await ts.initialize(store_name=_WITH_ROOM, capacity=room, prefault=room)

        self._run(start())

    def round(self) -> dict[str, Any]:
        """Put all values, and get all of them back in place; the same bytes on the raw disk."""
        wrong: list[str] = []

        async def through() -> dict[str, Any]:
            before = (await ts.status()).spill
            put_s, get_s = await self._through(wrong, when_full="spillable")
            after = (await ts.status()).spill
            return {
                "put": put_s,
                "get": get_s,
                "written": after.written_bytes - before.written_bytes,
                "read": after.read_bytes - before.read_bytes,
            }

        found: dict[str, Any] = self._run(through())
        wrote, read = self._raw()
        self._run(ts.delete_batch([f"v{at}" for at in range(len(self._values))]))
        return {**found, "raw write": wrote, "raw read": read, "wrong": wrong}

    def round_with_room(self, seconds: float) -> dict[str, Any]:
        """Put and get all values in the store that has room for them, until the time is over."""
        wrong: list[str] = []
        keys = [f"v{at}" for at in range(len(self._values))]

        async def over_and_over() -> None:
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                await self._through(wrong, store_name=_WITH_ROOM)
                await ts.delete_batch(keys, store_name=_WITH_ROOM)

        self._run(over_and_over())
        return {"wrong": wrong}

    def raw_round(self, seconds: float) -> dict[str, Any]:
        """Write the same bytes to the raw disk and read them, until the time is over."""
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._raw()
        return {"wrong": []}

    async def _through(self, wrong: list[str], **options: Any) -> tuple[float, float]:
        """Put all values, and get them back in place; returns the seconds of both."""
        into = [torch.empty_like(self._values[0]) for _ in range(_AT_ONCE)]
        store = {name: options[name] for name in ("store_name",) if name in options}
        begun = time.perf_counter()
        todo = iter(enumerate(self._values))

        async def put_some(turn: int) -> None:
            for at, value in todo:
                await ts.put(f"v{at}", value, **options)

        async def get_some(turn: int) -> None:
            for at, value in todo:
                await ts.get(f"v{at}", into[turn], **store)
                if not torch.equal(into[turn][::1000], value[::1000]):
                    wrong.append(f"v{at}")

        await asyncio.gather(*map(put_some, range(_AT_ONCE)))
        put = time.perf_counter()
        todo = iter(enumerate(self._values))
        await asyncio.gather(*map(get_some, range(_AT_ONCE)))
        return put - begun, time.perf_counter() - put

    def small(self, seconds: float) -> list[float]:
        """Seconds of each of the small gets that fit into the time, one every few milliseconds."""

        async def measure() -> list[float]:
            found: list[float] = []
            end = time.perf_counter() + seconds
            while (begun := time.perf_counter()) < end:
                await ts.get(_SMALL)
                found.append(time.perf_counter() - begun)
                await asyncio.sleep(_PAUSE_S)
            return found

        return self._run(measure())  # type: ignore[no-any-return]

    def close(self) -> None:
        """Drop the values, the directory, and the store with room."""
        self._run(ts.shutdown(store_name=_WITH_ROOM))
        self._values.clear()
        if self._raw_fd >= 0:
            os.close(self._raw_fd)
        if self._folder is not None:
            self._folder.cleanup()

    def _raw(self) -> tuple[float, float]:
        """Bytes a second of writing all values to a file, and of reading them, past the page cache
        where the file system can, with as many threads as the store has. It is always the same
        file, as the store's is: a new one would first have to be given blocks.
        """
        nbytes = self._values[0].nbytes
        if self._raw_fd < 0:
            flags = os.O_RDWR | os.O_TMPFILE
            folder = self._folder.name if self._folder is not None else "."
            try:
                self._raw_fd = os.open(folder, flags | os.O_DIRECT, 0o600)
            except OSError:
                self._raw_fd = os.open(folder, flags, 0o600)
        fd = self._raw_fd
        buffers = [mmap.mmap(-1, _PIECE) for _ in range(_READERS)]
        for buffer in buffers:
            buffer.write(os.urandom(_PIECE))

        def move(call: Callable[..., int], thread: int, threads: int) -> None:
            for at in range(thread, len(self._values), threads):
                for start in range(at * nbytes, (at + 1) * nbytes, _PIECE):
                    call(fd, [buffers[thread]], start)

        rates: list[float] = []
        with ThreadPoolExecutor(_READERS) as pool:
            for call, threads in ((os.pwritev, _WRITERS), (os.preadv, _READERS)):
                begun = time.perf_counter()
                moves = [pool.submit(move, call, thread, threads) for thread in range(threads)]
                for one in moves:
                    one.result()
                rates.append(nbytes * len(self._values) / (time.perf_counter() - begun))
        return rates[0], rates[1]
