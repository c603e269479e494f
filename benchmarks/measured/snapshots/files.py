"""Commands of a measured process: whole snapshots to and from local files, beside other libraries
and beside what the disk, the page cache and the memory can do.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from torchstore_cli.bench import workload
from torchstore_cli.bench.floors import Threads, interleave
from torchstore_cli.bench.measuring import timed_call
from torchstore_core.machine import copying
from torchstore_snapshot import Snapshot, StateDict
from torchstore_snapshot.restoring.restore import Verify

RAW, FLUSHED, CACHED = "raw parallel write", "raw write and fsync", "page cache into memory"
COPIES, PLAIN = ("streaming copy", "memmove"), "copy_ of each tensor"
PEER = "torchsnapshot"
_CHUNK = 16 << 20
_STEP = 1 << 20


class SnapshotFiles:
    """Commands on a set of tensors, and on files of it in a folder that is removed at the end."""

    def __init__(self) -> None:
        self._folder = Path()
        self._state: dict[str, torch.Tensor] = {}
        self._target: dict[str, torch.Tensor] = {}
        self._threads: Threads | None = None
        self._seed = 0

    def make(self, shapes: list[tuple[str, list[int]]], seed: int, folder: str) -> dict[str, Any]:
        """Make the set, and tensors to restore into. Returns the peers that are installed."""
        self._folder = Path(folder)
        of = {name: tuple(shape) for name, shape in shapes}
        self._state = workload.make(of, seed)
        self._target = workload.make_empty(of)
        self._threads = Threads()
        peers = ["torch.save", "safetensors", "dcp.save"]
        if importlib.util.find_spec(PEER):
            peers.append(PEER)
        return {"nbytes": workload.nbytes(of), "peers": peers}

    def drop(self) -> None:
        """Give everything back."""
        if self._threads is not None:
            self._threads.close()
        self._state, self._target, self._threads = {}, {}, None

    # ---- saving -----------------------------------------------------------------------------

    def save(self, turn: int, peers: list[str]) -> dict[str, float]:
        """One round: every way to save the set once; seconds by name."""
        ways: dict[str, Callable[[Path], object]] = {
            RAW: lambda path: self._raw(path, flush=False),
            "take": lambda path: self._take(path, fsync=False),
            FLUSHED: lambda path: self._raw(path, flush=True),
            "take, fsync": lambda path: self._take(path, fsync=True),
        }
        ways |= {name: self._saver(name) for name in peers}
        return interleave({name: self._alone(way) for name, way in ways.items()}, turn)

    def _alone(self, way: Callable[[Path], object]) -> Callable[[], float]:
        """Measure one way, whose files are removed before the next one. All ways find memory that
        was in use a moment before: where the host of a virtual machine takes free memory back, in
        pieces of 2 MiB, whoever needs those again first waits for them, at several times the cost.
        """

        def run() -> float:
            path = self._folder / "saved"
            self._touch(path)
            try:
                return timed_call(lambda: way(path))
            finally:
                _remove(path)

        return run

    def _take(self, path: Path, *, fsync: bool) -> None:
        Snapshot.take(path, {"model": StateDict(**self._state)}, fsync=fsync)

    def _saver(self, name: str) -> Callable[[Path], object]:
        if name == "torch.save":
            return lambda path: torch.save(self._state, path)
        if name == "safetensors":
            return lambda path: save_file(self._state, path)
        if name == "dcp.save":
            return lambda path: dcp.save(self._state, checkpoint_id=path, no_dist=True)
        import torchsnapshot

        state = {"model": torchsnapshot.StateDict(**self._state)}
        return lambda path: torchsnapshot.Snapshot.take(str(path), state)

    def _raw(self, path: Path, *, flush: bool) -> None:
        file = os.open(path, os.O_CREAT | os.O_WRONLY)
        try:
            os.ftruncate(file, sum(tensor.nbytes for tensor in self._state.values()))
            if self._threads is not None:
                self._threads.share(
                    _pieces(self._state),
                    lambda piece: _write_all(file, _memory(piece[0], piece[1]), piece[2]),
                )
            if flush:
                os.fsync(file)
        finally:
            os.close(file)

    def _touch(self, path: Path) -> None:
        """Write as many bytes as there are, in pages that are as large as possible, and remove
        them.
        """
        nbytes = sum(tensor.nbytes for tensor in self._state.values())
        zeros = memoryview(bytearray(_CHUNK))
        with path.open("wb", buffering=0) as file:
            for start in range(0, nbytes + _CHUNK, _CHUNK):
                _write_all(file.fileno(), zeros, start)
        _remove(path)

    # ---- loading ----------------------------------------------------------------------------

    def prepare_loads(self, peers: list[str]) -> None:
        """Save the set once in every way; the page cache has all of it then."""
        self._take(self._folder / "take", fsync=False)
        self._raw(self._folder / CACHED, flush=False)
        for name in peers:
            self._saver(name)(self._folder / name)
        for path in self._folder.rglob("*"):  # what is written back later would be measured, too
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def load(self, turn: int, peers: list[str]) -> dict[str, Any]:
        """One round: every way to fill the tensors once, which are compared after ours."""
        wrong: list[str] = []
        snapshot = Snapshot(self._folder / "take")
        state = {"model": StateDict(**self._target)}

        def restore(*, verify: Verify) -> float:
            for tensor in self._target.values():
                tensor.view(torch.int16).fill_(turn)
            seconds = timed_call(lambda: snapshot.restore(state, verify=verify))
            with workload.one_thread():
                wrong.extend(
                    name
                    for name, tensor in self._target.items()
                    if not torch.equal(
                        tensor.view(torch.int16), self._state[name].view(torch.int16)
                    )
                )
            return seconds

        ways: dict[str, Callable[[], float]] = {
            name: (lambda stream=stream: timed_call(lambda: self._copy(stream=stream)))
            for name, stream in zip(COPIES, (True, False), strict=True)
        }
        ways[PLAIN] = lambda: timed_call(lambda: self._fill(self._state))
        ways["restore"] = lambda: restore(verify=True)
        ways["restore, streaming"] = lambda: restore(verify="streaming")
        ways["restore, verify=False"] = lambda: restore(verify=False)
        ways[CACHED] = lambda: timed_call(self._cached)
        ways |= {name: (lambda name=name: timed_call(self._loader(name))) for name in peers}
        return {"times": interleave(ways, turn), "wrong": wrong}

    def _copy(self, *, stream: bool) -> None:
        """What a restore would take if the files were tensors in memory."""

        def copy(pair: tuple[tuple[int, int, int], tuple[int, int, int]]) -> None:
            (source, nbytes, _), (target, _, _) = pair
            copying.copy_pieces([(target, source, nbytes)], stream=stream)

        pairs = zip(_pieces(self._state), _pieces(self._target), strict=True)
        if self._threads is not None:
            self._threads.share(pairs, copy)

    def _cached(self) -> None:
        file = os.open(self._folder / CACHED, os.O_RDONLY)
        try:
            if self._threads is not None:
                self._threads.share(
                    _pieces(self._target),
                    lambda piece: _read_all(file, _memory(piece[0], piece[1]), piece[2]),
                )
        finally:
            os.close(file)

    def _loader(self, name: str) -> Callable[[], object]:
        path = self._folder / name
        if name == "torch.save":
            return lambda: self._fill(torch.load(path))
        if name == "safetensors":
            return lambda: self._fill(load_file(path))
        if name == "dcp.save":
            return lambda: dcp.load(self._target, checkpoint_id=path, no_dist=True)
        import torchsnapshot

        state = {"model": torchsnapshot.StateDict(**self._target)}
        return lambda: torchsnapshot.Snapshot(str(path)).restore(state)

    def _fill(self, loaded: dict[str, torch.Tensor]) -> None:
        for key, tensor in self._target.items():
            tensor.copy_(loaded[key])


def _pieces(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[int, int, int]]:
    """(address, bytes, position in a file) of pieces, as large as the tensors or cut."""
    position = 0
    for tensor in tensors.values():
        for start in range(0, tensor.nbytes, _CHUNK):
            nbytes = min(_CHUNK, tensor.nbytes - start)
            yield tensor.data_ptr() + start, nbytes, position
            position += nbytes


def _memory(address: int, nbytes: int) -> memoryview:
    raw: Any = (ctypes.c_char * nbytes).from_address(address)
    return memoryview(raw).cast("B")


def _write_all(file: int, data: memoryview, position: int) -> None:
    while data.nbytes:
        written = os.pwrite(file, data, position)
        data, position = data[written:], position + written


def _read_all(file: int, memory: memoryview, position: int) -> None:
    while memory.nbytes:  # in steps: one huge read evicts its own beginning from the cache
        read = os.preadv(file, [memory[:_STEP]], position)
        memory, position = memory[read:], position + read


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
