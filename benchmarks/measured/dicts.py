"""Commands of a publisher or a reader: state dicts, of which a process holds some ranks' parts."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from inputs import layouts
from measured.counting import messages_since, operations, peak_rss, reset_peak
from measured.plugins import Observer

import torchstore_core as ts
from torchstore_cli.bench import floors, workload
from torchstore_cli.bench.measuring import process_size, timed

KEY = "policy"


class Dicts:
    """Commands on the parts of a state dict that this process holds.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._observer: Observer | None = None
        self._set: workload.Shapes = {}
        self._seed = 0
        self._finite = False
        self._ranks: Sequence[int] = ()
        self._world = 1
        self._warm: floors.WarmCopy | None = None
        self.parts: list[layouts.Part] = []

    def make(
        self,
        shapes: dict[str, list[int]],
        seed: int,
        filled: bool,
        layout: str = layouts.WHOLE,
        ranks: Sequence[int] = (0,),
        world: int = 1,
        limit: int = 0,
        finite: bool = False,
    ) -> dict[str, int]:
        """Make what these ranks of a world hold of the set (``filled``), or destinations for it;
        and the warm-copy floors, of at most ``limit`` bytes. Clients made from now on are observed.
        """
        self.drop()
        self._observer = Observer()
        self._set, self._seed, self._finite = workload.received(shapes), seed, finite
        self._ranks, self._world = ranks, world
        bits = seed if filled else None
        self.parts = [
            layouts.part(self._set, layout, rank, world, bits, finite=finite) for rank in ranks
        ]
        self._warm = floors.warm_copy(workload.sizes(self._set), limit)
        return {
            "nbytes": layouts.nbytes(self.parts),
            "floor_nbytes": self._warm.nbytes if self._warm is not None else 0,
        }

    def drop(self) -> None:
        """Drop the parts and the floors."""
        if self._warm is not None:
            self._warm.close()
        if self._observer is not None:
            self._observer.close()
        self.parts, self._warm, self._observer = [], None, None

    def kinds(self) -> list[str]:
        """The floors there are."""
        return [] if self._warm is None else list(self._warm.kinds)

    def floor(self, kind: str) -> float:
        """Seconds of one floor."""
        if self._warm is None:
            raise LookupError("no floors were made")
        return self._warm.kinds[kind]()

    def mark(self, number: int) -> None:
        """Write the mark of a version into the parts."""
        layouts.mark(self.parts, number)

    def put(self, number: int) -> dict[str, float]:
        """Publish the parts that are here, one after the other, each as its rank."""
        world = self._world

        async def put() -> None:
            for rank, part in zip(self._ranks, self.parts, strict=True):
                if world == 1:
                    await ts.put_state_dict(part, KEY, version=number)
                else:
                    await ts.put_state_dict(
                        part, KEY, version=number, participants=world, participant=rank
                    )

        start = time.perf_counter()
        self._run(put())
        return {"start": start, "end": time.perf_counter()}

    def get(self, number: int) -> dict[str, float]:
        """Get version ``number`` into all parts that are here, one after the other."""

        async def get() -> None:
            for part in self.parts:
                await ts.get_state_dict(KEY, part, version=number)

        start = time.perf_counter()
        self._run(get())
        end = time.perf_counter()
        moved = self._observer.moved("get_state_dict") if self._observer is not None else 0
        return {"start": start, "end": end, "moved": moved}

    def wrong(self, number: int, full: bool) -> list[str]:
        """Names of entries here that are not those of the version with this mark."""
        return self._wrong(lambda at: number, full)

    def _wrong(self, number: Callable[[int], int], full: bool) -> list[str]:
        finite = self._finite
        return layouts.wrong(self.parts, self._set, self._seed, number, full=full, finite=finite)

    # ---- control messages ------------------------------------------------------------------

    def put_counted(self, number: int) -> dict[str, Any]:
        """Publish the next version; its seconds, those of cloning the same tensors one by one, and
        how many control messages it took.
        """
        self.mark(number)
        before = self._run(operations())
        times = self._beside_clones(self.put, number)
        return {**times, "messages": self._run(messages_since(before))}

    def get_counted(self, number: int, full: bool) -> dict[str, Any]:
        """Get a version; seconds and messages as of :meth:`put_counted`, and what is wrong."""
        before = self._run(operations())
        times = self._beside_clones(self.get, number)
        messages = self._run(messages_since(before))
        return {**times, "messages": messages, "wrong": self.wrong(number, full)}

    def _beside_clones(
        self, operation: Callable[[int], dict[str, float]], number: int
    ) -> dict[str, float]:
        tensors = [layouts.local(value) for part in self.parts for value in part.values()]

        def measured() -> float:
            done = operation(number)
            return done["end"] - done["start"]

        measures = {"seconds": measured, "clone": lambda: floors.clone_each(tensors)}
        return floors.interleave(measures, number)

    # ---- partial publishes -----------------------------------------------------------------

    def put_some(self, number: int, every: int) -> dict[str, float]:
        """Publish version ``number``, whole, and the one after it, of which only every ``every``-th
        entry is given; seconds of both.
        """
        (part,) = self.parts
        some = {name: value for at, (name, value) in enumerate(part.items()) if _is(at, every)}

        def put(given: layouts.Part, mark: int, *, partial: bool) -> float:
            layouts.mark([given], mark)
            seconds: float = self._run(timed(ts.put_state_dict(given, KEY, partial=partial)))[0]
            return seconds

        whole = put(part, number, partial=False)
        return {"whole": whole, "partial": put(some, number + 1, partial=True)}

    def get_some(self, number: int, every: int, full: bool) -> dict[str, Any]:
        """Get the version that :meth:`put_some` made last, and check that it is whole."""
        (part,) = self.parts
        self._run(ts.get_state_dict(KEY, part, version=number + 1))
        return {"wrong": self._wrong(lambda at: number + 1 if _is(at, every) else number, full)}

    # ---- casts -----------------------------------------------------------------------------

    def widen(self) -> None:
        """Make what is here float32, of values that bfloat16 has too."""
        self.parts = [{name: _wide(value) for name, value in part.items()} for part in self.parts]

    def put_cast(self, server_pid: int) -> dict[str, Any]:
        """Publish as bfloat16; seconds, by how much the memory of this process (what it sees of
        the store's included) and the server's own grew at most, and what the store holds.
        """
        (part,) = self.parts
        gc.collect()
        server = process_size(server_pid)
        mine = process_size(os.getpid())["rss"]
        reset_peak()
        seconds, _ = self._run(timed(ts.put_state_dict(part, KEY, transfer_dtype=workload.DTYPE)))
        grown = peak_rss() - mine
        after = process_size(server_pid)
        servers = (after["rss"] - after["rss_shared"]) - (server["rss"] - server["rss_shared"])
        held = sum(volume.used_bytes for volume in self._run(ts.status()).volumes)
        return {"seconds": seconds, "grown": grown + max(0, servers), "held": held}


def _is(at: int, every: int) -> bool:
    """Whether an entry is one of every ``every``; not the first, which is the largest of all."""
    return at % every == every // 2


def _wide(value: torch.Tensor | ts.TensorShard) -> torch.Tensor:
    return layouts.local(value).float()
