"""A store that a process leaves in one thread, while another one uses it."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from torchstore_core.clients.stores.joined import JoinedStore
from torchstore_core.plugins.ranking import Policy


class _Session:
    pid = os.getpid()

    def close(self, *, now: bool = True) -> None:
        return None


def test_a_session_may_be_dropped_while_its_store_is_left() -> None:
    made: list[Any] = []
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def drop(store: JoinedStore, gate: threading.Barrier) -> None:
        gate.wait(60)
        for _ in range(40):
            made.append(_Session())
            store._session = made[-1]
            store.reset()

    try:
        for _ in range(100):
            store, gate = JoinedStore("s", "unix:/s", Policy.make(), 1, False), threading.Barrier(2)
            for _ in range(400):
                made.append(_Session())
                store._earlier.add(made[-1])
            dropping = threading.Thread(target=drop, args=(store, gate))
            dropping.start()
            gate.wait(60)
            store.close()  # raised RuntimeError: Set changed size during iteration
            dropping.join()
    finally:
        sys.setswitchinterval(interval)
