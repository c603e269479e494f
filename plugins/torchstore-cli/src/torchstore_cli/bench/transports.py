"""``torchstore bench --transports``: measures every transport that reaches a store's volumes."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import torch

import torchstore_core as ts
from torchstore_cli.connection import choose_address
from torchstore_cli.reports import TransportLine, TransportsReport
from torchstore_core.clients.session.session import Session
from torchstore_core.clients.session.volume_links import VolumeLinks
from torchstore_core.contracts.transport import TransportSpec
from torchstore_core.errors import PluginError, StoreTimeoutError, TransportError
from torchstore_core.machine import topology
from torchstore_core.plugins import calibration
from torchstore_core.plugins.registry import Registry

__all__ = ["fitted_latency", "measure_transports"]

_TRANSPORTS = "torchstore.transports"
_CHOICE = "TORCHSTORE_TRANSPORT"
_ROUNDS = 5
_SMALL_ROUNDS = 20
_NAME = "torchstore-bench-transports"
# The least part of the time of a small transfer that is taken for latency.
_LEAST_PART = 0.1
# Limit of puts per volume until every volume has had one, because the strategy chooses the volume.
_TRIES_PER_VOLUME = 4


def measure_transports(
    address: str | None,
    timeout: float,
    nbytes: int,
    progress: Callable[[str], object],
    *,
    save: bool,
) -> TransportsReport:
    """Measure each transport to each volume of a store, from this process. The report names all
    that are installed here or offered there; of those that were not measured, it says why.

    Args:
        address: the address of the store; None: a store that ends with this call.
        timeout: the time limit of each operation, in seconds.
        nbytes: the size of the large value.
        progress: called with the name of what is measured next.
        save: whether to save the results, so that they correct later bids.

    Raises:
        PluginError: a get returned other bytes than were put.
        TorchStoreError: the store cannot be reached or is too small.
    """
    return asyncio.run(_measure(address, timeout, nbytes, progress, save=save))


async def _measure(
    address: str | None,
    timeout: float,
    nbytes: int,
    progress: Callable[[str], object],
    *,
    save: bool,
) -> TransportsReport:
    lines: list[TransportLine] = []
    measured: dict[calibration.Link, calibration.Calibration] = {}
    offered: dict[str, list[str]] = {}
    async with _store(address, timeout, nbytes) as where:
        registry = Registry()
        names = registry.installed(_TRANSPORTS)
        for name in names:
            progress(name)
            with _chosen(name):
                client = await ts.connect(where, store_name=_NAME, timeout=timeout)
            try:
                session = await client._joined.session(None)
                places = {links.info.id: links.info.topology for links in session.volumes}
                offered = {links.info.id: [*links.info.offers] for links in session.volumes}
                async for line in _lines(client, session, _spec(registry, name), name, nbytes):
                    lines.append(line)
                    if line.error is None:
                        there = places[line.volume]
                        link = calibration.link_of(name, topology.probe(), there)
                        measured[link] = calibration.Calibration(
                            line.latency_s,
                            min(line.put_bytes_per_s, line.get_bytes_per_s),
                            time.time(),
                        )
            finally:
                await ts.shutdown(_NAME)
    lines += [
        TransportLine(name, volume, error="it is not installed here")
        for volume, there in offered.items()
        for name in sorted({*there}.difference(names))
    ]
    saved = str(calibration.save(measured)) if save and measured else None
    return TransportsReport(address, nbytes, lines, saved)


def _spec(registry: Registry, name: str) -> TransportSpec | None:
    """The transport's description; None if it does not load, or is blocked."""
    try:
        return registry.transport(name)
    except PluginError:
        return None


@asynccontextmanager
async def _store(address: str | None, timeout: float, nbytes: int) -> AsyncIterator[str]:
    if address:
        yield await choose_address(address)
        return
    room = 3 * nbytes + (64 << 20)
    await ts.initialize(store_name=f"{_NAME}-own", capacity=room, prefault=room, timeout=timeout)
    try:
        yield await ts.address(f"{_NAME}-own")
    finally:
        await ts.shutdown(f"{_NAME}-own")


@contextmanager
def _chosen(name: str) -> Iterator[None]:
    before = os.environ.get(_CHOICE)
    os.environ[_CHOICE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_CHOICE]
        else:
            os.environ[_CHOICE] = before


