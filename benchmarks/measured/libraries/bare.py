"""Bare libraries: what NIXL, gloo and torchcomms move between two processes without a store.

A library alone can be used in several ways, and which of them is the fastest depends on the
machine. So each is a floor of its own (:data:`FORMS`), and a store is compared with all of them.
They have what the transports have: memory that was registered once, before anything is measured.

``python bare.py LIBRARY FOLDER NBYTES ...`` is the other end: a process with warm memory of as many
bytes, as the server of a store is. The two meet through files in the folder. The other end does
what a line on its standard input says.
"""

from __future__ import annotations

import mmap
import os
import select
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from itertools import accumulate, zip_longest
from pathlib import Path
from typing import Any

import torch

#: Messages that are under way at a time.
WINDOW = 4
_ADDRESS = "127.0.0.1"
_TIMEOUT = timedelta(seconds=60)
# All addresses: UCX looks them up when bytes move, so that registering memory costs nothing.
_EVERYTHING = 1 << 16, (1 << 48) - (1 << 17)
# Of the transfers of NIXL that are not one: how many bytes, and how many are under way.
_PART, _PARTS = 64 << 20, 2
# How long the other end of NIXL rests while it is not needed.
_REST_S = 0.01

WHOLE, EACH = "one message of all bytes", f"a message for each tensor, {WINDOW} under way"
ONE, PARTS = "one transfer of all tensors", f"transfers of {_PART >> 20} MiB, {_PARTS} under way"
#: The ways in which each library is used.
FORMS = {"nixl": (ONE, PARTS), "gloo": (EACH, WHOLE), "torchcomms": (EACH, WHOLE)}


def memory(nbytes: int) -> torch.Tensor:
    """Warm shared memory."""
    fd = os.memfd_create("torchstore-bench")
    os.ftruncate(fd, nbytes)
    made = torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    os.close(fd)
    return made.fill_(1)


class Messages(ABC):
    """One end of a pair that sends and receives."""

    @abstractmethod
    def send(self, tensor: torch.Tensor) -> Any:
        """Begin to send; what has a ``wait``."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor) -> Any:
        """Begin to receive; what has a ``wait``."""

    def move(self, tensors: Iterable[torch.Tensor], *, send: bool) -> None:
        """Send or receive tensors, each as a message; the receiver of the last says so."""
        begin = self.send if send else self.receive
        pending: deque[Any] = deque()
        for tensor in tensors:
            pending.append(begin(tensor))
            if len(pending) >= WINDOW:
                pending.popleft().wait()
        while pending:
            pending.popleft().wait()
        last = torch.zeros(1, dtype=torch.uint8)
        (self.receive if send else self.send)(last).wait()


class Gloo(Messages):
    """``ProcessGroupGloo`` of two processes, with its own defaults."""

    def __init__(self, rank: int, folder: str) -> None:
        group: Any = torch.distributed.ProcessGroupGloo
        store = torch.distributed.FileStore(f"{folder}/store", 2)
        options = group._Options()
        options._devices = [group.create_device(hostname=_ADDRESS)]
        options._timeout = _TIMEOUT
        self._group, self._peer = group(store, rank, 2, options), 1 - rank

    def send(self, tensor: torch.Tensor) -> Any:
        return self._group.send([tensor], self._peer, 0)

    def receive(self, tensor: torch.Tensor) -> Any:
        return self._group.recv([tensor], self._peer, 0)


class TorchComms(Messages):
    """A communicator of two processes over torchcomms' gloo."""

    def __init__(self, rank: int, folder: str) -> None:
        import torchcomms

        before = {name: os.environ.get(name) for name in ("TORCHCOMM_RANK", "TORCHCOMM_SIZE")}
        os.environ |= {"TORCHCOMM_RANK": str(rank), "TORCHCOMM_SIZE": "2"}
        self._peer = 1 - rank
        self._comm: Any = torchcomms.new_comm(
            "gloo",
            torch.device("cpu"),
            "torchstore-bench",
            timeout=_TIMEOUT,
            store=torch.distributed.FileStore(f"{folder}/store", 2),
            hints={"persistent_store": "true", "hostname": _ADDRESS},
        )
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value

    def send(self, tensor: torch.Tensor) -> Any:
        return self._comm.send(tensor, self._peer, async_op=True, timeout=_TIMEOUT)

    def receive(self, tensor: torch.Tensor) -> Any:
        return self._comm.recv(tensor, self._peer, async_op=True, timeout=_TIMEOUT)


class Agent:
    """An agent of NIXL. All memory of its process is registered."""

    def __init__(self, name: str) -> None:
        import nixl_cu12 as nixl

        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self.agent: Any = nixl.nixl_agent(name, config)
        # Only over TCP, which the environment chooses, is an interface of any importance.
        self.agent.create_backend("UCX", {"engine_config": "NET_DEVICES=lo"})
        self.agent.register_memory([(*_EVERYTHING, 0, "")], "DRAM")


