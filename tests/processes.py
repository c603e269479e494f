"""Processes for tests. To import torch takes 2 to 3 seconds of a processor; so one process does it,
the fork server, and others are forked from it in some 20 ms.

It has never joined a store, and its environment says nothing of one: what it forks is as fresh as a
new interpreter.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import textwrap
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

from tests.interpreters.twins import have_twin

__all__ = [
    "Program",
    "Script",
    "fork",
    "fork_server",
    "run_program",
    "run_script",
    "stop_fork_server",
]


def fork_server() -> ForkServerContext:
    """A context of ``multiprocessing`` whose server runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torchstore_core.api", "tests.frozen"])
    hidden = {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("TORCHSTORE")}
    try:
        forkserver.ensure_running()
    finally:
        os.environ.update(hidden)
    return context


def stop_fork_server() -> None:
    """Otherwise it lives as long as this process."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def fork(
    function: Callable[..., None],
    *args: Any,
    files: Mapping[int, int],
    environment: Mapping[str, str],
) -> BaseProcess:
    """A process of the fork server that runs ``function(*args)``, as a new interpreter would.

    Args:
        function: of a module; what it registers with ``atexit`` runs after it.
        args: what can be pickled.
        files: descriptors of this process, by the numbers that they get there.
        environment: all of its variables; ``PYTHONPATH`` among them counts.
    """
    ends = {number: Connection(os.dup(fd)) for number, fd in files.items()}
    process = fork_server().Process(target=_begin, args=(function, args, {**environment}, ends))
    try:
        process.start()
    finally:
        for end in ends.values():
            end.close()
    return process


def _begin(
    function: Callable[..., None],
    args: Sequence[Any],
    environment: dict[str, str],
    ends: dict[int, Connection],
) -> None:
    for number, end in ends.items():
        os.dup2(end.fileno(), number)
        end.close()
    os.environ.clear()
    os.environ.update(environment)
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]
    # That of the fork server's own processes is no choice of the program.
    multiprocessing.set_start_method(None, force=True)
    try:
        function(*args)
    finally:
        atexit._run_exitfuncs()


class Program:
    """``python PATH ARGUMENTS`` by a process of the fork server, in a session of its own. It is
    used like a ``subprocess.Popen`` with pipes of bytes for its input and output.
    """

    def __init__(self, path: str | Path, *arguments: str, environment: Mapping[str, str]) -> None:
        stdin, ours_in = os.pipe()
        ours_out, stdout = os.pipe()
        try:
            self._process = fork(
                _run_path,
                [str(path), *arguments],
                os.getcwd(),
                files={0: stdin, 1: stdout, 2: 2},
                environment=environment,
            )
        finally:
            os.close(stdin)
            os.close(stdout)
        self.stdin = open(ours_in, "wb")  # noqa: SIM115
        self.stdout = open(ours_out, "rb")  # noqa: SIM115
        self.pid = int(self._process.pid or 0)
        self._read: list[bytes] = []

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
        return status

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[bytes, None]:
        """End its input, and wait; all that it has said since the last line that was read."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        if not self.stdout.closed:
            thread = threading.Thread(target=lambda: self._read.append(self.stdout.read()))
            thread.start()
            self.wait(timeout)
            thread.join()
            self.stdout.close()
        return b"".join(self._read), None


async def run_program(
    path: str | Path,
    *arguments: str,
    directory: str | Path = ".",
    environment: Mapping[str, str] = os.environ,
    timeout: float = 200.0,
    twin: bool = False,
    executable: str | Path = sys.executable,
) -> tuple[int, str, str]:
    """``python PATH ARGUMENTS`` in a directory, by a process of the fork server.

    Args:
        twin: what the program starts with ``multiprocessing`` has imported torch, too.
        executable: what the program takes for its interpreter.

    Returns:
        Its exit status, and what it wrote to its output and to its standard error.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = fork(
            _run_path,
            [str(path), *arguments],
            str(directory),
            twin,
            str(executable),
            files={1: out.fileno(), 2: err.fileno()},
            environment=environment,
        )
        try:
            await asyncio.to_thread(process.join, timeout)
            status = process.exitcode
            assert status is not None, f"{path} has not ended:\n{_text(err)}"
        finally:
            process.kill()
            process.join()
        return status, _text(out), _text(err)


def _run_path(
    command: list[str], directory: str, twin: bool = False, executable: str = sys.executable
) -> None:
    os.setsid()
    if twin:
        have_twin()
    sys.executable = executable
    os.chdir(directory)
    sys.argv[:] = command
    sys.path.insert(0, str(Path(command[0]).parent))
    # A process of the fork server has none but the null device.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    runpy.run_path(command[0], run_name="__main__")


class Script:
    """The body of an async function, run by a process that inherits this environment.

    The body finds ``asyncio``, ``sys``, ``torch`` and ``ts`` imported. A context manager: the
    process does not outlive it.

    Args:
        body: Python, indented as you like.
        fresh: by a new interpreter: for what is about imports, or about variables that are read
            when they happen.
        wrapper: a command that runs the new interpreter, given as its last arguments.
    """

    def __init__(self, body: str, *, fresh: bool = False, wrapper: Sequence[str] = ()) -> None:
        source = (
            "import asyncio, sys, torch\nimport torchstore_core as ts\n"
            f"async def main():\n{textwrap.indent(textwrap.dedent(body), '    ')}\n"
            "asyncio.run(main())\n"
        )
        # Files: pipes would have to be read.
        self._files = contextlib.ExitStack()
        self._out = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        self._err = self._files.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115
        # Opened again: whoever reads them meanwhile must not move the place where it writes.
        paths = [f"/proc/self/fd/{file.fileno()}" for file in (self._out, self._err)]
        with open(paths[0], "a") as out, open(paths[1], "a") as err:
            if fresh or wrapper:
                self._process: _Fresh | _Forked = _Fresh(source, out, err, wrapper)
            else:
                self._process = _Forked(source, out, err)

    def __enter__(self) -> Script:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        self._process.kill()
        if failed is not None:  # what it says may be why the test waited in vain
            print(_text(self._err), file=sys.stderr)
        self._files.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def output(self, timeout: float = 200.0) -> str:
        """What it printed; fails the test if it failed or does not end."""
        status = await asyncio.to_thread(self._process.wait, timeout)
        assert status == 0, f"the script failed ({status}):\n{_text(self._err)}"
        return _text(self._out)


async def run_script(
    body: str, timeout: float = 200.0, *, fresh: bool = False, wrapper: Sequence[str] = ()
) -> str:
    """Run a :class:`Script` to its end; what it printed."""
    with Script(body, fresh=fresh, wrapper=wrapper) as script:
        return await script.output(timeout)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


class _Fresh:
    def __init__(self, source: str, out: IO[str], err: IO[str], wrapper: Sequence[str]) -> None:
        command = [*wrapper, sys.executable, "-c", source]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True
        )
        self.pid = self._process.pid

    def wait(self, timeout: float) -> int:
        return self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class _Forked:
    def __init__(self, source: str, out: IO[str], err: IO[str]) -> None:
        files = {1: out.fileno(), 2: err.fileno()}
        self._process = fork(_run, source, files=files, environment=os.environ)
        self.pid = int(self._process.pid or 0)

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(source: str) -> None:
    # What the script defines is of no module that can be imported.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "<script>", "exec"), main.__dict__)
