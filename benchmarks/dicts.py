"""Measured in a publisher or a reader: state dicts, of which a process holds some ranks' parts."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import floors
import layouts
import torch
import workload
from watching import Observer

import torchstore_core as ts

KEY = "policy"


class Dicts:
    """Commands on the parts of a state dict that this process holds.

    Args:
        run: runs a coroutine on the process's event loop.
    """

    def __init__(self, run: Callable[[Any], Any]) -> None:
        self._run = run
        self._observer: Observer | None = None
        self._set: tuple[workload.Shapes, int] = ({}, 0)
        self._parts: list[layouts.Part] = []
        self._warm: floors.WarmCopy | None = None

    def make(
        self,
        shapes: dict[str, list[int]],
        seed: int,
        layout: str,
        ranks: list[int],
        world: int,
        filled: bool,
        limit: int = 0,
    ) -> dict[str, int]:
        """Make what these ranks of a world hold of the set (``filled``), or destinations for it;
        and the warm-copy floors, of at most ``limit`` bytes.
        """
        self.drop()
        self._observer = Observer()
        of = workload.received(shapes)
        self._set = of, seed
        bits = seed if filled else None
        self._parts = [layouts.part(of, layout, rank, world, bits) for rank in ranks]
        if limit:
            sizes = workload.sizes(of)
            self._warm = floors.WarmCopy(min(sum(sizes), limit), sizes)
            floors.interleave(self._warm.kinds, 0)
        return {
            "nbytes": layouts.nbytes(self._parts),
            "floor_nbytes": self._warm.nbytes if self._warm is not None else 0,
        }

    def drop(self) -> None:
        """Forget parts and floors."""
        if self._warm is not None:
            self._warm.close()
        if self._observer is not None:
            self._observer.close()
        self._parts, self._warm, self._observer = [], None, None
        gc.collect()

    def floor(self, kind: str) -> float:
        """Seconds of one floor."""
        if self._warm is None:
            raise LookupError("no floors were made")
        return self._warm.kinds[kind]()

    def kinds(self) -> list[str]:
        """The floors there are."""
        return [] if self._warm is None else list(self._warm.kinds)

    def mark(self, number: int) -> None:
        """Make it the next version."""
        layouts.mark(self._parts, number)

    def put(self, participants: int = 1, participant: int = 0) -> dict[str, Any]:
        """Publish the one part that is here."""
        (part,) = self._parts
        who = {"participants": participants, "participant": participant} if participants > 1 else {}
        start = time.perf_counter()
        self._run(ts.put_state_dict(part, KEY, **who))
        return {"start": start, "end": time.perf_counter()}

    def get(self, number: int, full: bool) -> dict[str, Any]:
        """Get version ``number`` into all parts that are here, one after the other."""

        async def get() -> None:
            for part in self._parts:
                await ts.get_state_dict(KEY, part, version=number)

        start = time.perf_counter()
        self._run(get())
        end = time.perf_counter()
        return {
            "start": start,
            "end": end,
            "moved": self._observer.moved("get_state_dict") if self._observer else 0,
            "wrong": layouts.wrong(self._parts, *self._set, number, full=full),
        }
