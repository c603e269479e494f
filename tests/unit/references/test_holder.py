"""What a process holds at a store that it has not joined."""

from __future__ import annotations

import itertools
import os
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor

from torchstore_core.clients.session.holder import Holder, StorePlace
from torchstore_core.values import ObjectRef
from torchstore_core.wire import messages as m
from torchstore_core.wire.framing import FrameReader, decode_request


def test_nothing_is_given_up_while_the_server_is_late() -> None:
    """Everything was, as soon as the default time-out of the program's sockets had passed."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/control.sock")
        server.listen()
        socket.setdefaulttimeout(0.05)
        try:
            holder = Holder.open(StorePlace("store", 1, f"unix:{folder}/control.sock", "host"))
        finally:
            socket.setdefaulttimeout(None)
        for ident in range(2000):  # more than the system keeps for who reads nothing
            holder.live[ident] = ObjectRef("w", 1)
            holder.end(ident)
        assert holder.usable
        assert holder.busy
        holder.close()


def test_references_that_end_one_after_the_other_wake_nobody() -> None:
    """Each had woken the thread that was about to look again in any case."""
    ours, theirs = socket.socketpair()
    woken: list[None] = []
    with ours, theirs:
        place = StorePlace("store", 1, "unix:/nowhere", "host")
        holder = Holder(place, ours, itertools.count(1).__next__, lambda: woken.append(None))

        def end(ident: int) -> None:
            holder.live[ident] = ObjectRef("w", 1)
            holder.end(ident)

        end(1)
        assert len(woken) == 1
        assert holder.due_in() == 0
        holder.flush_if_due(now=False)
        assert not holder.busy
        end(2)
        assert len(woken) == 1
        assert holder.due_in() is not None
        holder.flush_if_due(now=True)
        assert not holder.busy
        holder.flush_if_due(now=True)  # nothing has ended meanwhile: it rests
        assert holder.due_in() is None
        end(3)
        assert len(woken) == 2
        holder.flush_if_due(now=True)
        sent = FrameReader(1 << 20).feed(theirs.recv(1 << 16))
        assert [decode_request(body) for body in sent] == [m.Unhold([at]) for at in (1, 2, 3)]


def test_a_child_tells_what_ends_in_it() -> None:
    """Its parent has a thread that was about to look again at the fork; the child has none."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{folder}/control.sock")
        server.listen()
        place = StorePlace("store", 1, f"unix:{folder}/control.sock", "host")
        ours, theirs = socket.socketpair()
        with ours, theirs:
            holder = Holder(place, ours, itertools.count(1).__next__, lambda: None)
            for ident in (1, 2):
                holder.live[ident] = ObjectRef("w", 1)
            holder.end(1)
            assert holder.due_in() is not None
            holder.before_fork()  # as its session does
            pid = os.fork()
            if not pid:
                holder.after_fork_in_child()
                holder.end(2)
                os._exit(holder.busy)
            holder.after_fork_in_parent()
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            holder.close()


def test_the_thread_sends_what_others_could_not() -> None:
    """Nothing ends any more, but what has ended is still to be sent."""
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor() as pool:
        place = StorePlace("store", 1, "unix:/nowhere", "host")
        holder = Holder(place, ours, itertools.count(1).__next__, lambda: None)
        for ident in range(1 << 20):  # more than the system keeps for who reads nothing
            holder.live[ident] = ObjectRef("w", 1)
            holder.end(ident)
        holder.flush(0.0)
        assert holder.busy
        reading = pool.submit(lambda: b"".join(iter(lambda: theirs.recv(1 << 16), b"")))
        holder.flush_if_due(now=True)
        assert not holder.busy
        ours.shutdown(socket.SHUT_WR)
        sent = FrameReader(1 << 26).feed(reading.result())
        ended = [ident for body in sent for ident in decode_request(body).holds]
        assert ended == list(range(1 << 20))