async def _lines(
    client: ts.Client, session: Session, spec: TransportSpec | None, name: str, nbytes: int
) -> AsyncIterator[TransportLine]:
    """Yield a line for each volume: what was measured, or why nothing was."""
    left: set[str] = set()
    for links in session.volumes:
        refusal = _refusal(links, spec, name, nbytes)
        if refusal is not None:
            yield TransportLine(name, links.info.id, error=refusal)
        else:
            left.add(links.info.id)
    prefix = f"torchstore-bench/{os.getpid()}/"
    tries = _TRIES_PER_VOLUME * len(left)
    failed = f"the store put none of {tries} values there: its strategy chooses, and the room left"
    try:
        for number in range(tries):
            if not left:
                return
            key = f"{prefix}{number}"
            value = torch.randint(256, (nbytes,), dtype=torch.uint8)
            try:
                first = await _timed(client.put(key, value))
            except (TransportError, StoreTimeoutError) as error:
                failed = error.message
                break
            volume = str((await client.stat(key)).volume)
            if volume not in left:
                continue
            left.discard(volume)
            try:
                yield await _line(client, name, volume, key, value, first)
            except (TransportError, StoreTimeoutError) as error:
                yield TransportLine(name, volume, error=error.message)
        for volume in sorted(left):
            yield TransportLine(name, volume, error=failed)
    finally:
        for key in await client.keys(prefix):
            await client.delete(key)


def _refusal(links: VolumeLinks, spec: TransportSpec | None, name: str, nbytes: int) -> str | None:
    """Why a transport to a volume is not measured; None if it can be."""
    if links.lost:
        return f"the volume is lost: {links.lost}"
    if any(one.spec.name == name for one in links.candidates(nbytes)):
        return None  # it may not have been ready yet: then a put tries it again
    if name in links.ranking.refusals:
        return links.ranking.refusals[name]
    if spec is not None and spec.in_band:
        return "it carries small values in control messages: `torchstore bench` measures those"
    if spec is not None and spec.max_bytes is not None and nbytes > spec.max_bytes:
        return f"it takes at most {spec.max_bytes:,} bytes"
    return "it does not bid"


async def _line(
    client: ts.Client, name: str, volume: str, key: str, value: torch.Tensor, first: float
) -> TransportLine:
    """Measure with the value that lies in that volume under ``key``; ``first``: the seconds that
    its put took.
    """
    nbytes = value.nbytes
    into = torch.empty_like(value)
    gets = [await _timed(client.get(key, into)) for _ in range(_ROUNDS)]
    if not torch.equal(into, value):
        raise PluginError(f"{name} brought other bytes than were put: please report this", key=key)
    puts: list[float] = []
    for _ in range(_ROUNDS):
        seconds = await _timed(client.put(key, value))
        if (await client.stat(key)).volume == volume:  # the strategy may choose another one
            puts.append(seconds)
    puts = puts or [first]
    rate = nbytes / statistics.median(gets)
    (inline,) = {
        entry["inline_up_to"] for entry in await client.explain() if entry["volume"] == volume
    }
    small = torch.zeros(max(inline + 1, 4096), dtype=torch.uint8)
    await client.put(f"{key}/small", small)
    latencies = [await _timed(client.get(f"{key}/small", small)) for _ in range(_SMALL_ROUNDS)]
    await client.delete(f"{key}/small")
    latency = fitted_latency(statistics.median(latencies), small.nbytes, rate)
    return TransportLine(name, volume, nbytes / statistics.median(puts), rate, latency)


def fitted_latency(seconds: float, nbytes: int, bytes_per_s: float) -> float:
    """Return what a transfer of few bytes takes beside moving them, in seconds.

    The rate is that of a large transfer. If it says that moving the bytes alone takes all of the
    measured time, or nearly, it does not hold for so few bytes; then all of the time counts as
    latency, which is the longest that it can be.

    >>> fitted_latency(0.003, 1_000_000, 1e9)
    0.002
    >>> fitted_latency(0.003, 1_000_000, 2.5e8)
    0.003
    """
    fitted = seconds - nbytes / bytes_per_s
    return fitted if fitted >= seconds * _LEAST_PART else seconds


async def _timed(work: Awaitable[object]) -> float:
    started = time.perf_counter()
    await work
    return time.perf_counter() - started
