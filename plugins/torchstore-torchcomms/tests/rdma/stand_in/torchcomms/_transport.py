"""The interface of torchcomms' one-sided transport, between processes of one host.

The signatures are those of ``_transport.pyi``, which torchcomms ships. The bytes are moved by the
kernel (``process_vm_readv`` and ``process_vm_writev``), without the other process, as RDMA devices
do. What is registered has a file in a folder, by which others see that it is; a connection has one,
too, so that nothing moves after either end has gone.
"""

from __future__ import annotations

import ctypes
import os
import time
import uuid
from pathlib import Path
from typing import Any

import torch

_FOLDER = Path(os.environ.get("STAND_IN_FOLDER", "/nonexistent"))
_libc = ctypes.CDLL(None, use_errno=True)
_SUCCESS, _FAILED = 0, 3
_LARGE = 1 << 20  # what is at least so large takes the seconds that the file "slow" says


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


class _File:
    """A file that is there as long as this object."""

    def __init__(self, kind: str, content: str = "") -> None:
        self.name = f"{kind}-{os.getpid()}-{uuid.uuid4().hex}"
        self.path = _FOLDER / self.name
        self.path.write_text(content)

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


class _View:
    def __init__(self, memory: RdmaMemory, offset: int, length: int) -> None:
        if not 0 <= offset <= offset + length <= memory.nbytes:
            raise ValueError("outside of the memory")
        self.address = memory.address + offset
        self._length = length
        self._memory = memory

    def size(self) -> int:
        return self._length


class RdmaMemoryView(_View):
    pass


class RdmaMemoryMutableView(_View):
    pass


class RdmaRemoteBuffer:
    def __init__(self, ptr: int, len: int, access_key: str) -> None:
        self.state = ptr, len, access_key

    def __getstate__(self) -> tuple[int, int, str]:
        return self.state


class RdmaMemory:
    def __init__(self, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise RuntimeError("a contiguous tensor")
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self._file = _File("memory", f"{self.address} {self.nbytes}")

    def to_view(self, offset: int | None = None, length: int | None = None) -> RdmaMemoryView:
        return RdmaMemoryView(self, offset or 0, self.nbytes if length is None else length)

    def to_mutable_view(
        self, offset: int | None = None, length: int | None = None
    ) -> RdmaMemoryMutableView:
        return RdmaMemoryMutableView(self, offset or 0, self.nbytes if length is None else length)

    def to_remote_buffer(self) -> RdmaRemoteBuffer:
        return RdmaRemoteBuffer(self.address, self.nbytes, self._file.name)


class RdmaTransport:
    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise RuntimeError("a GPU by which the network device is found")
        self._file = _File("transport")
        self._peer: Path | None = None

    @staticmethod
    def supported() -> bool:
        return _FOLDER.is_dir() and not (_FOLDER / "unsupported").exists()

    def bind(self) -> bytes:
        return self._file.name.encode()

    def connect(self, peer_url: bytes) -> int:
        self._peer = _FOLDER / peer_url.decode()
        return _SUCCESS

    def connected(self) -> bool:
        return self._peer is not None

    def write(self, local_buffer: RdmaMemoryView, remote_buffer: RdmaRemoteBuffer) -> int:
        return self._move("process_vm_writev", local_buffer, remote_buffer)

    def read(self, local_buffer: RdmaMemoryMutableView, remote_buffer: RdmaRemoteBuffer) -> int:
        return self._move("process_vm_readv", local_buffer, remote_buffer)

    def _move(self, call: str, local: _View, remote: RdmaRemoteBuffer) -> int:
        address, nbytes, key = remote.state
        memory = _FOLDER / key
        if self._peer is None or not (self._peer.exists() and memory.exists()):
            return _FAILED
        first, size = map(int, memory.read_text().split())
        if local.size() > nbytes or not first <= address <= address + nbytes <= first + size:
            return _FAILED
        with (_FOLDER / "moved").open("a") as file:
            file.write(f"{local.size()}\n")
        slow = _FOLDER / "slow"
        if local.size() >= _LARGE and slow.exists():
            time.sleep(float(slow.read_text()))
        here = _Vector(local.address, local.size())
        there = _Vector(address, local.size())
        pid = int(key.split("-")[1])
        function: Any = getattr(_libc, call)
        function.restype = ctypes.c_ssize_t
        done = function(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        return _SUCCESS if done == local.size() else _FAILED
