"""What tests make the root client and the workers of a job do."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tests.support import open_files

import torchstore_core as ts
from torchstore_core.clients.stores import table as stores
from torchstore_core.values import TensorMeta
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import encode

__all__ = [
    "begin_put",
    "books",
    "drain",
    "exists",
    "explain",
    "failures",
    "get",
    "get_shape",
    "held_sum",
    "initialize",
    "initialize_on_hosts",
    "initialize_on_workers",
    "initialize_on_workers_hosts",
    "keys",
    "kill",
    "pid",
    "put",
    "put_ones",
    "put_ones_and_hold",
    "put_tensors",
    "release_held",
    "set_rank",
    "shutdown",
    "status",
    "store_maps",
    "tensors_are_right",
    "transports",
    "wait",
    "zero_copy",
]

SMALL: dict[str, Any] = {"capacity": 256 << 20, "prefault": 0}


async def initialize(arguments: Mapping[str, Any] | None = None) -> str:
    """``initialize`` with little memory."""
    client = await ts.initialize(**{**SMALL, **(arguments or {})})
    return client.store_name


async def initialize_on_hosts(arguments: Mapping[str, Any] | None = None) -> str:
    """A volume on each emulated host; in the root."""
    from tests.monarch.root import HERE

    return await initialize({"num_storage_volumes": 2, "mesh": HERE.hosts, **(arguments or {})})


async def initialize_on_workers(arguments: Mapping[str, Any] | None = None) -> str:
    """Volumes in the workers' processes; in the root."""
    from tests.monarch.root import HERE

    return await initialize({"mesh": HERE.workers, **(arguments or {})})


async def drain(volume: int) -> bool:
    """Empty a volume; whether it is."""
    return (await ts.drain(volume)).done


async def shutdown(store_name: str = "torchstore") -> None:
    await ts.shutdown(store_name)


async def pid() -> int:
    return os.getpid()


async def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def initialize_on_workers_hosts(arguments: Mapping[str, Any] | None = None) -> str:
    """Two volumes on each emulated host; in the root."""
    return await initialize_on_hosts({"num_storage_volumes": 4, **(arguments or {})})


async def failures() -> list[str]:
    """What the engine has told the root of failed meshes that nobody else answers for."""
    from tests.monarch.root import HERE

    return HERE.failures


async def set_rank(rank: int) -> None:
    """As a launcher of ranks would."""
    os.environ["RANK"] = str(rank)


async def put(key: str, value: Any, store_name: str = "torchstore") -> ts.ObjectRef:
    return await ts.put(key, value, store_name=store_name)


async def get(key: str, store_name: str = "torchstore") -> Any:
    """Whatever it is, not as shared memory."""
    value = await ts.get(key, store_name=store_name)
    return value.clone() if isinstance(value, torch.Tensor) else value


async def exists(key: str) -> bool:
    return await ts.exists(key)


async def wait(key: str, timeout: float = 20.0) -> None:
    await ts.wait(key, timeout=timeout)


async def put_tensors(prefix: str, number: int, nbytes: int, store_name: str) -> None:
    """uint8 tensors, each of its number."""
    for i in range(number):
        value = torch.full((nbytes,), i, dtype=torch.uint8)
        await ts.put(f"{prefix}/{i}", value, store_name=store_name)


async def tensors_are_right(prefix: str, number: int, nbytes: int, store_name: str) -> bool:
    """Whether they are what :func:`put_tensors` put."""
    for i in range(number):
        got = await ts.get(f"{prefix}/{i}", store_name=store_name)
        if got.numel() != nbytes or got.unique().tolist() != [i]:
            return False
    return True


_open: list[socket.socket] = []


async def begin_put(key: str, nbytes: int, store_name: str = "torchstore") -> None:
    """Begin a put over a connection of its own, and never end it."""
    joined = stores.find(store_name)
    session = await joined.session(10)
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(session.address.partition(":")[2])
    put = m.Put(2, 3, [m.PutItem(key, TensorMeta("uint8", (nbytes,)), nbytes)])
    sock.sendall(encode(m.Hello(1, m.PROTOCOL_VERSION, b"", session.here, session.facts)))
    sock.recv(1 << 16)
    sock.sendall(encode(put))
    _open.append(sock)


async def books(store_name: str = "torchstore") -> tuple[int, int, int]:
    """Sessions; leased and unfinished bytes."""
    status = await ts.status(store_name=store_name)
    return (
        len(status.sessions),
        sum(v.leased_bytes for v in status.volumes),
        sum(v.unfinished_bytes for v in status.volumes),
    )


async def keys(store_name: str = "torchstore") -> list[str]:
    return await ts.keys(store_name=store_name)


async def status(store_name: str = "torchstore") -> Any:
    return await ts.status(store_name=store_name)


async def explain() -> list[dict[str, Any]]:
    return await ts.explain()


async def transports() -> dict[str, str]:
    """What large values take from here to each volume."""
    return {entry["volume"]: entry["chosen"] for entry in await ts.explain()}


async def put_ones(key: str, nbytes: int, value: int = 1) -> None:
    """A uint8 tensor, all ``value``."""
    await ts.put(key, torch.full((nbytes,), value, dtype=torch.uint8))


_held: list[torch.Tensor] = []


async def put_ones_and_hold(key: str, store_name: str = "torchstore") -> int:
    """Put a tensor of 1 MiB, get it, and keep what came; its number."""
    await ts.put(key, torch.ones(1 << 20, dtype=torch.uint8), store_name=store_name)
    _held.append(await ts.get(key, store_name=store_name))
    return len(_held) - 1


async def held_sum(number: int) -> int:
    """The sum of such a tensor."""
    return int(_held[number].sum())


async def release_held() -> None:
    """Let go of all such tensors."""
    _held.clear()


async def get_shape(key: str) -> tuple[tuple[int, ...], list[int]]:
    """Shape of a uint8 tensor, and which values it has."""
    got = await ts.get(key)
    return tuple(got.shape), got.unique().tolist()


async def zero_copy(key: str) -> bool:
    """Whether a get of this tensor gives pages of the volume's memory, privately mapped."""
    got = await ts.get(key)
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, _, end = line.split()[0].partition("-")
        if int(start, 16) <= got.data_ptr() < int(end, 16):
            return "memfd:" in line and "p" in line.split()[1]
    return False


async def store_maps() -> int:
    """How many mappings and descriptors of volumes this process has."""
    maps = Path("/proc/self/maps").read_text().count("memfd:torchstore")
    return maps + sum("memfd:torchstore" in file for file in open_files().values())
