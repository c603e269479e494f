"""A socket is found only when it listens."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import threading

from torchstore_core.server.serving.listening import Listener


async def test_who_finds_a_socket_is_not_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = f"{folder}/control.sock"
        refused: list[OSError] = []
        is_over = threading.Event()

        def connect() -> None:
            while not is_over.is_set():
                with socket.socket(socket.AF_UNIX) as sock:
                    try:
                        sock.connect(path)
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        refused.append(error)

        connecting = threading.Thread(target=connect)
        connecting.start()
        listeners = [Listener(lambda accepted, pid: accepted.close()) for _ in range(200)]
        for listener in listeners:
            listener.open(path)  # in place of the one before, which goes on listening
        is_over.set()
        await asyncio.to_thread(connecting.join)
        for listener in listeners:
            listener.close()
        assert not refused
