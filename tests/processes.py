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
import subprocess
import sys
import tempfile
import textwrap
import types
from collections.abc import Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import IO

__all__ = ["Script", "fork_server", "run_script", "stop_fork_server"]


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
        if fresh or wrapper:
            self._process: _Fresh | _Forked = _Fresh(source, self._out, self._err, wrapper)
        else:
            self._process = _Forked(source, self._out, self._err)

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

    async def output(self, timeout: float = 60.0) -> str:
        """What it printed; fails the test if it failed or does not end."""
        status = await asyncio.to_thread(self._process.wait, timeout)
        assert status == 0, f"the script failed ({status}):\n{_text(self._err)}"
        return _text(self._out)


async def run_script(
    body: str, timeout: float = 60.0, *, fresh: bool = False, wrapper: Sequence[str] = ()
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
        ends = [Connection(os.dup(file.fileno()), readable=False) for file in (out, err)]
        self._process = fork_server().Process(target=_run, args=(source, {**os.environ}, *ends))
        self._process.start()
        self.pid = int(self._process.pid or 0)
        for end in ends:
            end.close()

    def wait(self, timeout: float) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _run(source: str, environment: dict[str, str], out: Connection, err: Connection) -> None:
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    # What the script defines is of no module that can be imported.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(source, "<script>", "exec"), main.__dict__)
    atexit._run_exitfuncs()
