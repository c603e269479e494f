"""The ranks' part in starting a store over several hosts.

**Trusted networks only.** The worker of each host listens on its address towards MASTER_ADDR, at a
port that the system chooses. Like Monarch's own workers with ``trust_all_connections``, it does not
authenticate connections: anyone who reaches that port can make Monarch run code as this user. The
port is open from ``initialize_spmd`` until the store ends. Torch's rendezvous store is just as
open. If all ranks are on one machine, the port is on the loopback, which every user of it reaches.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec

from torchstore_core.contracts.engine import RankStore, Rendezvous
from torchstore_core.contracts.ranks import SPMDEnv
from torchstore_core.contracts.runtime import StoreOptions
from torchstore_core.errors import (
    StoreClosedError,
    StoreTimeoutError,
    TransportUnavailableError,
    from_wire,
    in_seconds,
)
from torchstore_core.machine import topology
from torchstore_monarch.protocol import StoreRequest
from torchstore_monarch.spmd.orders import RootOrder, StoreReport

log = logging.getLogger(__name__)

_END_FAILED_S = 3.0
_PORTS = 2


async def start(options: StoreOptions, env: SPMDEnv, rendezvous: Rendezvous) -> MonarchRankStore:
    """See ``torchstore_core.contracts.engine.Engine.spmd``."""
    made = MonarchRankStore()
    try:
        if env.local_rank == 0:
            host = env.rank // env.local_world_size
            try:
                towards = await _towards(env, rendezvous)
                left = rendezvous.seconds_left()
                address = await rendezvous.unless_failed(made.worker.begin(towards, left))
            except StoreTimeoutError:
                await rendezvous.all_present()  # its error names a missing rank, which says more
                raise
            await rendezvous.publish(f"worker/{host}", address)
        if env.rank == 0:
            report = await _start_root(made.root, options, env, rendezvous)
            await rendezvous.publish("store", report)
        else:
            report = await rendezvous.read("store", 0, StoreReport)
        made.address = _of_this_host(report)
    except BaseException as error:
        await rendezvous.fail(error)  # before stopping, so that the others need not wait for that
        await made.stop(_END_FAILED_S, last=True)
        raise
    return made


def _of_this_host(report: StoreReport) -> str:
    here = topology.probe().host_id
    address = report.sockets.get(here)
    if address is None:
        raise TransportUnavailableError(
            f"this rank is on a host ({here}) where no worker of the store is; "
            "LOCAL_WORLD_SIZE ranks in a row, from a multiple of it on, must share a host"
        )
    return address


class MonarchRankStore(RankStore):
    """A rank's share in a store over several hosts: rank 0 has the root process, and the first rank
    of each host has a worker. Both end by themselves once the server has ended.
    """

    def __init__(self) -> None:
        self.address = ""
        self.root = RootProcess()
        self.worker = WorkerProcess()

    def joined(self) -> None:
        """Do nothing: the root notices by itself that the server has members."""

    async def stop(self, timeout: float, *, last: bool) -> None:
        self.worker.release()
        await self.root.stop(timeout, wait=last)


async def _start_root(
    root: RootProcess, options: StoreOptions, env: SPMDEnv, rendezvous: Rendezvous
) -> StoreReport:
    hosts = env.world_size // env.local_world_size
    workers = [
        await rendezvous.read(f"worker/{i}", i * env.local_world_size, str) for i in range(hosts)
    ]
    await rendezvous.all_present()  # if one is missing, nothing has been started that must end
    left = max(0.1, rendezvous.seconds_left())
    request = StoreRequest.of(msgspec.structs.replace(options, timeout=left), members=True)
    loopback = all(_is_loopback(worker) for worker in workers)
    ip = _ip(workers[0])  # of this host
    with _reserved_port(ip) as port:
        order = RootOrder(workers, msgspec.json.encode(request), loopback, f"tcp://{ip}:{port}")
        return StoreReport(sockets=await rendezvous.unless_failed(root.begin(order, left)))


async def _towards(env: SPMDEnv, rendezvous: Rendezvous) -> tuple[str, int]:
    """Return an address from which this host's worker must be reachable, with an arbitrary port.

    On rank 0's own host, MASTER_ADDR often resolves to a loopback address (Debian's 127.0.1.1),
    which no other host reaches; then this is the address of another host.
    """
    master = env.master_addr, env.master_port
    if env.rank == 0 and env.world_size > env.local_world_size:
        own = await asyncio.to_thread(_own_address, *master)
        if own.startswith("127."):
            other = await rendezvous.read("worker/1", env.local_world_size, str)
            if not _is_loopback(other):
                return _ip(other), master[1]
    return master


def _ip(worker: str) -> str:
    """Return the address in ``tcp://ip:port``."""
    return worker.removeprefix("tcp://").rpartition(":")[0]


def _is_loopback(worker: str) -> bool:
    return _ip(worker).startswith("127.")


