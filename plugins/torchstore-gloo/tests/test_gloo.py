"""Everything that pairs do, over gloo."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable

import pytest
import torch
from tests.transports.pairs.alone import check_an_end_that_is_alone
from tests.transports.pairs.pair_tests import PairTests

import torchstore_core as ts
from torchstore_core.errors import TransportError
from torchstore_gloo.pair import make
from torchstore_transports.pairs.connection import PairConnection
from torchstore_transports.pairs.rendezvous import Board, LocalStore


def in_threads(*calls: Callable[[], None]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


class TestGloo(PairTests):
    name = "gloo"
    half = "torchstore_gloo.server"

    @pytest.mark.quick
    async def test_every_byte_arrives(self, shared: ts.Client) -> None:
        await super().test_every_byte_arrives(shared)


def test_an_end_whose_peer_has_gone_gives_up_in_time() -> None:
    """gloo itself waits five times as long as it was told."""
    check_an_end_that_is_alone(make)


@pytest.mark.parametrize("reads", [True, False])
def test_what_has_arrived_when_a_pair_fails_is_known(reads: bool) -> None:
    """So that it is not sent again."""
    size, count = 8 << 20, 20
    board, ends = Board(), {}

    def meet(rank: int) -> None:
        ends[rank] = PairConnection(make(LocalStore(board), rank, "127.0.0.1"))

    in_threads(lambda: meet(0), lambda: meet(1))
    source, into = torch.ones(size, dtype=torch.uint8), torch.zeros(count, size, dtype=torch.uint8)
    runs = [(source.data_ptr(), size)] * count
    places = [(row.data_ptr(), size) for row in into]

    def move() -> None:
        call, given = (ends[1].download, places) if reads else (ends[1].upload, runs)
        with pytest.raises(TransportError):
            call(given)

    def fail() -> None:
        pair = ends[0]._pair
        if reads:
            waits = [pair.send(source) for _ in range(12)]
        else:  # two groups are acknowledged, and a third has come in part
            waits = [pair.receive(row) for row in into[:12]]
        for wait in waits[:8]:
            wait()
        if not reads:
            for _ in range(2):
                pair.send(torch.zeros(1, dtype=torch.uint8))()
        for wait in waits[8:]:
            wait()
        ends[0].kill()

    in_threads(move, fail)
    arrived = ends[1].arrived // size
    if reads:
        assert 4 <= arrived <= 12
        assert bool(into[:arrived].all())
    else:
        assert arrived in (4, 8)


_ENDS = '''
    import asyncio, functools, os, socket, sys, threading, time

    class LosesTheConnection:
        """When it is deleted, which is when the interpreter is already ending."""

        def __init__(self):
            self.calls = []
            for fd in map(int, os.listdir("/proc/self/fd")):
                if os.path.exists(f"/proc/self/fd/{fd}"):
                    if os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                        one = socket.socket(fileno=fd)
                        if not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                            self.calls.append(functools.partial(one.shutdown, socket.SHUT_RDWR))
            # Functions, because modules are empty by then. One gives way to the thread.
            self.calls.append(functools.partial(time.sleep, 0.5))
            self.calls.append(functools.partial(os.write, 1, b"late"))

        def __del__(self, OSError=OSError):
            for call in self.calls:
                try:
                    call()
                except OSError:  # it is not connected
                    pass

    import torch
    from torchstore_gloo.pair import make
    from torchstore_transports.pairs.connection import PairConnection
    from torchstore_transports.pairs.rendezvous import Board, LocalStore
    from torchstore_transports.pairs.threads import in_thread

    async def main():
        board, ends = Board(), {}

        def meet(rank):
            ends[rank] = PairConnection(make(LocalStore(board), rank, "127.0.0.1"))

        await asyncio.gather(*(in_thread(lambda rank=rank: meet(rank)) for rank in (0, 1)))
        into = torch.zeros(1 << 20, dtype=torch.uint8)
        in_thread(lambda: ends[1].download([(into.data_ptr(), into.numel())]))
        while not any(t.name == "torchstore-pair" for t in threading.enumerate()):
            await asyncio.sleep(0)
        await asyncio.sleep(0.2)  # so that it waits inside of the library
        return into, ends

    into, ends = asyncio.run(main())
    sys.late = LosesTheConnection()
    print("end", flush=True)
    '''


def test_a_process_may_end_while_a_thread_waits_for_its_peer() -> None:
    """A thread that returns from the library while the interpreter is ending would abort it."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_ENDS)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "end\nlate"), done.stderr
