"""A server in a process of its own, or its keeper, which this process starts and ends."""

from __future__ import annotations

import asyncio
import atexit
import errno
import functools
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from torchstore_core.clients.calls.thread_loops import in_thread, is_patched
from torchstore_core.contracts.when_full import SPILL_URL, URL_END_S, is_url, shown_place
from torchstore_core.errors import (
    ConfigurationError,
    StoreClosedError,
    StoreTimeoutError,
    from_wire,
    in_seconds,
)
from torchstore_core.machine.directories import is_abandoned
from torchstore_core.machine.processes import is_exiting
from torchstore_core.machine.sockets.unix import descriptors

log = logging.getLogger(__name__)

_KILL_AFTER_S = 3.0
_CANCEL_START_S = 1.0
# What was killed has so long to be gone, whatever the time-out was.
_KILLED_S = 1.0
# Linux takes 128 KiB in one argument, the null byte at its end included.
_LONGEST_ARGUMENT = (128 << 10) - 1


class ServerProcess:
    """Starts ``python -m torchstore_core.server`` and supervises the process.

    Args:
        module: what is run in its place: it has a server in another process, and says of it what
            the server would say.

    Attributes:
        server_pid: of the server, once it has started.
        exiting: see ``contracts.runtime.Runtime``.
    """

    def __init__(self, module: str = "torchstore_core.server") -> None:
        self._module = module
        self.server_pid = 0
        self.exiting = False
        self._process: subprocess.Popen[bytes] | None = None
        self._path = self._directory = ""
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._start_cancelled = False
        self._kill_after_s = _KILL_AFTER_S

    async def launch(self, config: Mapping[str, object], timeout: float) -> str:
        """Start the server; returns its address.

        Args:
            config: the options that are not to be the defaults, see ``server.__main__``.

        Raises:
            StoreTimeoutError: it took longer than ``timeout`` seconds.
            StoreClosedError: the process has ended, or could not be started.
            TransportNotReadyError: this process has no file descriptor left.
            ConfigurationError: Python does not know its executable, or the program is frozen.
            TorchStoreError: why the server cannot start.
        """
        if not sys.executable:
            raise ConfigurationError(
                "sys.executable is empty, as where Python is embedded in another program: set it "
                "to the interpreter that is to run the server"
            )
        if getattr(sys, "frozen", False) and "python" not in os.path.basename(sys.executable):
            raise ConfigurationError(
                f"this program is frozen (by PyInstaller, say), so {sys.executable} is the program "
                "itself, and would be started once more instead of a server: start one with "
                "`torchstore serve`, and connect to it; or set sys.executable to a Python that has "
                "these packages"
            )
        if is_patched():
            raise ConfigurationError(
                "gevent has patched this program, and starts processes in the main thread alone: "
                "call initialize there, and make further calls in gevent.get_hub().threadpool; or "
                "start the store with `torchstore serve`, and connect to it"
            )
        # -P: the server must not import modules that happen to be in the current directory. It gets
        # a process session of its own, so that Ctrl-C goes only to the owner, which then stops it.
        command = [sys.executable, "-P", "-m", self._module]
        spill = config.get("spill")
        more: dict[str, str] = {}
        if isinstance(spill, str) and is_url(spill) and not config.get("attached"):
            self._kill_after_s = _KILL_AFTER_S + URL_END_S
            config, more = {**config, "spill": shown_place(spill)}, _for_url(spill)
        command.append(_argument(config))
        try:
            launch = functools.partial(self._launch, command, {**os.environ, **more})
            line = await asyncio.wait_for(in_thread(launch), timeout)
            return self._address(line)
        except TimeoutError as error:
            await self._cancel_start()
            raise StoreTimeoutError(
                f"the server of store {config['store_name']!r} did not come up within "
                f"{in_seconds(timeout)}; what holds a server up for longer than 10 s is in its "
                "log, on standard error",
                details={"operation": "initialize", "timeout": timeout},
            ) from error
        except BaseException:
            await self._cancel_start()
            raise

    def _launch(self, command: list[str], environment: Mapping[str, str]) -> bytes:
        """Start the server, wait until it is ready, and return the line that it prints then.

        Runs in a thread, which continues if the caller is cancelled: see :meth:`_cancel_start`.
        """
        with self._lock:
            if self._start_cancelled:
                return b""
            try:
                with descriptors("a server"):
                    process = self._process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        env=environment,
                        start_new_session=True,
                    )
            except OSError as error:
                too_many = "; see ulimit -u, and the pids limit of this container or unit"
                raise StoreClosedError(
                    f"no process can be started for a server: {error}"
                    f"{too_many if error.errno == errno.EAGAIN else ''}"
                ) from error
        atexit.register(self._at_exit)
        if process.stdout is None:
            return b""
        with process.stdout as stream:  # a site's sitecustomize may print something, too
            return next((line for line in stream if line.startswith(b"{")), b"")

    async def _cancel_start(self) -> None:
        """Stop a server that is starting, or prevent one from being started."""
        with self._lock:
            self._start_cancelled = True
        await self.stop(_CANCEL_START_S)

    def _address(self, line: bytes) -> str:
        try:
            answer = msgspec.json.decode(line, type=dict[str, str | int])
        except msgspec.DecodeError as error:
            raise StoreClosedError(
                "the server ended while starting; its standard error says why. It was to be run by "
                f"sys.executable, {sys.executable}"
            ) from error
        if "address" not in answer:
            raise from_wire(str(answer.get("error")), f"server: {answer.get('message')}", None, {})
        address = str(answer["address"])
        self._path = address.partition(":")[2]
        self._directory = os.path.dirname(self._path)
        self.server_pid = int(answer["pid"])
        return address

    @property
    def pid(self) -> int:
        """Of the process that was started: the server, or its keeper; 0: there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def exit_status(self) -> int | None:
        """Of that process; None: it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def ended(self) -> bool:
        """Whether it has ended, or is about to."""
        process = self._process
        if process is None or os.getpid() != self._owner:
            return False
        # A server that is about to exit no longer listens.
        return process.poll() is not None or is_exiting(process.pid) or is_abandoned(self._path)

    def release(self) -> threading.Thread:
        """Leave the server to its members: :meth:`stop` and the end of this process no longer
        affect it. The returned thread ends after the server has ended and its files were removed.
        """
        process, self._process = self._process, None
        atexit.unregister(self._at_exit)
        return self._leave(process)

    def _leave(self, process: subprocess.Popen[bytes] | None) -> threading.Thread:
        waiter = threading.Thread(
            target=self._reap, args=(process,), name="torchstore-server", daemon=True
        )
        waiter.start()
        return waiter

    def _reap(self, process: subprocess.Popen[bytes] | None) -> None:
        if process is not None:
            process.wait()
            shutil.rmtree(self._directory, ignore_errors=True)

    async def stop(self, timeout: float) -> None:
        """End the server, and return when it has ended; kill it if it takes longer. The kernel may
        take long to free a large memory or spill file; that is waited for as long as ``timeout``.
        """
        if self._process is None or os.getpid() != self._owner:
            return
        self._process.terminate()
        # Shielded, so that the process is waited for even if the caller is cancelled.
        await asyncio.shield(asyncio.ensure_future(in_thread(lambda: self._stop(timeout))))

    def _stop(self, timeout: float) -> None:
        left = self._end(timeout)
        if left is not None:
            self._leave(left)

    def _end(self, timeout: float) -> subprocess.Popen[bytes] | None:
        """Wait for the server, and kill it if need be; returns it unless it has ended."""
        process, self._process = self._process, None
        atexit.unregister(self._at_exit)
        if process is None:
            return None
        started = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            process.wait(min(timeout, self._kill_after_s))
        if process.poll() is None and not is_exiting(process.pid):
            log.warning("server %d does not end by itself; killing it", process.pid)
            process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(_KILLED_S, started + timeout - time.monotonic()))
        if self._directory:  # the server removes it unless it was killed
            shutil.rmtree(self._directory, ignore_errors=True)
        if process.poll() is not None:
            return None
        log.warning(
            "server %d has ended, but the kernel is still freeing its memory or its files",
            process.pid,
        )
        return process

    def _at_exit(self) -> None:
        """The owner exits without a shutdown: stop the server, and wait for it."""
        if self._process is None:
            return
        if os.getpid() != self._owner:
            self._process.returncode = 0  # the parent waits for it; prevents Popen's warning here
            return
        self.exiting = True
        self._process.terminate()
        left = self._end(self._kill_after_s)
        if left is not None:
            left.returncode = 0  # as above


