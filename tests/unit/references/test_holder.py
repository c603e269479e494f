"""What a process holds at a store that it has not joined."""

from __future__ import annotations

import socket
import tempfile

from torchstore_core.clients.session.holder import Holder, StorePlace
from torchstore_core.values import ObjectRef


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
            holder.begin(ident, ObjectRef("w", 1))
            holder.end(ident)
        assert holder.usable
        assert holder.busy
        holder.close()
