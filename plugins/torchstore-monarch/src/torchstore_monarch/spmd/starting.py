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
from typing import TYPE_CHECKING, Any

import msgspec

from torchstore_core import topology
from torchstore_core.contracts.runtime import Runtime, StoreOptions
from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    TorchStoreError,
    TransportUnavailableError,
    from_wire,
)
from torchstore_core.strategy_data import encode_strategy
from torchstore_monarch.protocol import Asked
from torchstore_monarch.spmd.orders import RootOrder, Where

if TYPE_CHECKING:
    from torchstore_core.runtimes.spmd import SPMDEnv

__all__ = ["RootProcess", "start"]

log = logging.getLogger(__name__)

_WHERE = "where"


async def start(
    options: StoreOptions, env: SPMDEnv, store: Any, timeout: float
) -> tuple[str, Runtime | None]:
    """Start the store, or wait until rank 0 has: the socket of this host, and what rank 0 owns.

    Args:
        store: a torch.distributed.Store that only this start uses.
        timeout: seconds for all of it.

    Raises:
        StoreTimeoutError: some host's first rank, or rank 0, did not come in time.
        TorchStoreError: rank 0 could not start the store; all ranks get its error.
    """
    deadline = time.monotonic() + timeout
    host = env.rank // env.local_world_size
    if env.local_rank == 0:
        await _set(store, f"worker/{host}", await asyncio.to_thread(_start_worker, env, timeout))
    runtime: RootProcess | None = None
    if env.rank == 0:
        runtime = RootProcess()
        try:
            where = await _start_root(runtime, options, env, store, deadline)
        except TorchStoreError as error:
            where = Where(error=error.code, message=error.message)
        except BaseException:
            await runtime.stop(0.0)
            raise
        await _set(store, _WHERE, msgspec.json.encode(where))
    else:
        data = await _get(store, _WHERE, deadline, "rank 0 to start the store")
        where = msgspec.json.decode(data, type=Where)
    if where.error:
        if runtime is not None:
            await runtime.stop(0.0)
        raise from_wire(where.error, where.message, None, {})
    here = topology.probe().host_id
    address = where.sockets.get(here)
    if address is None:
        if runtime is not None:
            await runtime.stop(0.0)
        raise TransportUnavailableError(
            f"rank {env.rank} is on a host ({here}) where no worker of the store is; the ranks of "
            f"one host must share it: LOCAL_WORLD_SIZE is {env.local_world_size}"
        )
    return address, runtime


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
    order = RootOrder(workers, msgspec.json.encode(asked), env.world_size, loopback)
    return Where(sockets=await root.begin(order, left))


class RootProcess(Runtime):
    """The Monarch root of a torchrun job: a child process of rank 0 that outlives it if need be."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()

    async def start(self, options: StoreOptions, mesh: object | None) -> str:
        """Not how it is started: see :meth:`begin`."""
        raise StoreClosedError("a store over several hosts is started by initialize_spmd")

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