def _argument(config: Mapping[str, object]) -> str:
    """The options of a server, as an argument of its command: in ASCII, since the locale may have
    nothing else.
    """
    encoded = _ascii(config)
    if len(encoded) > _LONGEST_ARGUMENT:  # with thousands of folders in sys.path
        encoded = _ascii({**config, "installed": None})  # it finds them itself
    return encoded


def _ascii(config: Mapping[str, object]) -> str:
    return json.dumps(msgspec.to_builtins(config), separators=(",", ":"))


def _for_url(url: str) -> dict[str, str]:
    """What the environment of a server has to have that spills to a URL: the URL, and how this
    program has configured fsspec for its protocols.

    Raises:
        ConfigurationError: that cannot be sent to another process.
    """
    found = {SPILL_URL: url}
    fsspec: Any = sys.modules.get("fsspec")
    for part in url.split("::") if fsspec is not None else ():
        protocol = part.partition("://")[0]
        if configured := fsspec.config.conf.get(protocol):
            try:
                found[f"FSSPEC_{protocol.upper()}"] = msgspec.json.encode(configured).decode()
            except TypeError as error:
                raise ConfigurationError(
                    f"spill={shown_place(url)!r}: another process spills, which cannot be sent "
                    f"fsspec.config.conf[{protocol!r}]: {error}; set environment variables instead",
                    details={"spill": shown_place(url)},
                ) from error
    return found
