"""Everything that pairs do, over gloo."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.transports.pairs.alone import check_an_end_that_is_alone
from tests.transports.pairs.pair_tests import PairTests

from torchstore_gloo.pair import make


class TestGloo(PairTests):
    name = "gloo"
    half = "torchstore_gloo.server"


def test_an_end_whose_peer_has_gone_gives_up_in_time() -> None:
    """gloo itself waits five times as long as it was told."""
    check_an_end_that_is_alone(make)


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
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "end\nlate"), done.stderr