_PAIRS: dict[str, type[Messages]] = {"gloo": Gloo, "torchcomms": TorchComms}


class Bare:
    """A library, with another end of its own, and the tensors that it moves.

    Args:
        library: ``nixl``, ``gloo`` or ``torchcomms``.
        tensors: contiguous.
    """

    def __init__(self, library: str, tensors: Sequence[torch.Tensor]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="torchstore-bench-")
        self._tensors = [tensor.view(torch.uint8).view(-1) for tensor in tensors]
        sizes = [tensor.nbytes for tensor in self._tensors]
        self.forms = FORMS[library]
        command = [sys.executable, __file__, library, self._folder.name, *map(str, sizes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._pair = _PAIRS[library](1, self._folder.name) if library in _PAIRS else None
        address = int(self._heard())
        if self._pair is None:
            self._meet(address, sizes)
        else:
            self._whole = memory(sum(sizes))

    def put(self, form: str) -> None:
        """Move all bytes there."""
        self._move(form, write=True)

    def get(self, form: str) -> None:
        """Move all bytes here."""
        self._move(form, write=False)

    def close(self) -> None:
        """End the other end, and this one."""
        self._process.communicate()
        self._pair = self._agent = None
        self._folder.cleanup()

    def _meet(self, address: int, sizes: Sequence[int]) -> None:
        self._agent: Agent | None = Agent("here")
        agent = self._agent.agent
        self._peer = agent.add_remote_agent(Path(self._folder.name, "metadata").read_bytes())
        here, there = [], []
        for tensor, size in zip(self._tensors, sizes, strict=True):
            here.append((tensor.data_ptr(), size, 0))
            there.append((address, size, 0))
            address += size
        numbers = [at // _PART for at in accumulate(sizes, initial=0)]
        cuts = [0, *(at for at in range(1, len(sizes)) if numbers[at] != numbers[at - 1])]

        def lists(begin: int, end: int | None) -> tuple[Any, Any]:
            agent = self._agent.agent if self._agent else None
            return tuple(agent.get_xfer_descs(one[begin:end], "DRAM") for one in (here, there))

        self._lists = {
            ONE: [lists(0, None)],
            PARTS: [lists(*ends) for ends in zip_longest(cuts, cuts[1:])],
        }

    def _move(self, form: str, *, write: bool) -> None:
        way = "take" if write else "give"
        if self._pair is not None:
            self._say(f"{way} whole" if form == WHOLE else way)
            self._pair.move([self._whole] if form == WHOLE else self._tensors, send=write)
            return
        self._say(way)
        agent: Any = self._agent and self._agent.agent
        pending: deque[Any] = deque()
        for lists in self._lists[form]:
            handle = agent.initialize_xfer("WRITE" if write else "READ", *lists, self._peer)
            pending.append((handle, agent.transfer(handle)))
            if len(pending) >= _PARTS:
                self._finish(agent, *pending.popleft())
        while pending:
            self._finish(agent, *pending.popleft())
        self._say("done")

    @staticmethod
    def _finish(agent: Any, handle: Any, state: str) -> None:
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL says {state}")
        agent.release_xfer_handle(handle)

    def _say(self, what: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(what + "\n")
            self._process.stdin.flush()

    def _heard(self) -> str:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError("the other end has ended")
        return line


def serve(library: str, folder: str, sizes: Sequence[int]) -> None:
    """The other end."""
    # Libraries write to the standard output, too.
    said = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    whole = memory(sum(sizes))
    parts = list(whole.split(list(sizes)))
    if library in _PAIRS:
        pair = _PAIRS[library](0, folder)
        print(whole.data_ptr(), file=said)
        for line in sys.stdin:
            way, *form = line.split()
            pair.move([whole] if form else parts, send=way == "give")
        return
    agent = Agent("there").agent
    Path(folder, "metadata").write_bytes(agent.get_agent_metadata())
    print(whole.data_ptr(), file=said)
    # Not buffered: what has arrived and was not read must show in the descriptor.
    commands = os.fdopen(os.dup(0), "rb", buffering=0)
    both = True  # until they are connected
    while line := commands.readline():
        # Over TCP a transfer needs both ends; this one does nothing else until it is done. Without
        # it UCX copies in the call of the other end, which this one would only take time from. It
        # looks now and then all the same: a connection that is not complete needs both ends, too.
        moving = line.strip() != b"done"
        busy = both and moving
        while not select.select([commands], [], [], 0 if busy else _REST_S)[0]:
            for _ in range(100 if busy else 1):
                agent.get_new_notifs()
        both = _needs_both() or (both and moving)


def _needs_both() -> bool:
    return "tcp" in os.environ.get("UCX_TLS", "")


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], [int(size) for size in sys.argv[3:]])
