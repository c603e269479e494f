"""``torchstore bench``: a short measurement beside this machine's floors. Torch-free itself.

``make bench`` in the repository is the full measurement, with the same processes and floors. One
process puts a large value, and another one gets it and checks every byte.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torchstore_cli.bench.measuring import percentile
from torchstore_cli.bench.workers import Worker, Workers
from torchstore_cli.connection import choose_address
from torchstore_cli.reports import BenchReport, Floors, Large, Small
from torchstore_core.errors import TorchStoreError, TransportError
from torchstore_core.machine import copying

__all__ = ["measure"]

_ROUNDS = 5
_SMALL_BYTES = 1024
_SMALL_ROUNDS = 2
_SMALL_COUNT = 500  # operations of each kind in a round
_FLOOR_MAX = 1 << 30
_PATIENCE_S = 60.0
_SEED = 1


def measure(
    address: str | None, timeout: float, nbytes: int, progress: Callable[[str], object]
) -> BenchReport:
    """Measure in the store that ``address`` names, or (None) in one that ends with this call.

    Args:
        address: the address of the option; the environment's is ignored.
        timeout: the time limit of each operation, in seconds.
        nbytes: the size of the large value, rounded down to elements of 4 bytes, at least one.
        progress: called with the name of what is measured next.

    Raises:
        TransportError: the other process got other bytes.
        StoreFullError: the store has no room for the value twice.
    """
    where = asyncio.run(choose_address(address)) if address else None
    nbytes = max(nbytes // 4, 1) * 4
    prefix = f"torchstore-bench/{os.getpid()}/"
    with Workers() as workers:
        progress("starting two processes")
        publisher, reader = workers.get("publisher"), workers.get("reader")
        made = {"shapes": {f"{prefix}large": [nbytes // 2]}, "seed": _SEED}
        publisher.start("weights.make", filled=True, limit=_FLOOR_MAX, **made)
        reader.start("weights.make", filled=False, limit=0, **made)
        scale = nbytes / publisher.result(_PATIENCE_S)["floor_nbytes"]
        reader.result(_PATIENCE_S)
        try:
            first, store = _first_put(publisher, where, timeout, nbytes)
            reader.call("store.connect", address=store["address"], timeout=timeout)
            progress("small values")
            small, echo_s = _small_values(publisher, f"{prefix}small", store["server_pid"])
            progress("the large value")
            puts, gets = _large_value(publisher, reader, f"{prefix}large")
            floor = publisher.call(
                "weights.make_cold_floor", _PATIENCE_S, nbytes=int(nbytes / scale)
            )
        finally:
            with suppress(TorchStoreError):
                publisher.call("store.delete", prefix=prefix)
    best = {name: min(r[name] for r in rounds) for rounds in (puts, gets) for name in rounds[0]}
    floors = Floors(
        warm_copy_s=scale * min(best[name] for name in puts[0] if name != "put"),
        cold_copy_s=scale * floor["first copy into a memfd"],
        echo_s=echo_s,
    )
    return BenchReport(
        address=where,
        verified=True,
        copy_threads=copying.copy_threads(),
        floors=floors,
        small=small,
        large=Large(nbytes, first, best["put"], best["in_place"], best["zero_copy"]),
        ratios={
            "first_put": floors.warm_copy_s / first,
            "put": floors.warm_copy_s / best["put"],
            "get_in_place": floors.warm_copy_s / best["in_place"],
            "small_put_p50": small.put_p50_s / floors.echo_s,
            "small_get_p50": small.get_p50_s / floors.echo_s,
        },
    )


def _first_put(
    publisher: Worker, where: str | None, timeout: float, nbytes: int
) -> tuple[float, dict[str, Any]]:
    """Return the first put's seconds (into warm memory if the store is our own), and the store."""
    fresh, store = None, {}
    if where is None:
        room = 2 * nbytes + (16 << 20)  # an overwrite holds the old version and the new
        fresh = {"capacity": room + (64 << 20), "prefault": room, "timeout": timeout}
    else:
        store = publisher.call("store.connect", address=where, timeout=timeout)
    put = publisher.call("weights.put", _PATIENCE_S + timeout, stamp=0, turn=0, fresh=fresh)
    return put["times"]["put"], store or put


def _small_values(publisher: Worker, key: str, server_pid: int) -> tuple[Small, float]:
    """Return percentiles of puts and gets, and the median of an echo on the same kind of loop."""
    publisher.call("small.start_echo", kinds=["asyncio"])
    samples: list[dict[str, list[float]]] = []
    for turn in range(_SMALL_ROUNDS):
        reply = publisher.call(
            "small.one_by_one",
            count=_SMALL_COUNT,
            nbytes=_SMALL_BYTES,
            turn=turn,
            server_pid=server_pid,
            key=key,
        )
        _check(reply, key)
        samples.append(reply["samples"])
    publisher.call("small.end_echo")
    puts, gets = ([s for each in samples for s in each[name]] for name in ("put", "get"))
    small = Small(
        _SMALL_BYTES,
        percentile(puts, 0.5),
        percentile(puts, 0.99),
        percentile(gets, 0.5),
        percentile(gets, 0.99),
    )
    return small, min(statistics.median(each["asyncio"]) for each in samples)


def _large_value(
    publisher: Worker, reader: Worker, key: str
) -> tuple[list[dict[str, float]], list[dict[str, float]]]:
    """Return rounds of a put beside the floors, and of the gets of what it put."""
    puts: list[dict[str, float]] = []
    gets: list[dict[str, float]] = []
    for turn in range(1, _ROUNDS + 1):
        put = publisher.call("weights.put", _PATIENCE_S, stamp=turn, turn=turn, floor="warm")
        got = reader.call("weights.get", _PATIENCE_S, stamp=turn, turn=turn, full=True)
        _check(got, key)
        puts.append(put["times"])
        gets.append(got["times"])
    return puts, gets


def _check(reply: dict[str, Any], key: str) -> None:
    if reply["wrong"]:
        raise TransportError(
            f"another process got other bytes than were put under {key!r}: please report this",
            key=key,
        )
