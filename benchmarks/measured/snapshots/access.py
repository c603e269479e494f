"""Commands of a measured process: parts of snapshots: other layouts, and single objects."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from inputs import layouts
from measured.snapshots.files import _pieces

from torchstore_cli.bench import workload
from torchstore_cli.bench.floors import Threads
from torchstore_cli.bench.measuring import timed_call
from torchstore_core import TensorShard
from torchstore_core.machine import copying
from torchstore_snapshot import Snapshot, StateDict

_PATIENCE = timedelta(seconds=60)


class SnapshotAccess:
    """Commands of a rank that takes a snapshot with others, and of a process that reads parts."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[int, ...]] = {}
        self._seed = 0

    def make(self, shapes: list[tuple[str, list[int]]], seed: int) -> None:
        """Say what the whole tensors are."""
        self._of = {name: tuple(shape) for name, shape in shapes}
        self._seed = seed

    def take(self, path: str, meeting: str, rank: int, world: int) -> None:
        """Take a snapshot as one of ``world`` ranks, each with a share of the rows."""
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world, timeout=_PATIENCE
        )
        try:
            part = layouts.part(self._of, layouts.ROWS, rank, world, self._seed)
            Snapshot.take(path, {"model": StateDict(**part)})
        finally:
            dist.destroy_process_group()

    def reshard(self, path: str, world: int, repeat: int) -> dict[str, Any]:
        """Restore the parts of all of ``world`` ranks, one after the other, ``repeat`` times beside
        a copy of the same bytes; and, with nothing in the page cache, how many bytes are read.
        """
        parts = [
            layouts.part(self._of, layouts.ROWS, rank, world, self._seed + 1000)
            for rank in range(world)
        ]
        states = [{"model": StateDict(**part)} for part in parts]
        snapshot = Snapshot(path)
        read = 0
        for state in states:
            _evict(Path(path))
            before = _from_disk()
            snapshot.restore(state)
            read += _from_disk() - before
        number = list(self._of)
        wrong = [
            name
            for rank, part in enumerate(parts)
            for name in number
            if not torch.equal(
                layouts.local(part[name]).view(torch.int16),
                layouts.local(
                    layouts.part(
                        {name: self._of[name]},
                        layouts.ROWS,
                        rank,
                        world,
                        self._seed + number.index(name),
                    )[name]
                ).view(torch.int16),
            )
        ]
        local = {
            f"{rank}/{name}": value.tensor if isinstance(value, TensorShard) else value
            for rank, part in enumerate(parts)
            for name, value in part.items()
        }
        nbytes = sum(tensor.nbytes for tensor in local.values())
        source = {name: tensor.clone() for name, tensor in local.items()}
        threads = Threads()
        rounds = []
        for _ in range(repeat):
            pairs = zip(_pieces(source), _pieces(local), strict=True)

            def copy(pair: tuple[tuple[int, int, int], tuple[int, int, int]]) -> None:
                (of, size, _), (to, _, _) = pair
                copying.copy_pieces([(to, of, size)], stream=True)

            floor = timed_call(lambda pairs=pairs: threads.share(pairs, copy))
            rounds.append(
                {
                    "copy": floor,
                    "restore": timed_call(lambda: [snapshot.restore(state) for state in states]),
                }
            )
        threads.close()
        return {"rounds": rounds, "nbytes": nbytes, "read": read, "wrong": wrong}

    def make_many(self, path: str, count: int, nbytes: int) -> None:
        """Take a snapshot of ``count`` tensors of ``nbytes`` bytes."""
        state = {
            f"tensor-{at}": workload.random_tensor((nbytes // 2,), self._seed + at)
            for at in range(count)
        }
        Snapshot.take(path, {"model": StateDict(**state)})

    def read_one(self, path: str, count: int, nbytes: int, turn: int) -> dict[str, Any]:
        """Read one of many tensors: with a new ``Snapshot``, so with its manifest, and bytes from
        the disk where nothing was in the page cache.
        """
        at = turn * 377 % count
        _evict(Path(path))
        before = _from_disk()
        Snapshot(path).read_object(f"model/tensor-{at}")
        read = _from_disk() - before
        start = time.perf_counter()
        found = Snapshot(path).read_object(f"model/tensor-{at}")
        opened = time.perf_counter() - start
        snapshot = Snapshot(path)
        snapshot.get_manifest()
        seconds = timed_call(lambda: snapshot.read_object(f"model/tensor-{at}"))
        want = workload.random_tensor((nbytes // 2,), self._seed + at)
        same = torch.equal(found.view(torch.int16), want.view(torch.int16))
        manifest = (Path(path) / "snapshot.json").stat().st_size
        return {
            "opened": opened,
            "seconds": seconds,
            "read": read,
            "allowed": nbytes + manifest + (64 << 10),
            "wrong": [] if same else [f"tensor-{at}"],
        }


def _evict(folder: Path) -> None:
    """Drop a folder's files from the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)


def _from_disk() -> int:
    """Bytes that this process has had read from disks so far; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["read_bytes"])
