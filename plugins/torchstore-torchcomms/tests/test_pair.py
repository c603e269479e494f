"""How a communicator is made."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from torchstore_torchcomms import pair
from torchstore_transports.pairs.rendezvous import Board, LocalStore


def test_threads_of_the_library_restore_the_environment_once() -> None:
    """Whoever was second let go of a lock that another communicator had."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            for _ in range(400):
                store, gate = LocalStore(Board()), threading.Barrier(4)

                def uses(store: LocalStore = store, gate: threading.Barrier = gate) -> None:
                    gate.wait(60)
                    store.before_call()

                with pair._ranked(0, store):
                    for used in [threads.submit(uses) for _ in range(4)]:
                        used.result()
    finally:
        sys.setswitchinterval(interval)
    assert not pair._environment.locked()