class RootProcess:
    """The Monarch root of a torchrun job: a child process of rank 0 that may outlive it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._given_up = False

    async def begin(self, order: RootOrder, timeout: float) -> dict[str, str]:
        """Start the process and wait for the store. Return its Unix sockets, by host id.

        Raises:
            StoreTimeoutError: the store did not start within ``timeout`` seconds.
            StoreClosedError, TorchStoreError: the store could not start.
        """
        command = [sys.executable, "-P", "-m", "torchstore_monarch.spmd.root"]
        command.append(msgspec.json.encode(order).decode())
        try:
            line = await asyncio.wait_for(
                asyncio.to_thread(self._launch, command, timeout), timeout
            )
        except TimeoutError as error:
            self._kill()
            raise StoreTimeoutError(
                f"the store over several hosts did not come up within {in_seconds(timeout)}",
                details={"timeout": timeout},
            ) from error
        except BaseException:
            self._kill()
            raise
        try:
            report = msgspec.json.decode(line, type=StoreReport)
        except msgspec.DecodeError as error:
            self._kill()
            raise StoreClosedError(
                "the Monarch root process ended while starting; its standard error says why"
            ) from error
        if report.error:
            self._kill()
            raise from_wire(report.error, report.message, None, {})
        return report.sockets

    def _launch(self, command: list[str], timeout: float) -> bytes:
        """Start the process, and return the line that it prints."""
        with self._lock:
            if self._given_up:
                return b""
            self._process = process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        return _line(process, timeout)

    async def stop(self, timeout: float, *, wait: bool) -> None:
        """Release the root, which ends once the store has no members. ``wait``: wait for that."""
        process, self._process = self._process, None
        if process is None or os.getpid() != self._owner:
            return
        await asyncio.shield(asyncio.to_thread(_leave, process, timeout, wait))

    def _kill(self) -> None:
        with self._lock:
            self._given_up = True
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            _close(process)


def _line(process: subprocess.Popen[bytes], timeout: float) -> bytes:
    """Return the next line of output, or what there is of it at the end or the time-out."""
    if process.stdout is None:
        return b""
    fd, line = process.stdout.fileno(), b""
    deadline = time.monotonic() + timeout
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while not line.endswith(b"\n") and (left := deadline - time.monotonic()) > 0:
        if poll.poll(1000 * left):
            read = os.read(fd, 65536)
            if not read:
                break
            line += read
    return line


def _leave(process: subprocess.Popen[bytes], timeout: float, wait: bool) -> None:
    _close(process)
    if wait:
        try:
            process.wait(max(0.1, timeout))
        except subprocess.TimeoutExpired:
            log.warning("the Monarch root %d does not end by itself; killing it", process.pid)
            process.kill()
            process.wait()
    else:  # others still use the store: it ends with the last of them
        _reap(process)


def _close(process: subprocess.Popen[bytes]) -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


class WorkerProcess:
    """The Monarch worker of a host. It ends by itself, either with the store, or when this process
    releases it before the root has used it.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._released = False

    async def begin(self, towards: tuple[str, int], timeout: float) -> str:
        """Start the worker, to be reachable from ``towards``. Return the address for the root.

        Raises:
            StoreClosedError: the worker could not listen.
            StoreTimeoutError: the worker did not listen within ``timeout`` seconds.
        """
        return await asyncio.to_thread(self._begin, towards, timeout)

    def _begin(self, towards: tuple[str, int], timeout: float) -> str:
        deadline = time.monotonic() + timeout
        ip = _own_address(*towards)
        address = ""
        for _ in range(_PORTS):  # another process may have taken a port that it was not given
            left = max(0.1, deadline - time.monotonic())
            with _reserved_port(ip) as port:
                address = f"tcp://{ip}:{port}"
                command = [sys.executable, "-P", "-m", "torchstore_monarch.spmd.worker"]
                process = subprocess.Popen(
                    [*command, address, str(left)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    start_new_session=True,
                )
                line = _line(process, left).strip()
            if line == b"ready":
                if process.stdout is not None:
                    process.stdout.close()
                self._process = process
                _reap(process)
                with self._lock:
                    released = self._released
                if released:  # while it came up
                    self.release()
                return address
            process.kill()
            process.wait()
            _close(process)
            if time.monotonic() >= deadline:
                raise StoreTimeoutError(
                    "the Monarch worker of this host did not come up within "
                    f"{in_seconds(timeout)}; give initialize_spmd a longer timeout",
                    details={"timeout": timeout, "address": address},
                )
        raise StoreClosedError(
            f"the Monarch worker of this host could not listen on {address}; its standard error "
            "says why"
        )

    def release(self) -> None:
        """Let the worker end as soon as the root does not use it."""
        with self._lock:
            self._released = True
            process, self._process = self._process, None
        if process is not None and process.stdin is not None:
            process.stdin.close()


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Reap a process that nobody waits for, so that it leaves no zombie."""
    threading.Thread(target=process.wait, name="torchstore-reaper", daemon=True).start()


def _own_address(master: str, port: int) -> str:
    """Return this host's address on the route to the master. Sends nothing.

    Raises:
        StoreClosedError: there is no IPv4 route to it.
    """
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            master, port, socket.AF_INET, socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, kind, proto) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise StoreClosedError(
            f"this host has no IPv4 address towards MASTER_ADDR {master}: {error}"
        ) from error


@contextlib.contextmanager
def _reserved_port(ip: str) -> Iterator[int]:
    """Yield a TCP port that the system gives to nobody else meanwhile: this process keeps it bound.
    Who is told of it can listen all the same, for listeners set SO_REUSEADDR.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((ip, 0))
        yield int(held.getsockname()[1])
