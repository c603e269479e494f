"""What the ranks do."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import msgspec

from torchstore_core import topology
from torchstore_core.client_side.lane import client_facts, handshake
from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    TransportUnavailableError,
    from_wire,
)
from torchstore_core.strategy_data import encode_strategy
from torchstore_monarch.protocol import Asked
from torchstore_monarch.spmd.orders import MEMBER, RootOrder, Where

if TYPE_CHECKING:
    from torchstore_core.runtimes.spmd import SPMDEnv

__all__ = ["RankPart", "RootProcess", "start"]

log = logging.getLogger(__name__)

_WHERE = "where"


async def start(
    options: StoreOptions, env: SPMDEnv, store: Any, timeout: float
) -> tuple[str, Runtime | None]:
    """Start the store, or wait until rank 0 has: the socket of this host, and this rank's part.

    Args:
        store: a torch.distributed.Store that only this start uses.
        timeout: seconds for all of it.

    Raises:
        StoreTimeoutError: some rank did not come in time.
        TorchStoreError: rank 0 could not start the store; all ranks get its error.
    """
    deadline = time.monotonic() + timeout
    host = env.rank // env.local_world_size
    if env.local_rank == 0:
        await _set(store, f"worker/{host}", await asyncio.to_thread(_start_worker, env, timeout))
    part = RankPart(env)
    try:
        if env.rank == 0:
            where = await _start_root(part.root, options, env, store, deadline)
            await _set(store, _WHERE, msgspec.json.encode(where))
        else:
            data = await _get(store, _WHERE, deadline, "rank 0 to start the store")
            where = msgspec.json.decode(data, type=Where)
        if where.error:
            raise from_wire(where.error, where.message, None, {})
        address = await part.join(where, deadline)
        await _set(store, f"joined/{env.rank}", b"1")
        if env.rank == 0:  # if it left before all have joined, the store would end under them
            for rank in range(env.world_size):
                await _get(store, f"joined/{rank}", deadline, f"rank {rank} to join the store")
    except BaseException:
        await part.stop(0.0)
        raise
    return address, part


class RankPart(Runtime):
    """What a rank holds of a store: a session that counts as a member's, and rank 0 the root."""

    def __init__(self, env: SPMDEnv) -> None:
        self.ranks = env.rank, env.local_rank
        self.root = RootProcess()
        self._sock: socket.socket | None = None
        _parts.add(self)

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        """Not how it is started: see :func:`start`."""
        raise StoreClosedError("a store over several hosts is started by initialize_spmd")

    async def join(self, where: Where, deadline: float) -> str:
        """Become a member; the socket of this host.

        Raises:
            TransportUnavailableError: no worker is on this host.
            StoreClosedError, StoreTimeoutError, ProtocolError: see ``lane.handshake``.
        """
        here = topology.probe()
        address = where.sockets.get(here.host_id)
        if address is None:
            raise TransportUnavailableError(
                f"this rank is on a host ({here.host_id}) where no worker of the store is; "
                "LOCAL_WORLD_SIZE ranks in a row, from a multiple of it on, must share a host"
            )
        facts = client_facts({}, here, self.ranks)
        facts = msgspec.structs.replace(facts, role=MEMBER)
        left = max(0.1, deadline - time.monotonic())
        self._sock, _ = await handshake(address, b"", facts, here, left)
        return address

    async def stop(self, timeout: float) -> None:
        self.close()
        await self.root.stop(timeout)

    def close(self) -> None:
        """End the membership: also in a forked child, which has no part in it."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()


_parts: weakref.WeakSet[RankPart] = weakref.WeakSet()


def _forked() -> None:
    for part in list(_parts):
        part.close()


os.register_at_fork(after_in_child=_forked)


async def _start_root(
    root: RootProcess, options: StoreOptions, env: SPMDEnv, store: Any, deadline: float
) -> Where:
    hosts = env.world_size // env.local_world_size
    workers: list[str] = []
    for i in range(hosts):
        what = f"the worker of host {i} (rank {i * env.local_world_size})"
        workers.append((await _get(store, f"worker/{i}", deadline, what)).decode())
    name, fields = "singleton", b"{}"
    if options.strategy is not None:
        name, fields = encode_strategy(options.strategy)
    left = max(0.1, deadline - time.monotonic())
    asked = Asked(
        options.store_name,
        options.num_storage_volumes,
        name,
        fields,
        options.capacity,
        options.prefault,
        left,
        options.block,
    )
    loopback = all(worker.startswith("tcp://127.") for worker in workers)
    order = RootOrder(workers, msgspec.json.encode(asked), loopback)
    return Where(sockets=await root.begin(order, left))


class RootProcess:
    """The Monarch root of a torchrun job: a child process of rank 0 that outlives it if need be."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    async def begin(self, order: RootOrder, timeout: float) -> dict[str, str]:
        """Start it and wait for the store: Unix sockets by host id.

        Raises:
            StoreTimeoutError: not within ``timeout`` seconds.
            StoreClosedError, TorchStoreError: it could not start.
        """
        command = [sys.executable, "-P", "-m", "torchstore_monarch.spmd.root"]
        command.append(msgspec.json.encode(order).decode())
        try:
            line = await asyncio.wait_for(asyncio.to_thread(self._launch, command), timeout)
        except TimeoutError as error:
            self._kill()
            raise StoreTimeoutError(
                f"the store over several hosts did not come up within {timeout:.0f} s"
            ) from error
        except BaseException:
            self._kill()
            raise
        try:
            where = msgspec.json.decode(line, type=Where)
        except msgspec.DecodeError as error:
            self._kill()
            raise StoreClosedError(
                "the Monarch root process ended while starting; its standard error says why"
            ) from error
        if where.error:
            self._kill()
            raise from_wire(where.error, where.message, None, {})
        return where.sockets

    def _launch(self, command: list[str]) -> bytes:
        """Start it, and wait for its line."""
        self._process = process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        return _line(process)

    async def stop(self, timeout: float) -> None:
        """Leave: the root ends the store once nobody else uses it. Waits for that if it is now."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner:
            return
        await asyncio.shield(asyncio.to_thread(_leave, process, timeout))

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close(process)


def _line(process: subprocess.Popen[bytes]) -> bytes:
    return b"" if process.stdout is None else process.stdout.readline()


def _leave(process: subprocess.Popen[bytes], timeout: float) -> None:
    if process.stdin is not None:
        process.stdin.close()
    if _line(process).strip() == b"alone":  # at once: it looks, and says
        try:
            process.wait(timeout or None)
        except subprocess.TimeoutExpired:
            log.warning("the Monarch root %d does not end by itself; killing it", process.pid)
            process.kill()
            process.wait()
    _close(process)
    if process.returncode is None:  # others still use the store: it ends with the last of them
        _reap(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def _start_worker(env: SPMDEnv, timeout: float) -> bytes:
    """Start this host's worker: the address where the root finds it.

    Raises:
        StoreClosedError: it ended at once.
    """
    ip = _own_address(env.master_addr, env.master_port)
    with socket.socket() as probe:
        probe.bind((ip, 0))
        port = int(probe.getsockname()[1])
    address = f"tcp://{ip}:{port}"
    command = [sys.executable, "-P", "-m", "torchstore_monarch.spmd.worker", address, str(timeout)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
    )
    said = _line(process).strip()
    _close(process)
    if said != b"ready":
        process.wait()
        raise StoreClosedError(
            f"the Monarch worker of this host could not listen on {address}; its standard error "
            "says why"
        )
    _reap(process)  # ends by itself when the store does
    return address.encode()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Leave no zombie of a process that nobody waits for."""
    threading.Thread(target=process.wait, name="torchstore-reaper", daemon=True).start()


def _own_address(master: str, port: int) -> str:
    """This host's address on the way to the master. Sends nothing."""
    family, kind, proto, _, where = socket.getaddrinfo(
        master, port, socket.AF_INET, socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


# ---- the rendezvous store, whose calls block ----------------------------------------------


async def _set(store: Any, key: str, value: bytes) -> None:
    await asyncio.to_thread(store.set, key, value)


async def _get(store: Any, key: str, deadline: float, what: str) -> bytes:
    left = deadline - time.monotonic()

    def wait() -> bytes:
        store.wait([key], datetime.timedelta(seconds=max(0.1, left)))
        return bytes(store.get(key))

    try:
        return await asyncio.to_thread(wait)
    except Exception as error:
        raise StoreTimeoutError(
            f"waited in vain for {what}: do all ranks call initialize_spmd?"
        ) from error
