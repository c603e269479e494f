"""What the interpreters that the tests start do before anything else: ``tests/interpreters``."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tests.interpreters.starting import Starter, starter
from tests.monarch.forked import forking
from tests.processes import run_program, run_script
from tests.support import children, commands, open_files, running_store

_COUNTS = "import gc, {0}; print(gc.get_freeze_count(), len(gc.get_objects()), gc.isenabled())"


@pytest.mark.parametrize("module", ["monarch.actor", "torchstore_core"], ids=["engine", "core"])
def test_collections_pass_over_what_large_packages_are_made_of(module: str) -> None:
    command = [sys.executable, "-c", _COUNTS.format(module)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    passed_over, walked, enabled = done.stdout.split()
    assert int(passed_over) > 10 * int(walked)
    assert enabled == "True"


async def test_what_the_fork_server_forks_does_not_take_torch_apart_when_it_ends() -> None:
    body = """
    import weakref
    found = weakref.finalize._registry.items()
    of_torch = [one.atexit for one, info in found if info.func.__module__ == "torch.library"]
    print(len(of_torch) > 100, any(of_torch))
    """
    assert await run_script(body) == "True False\n"


_STARTS_CHILDREN = """
import multiprocessing, os, signal, sys

def child(told, imported):
    own = os.getpid(), os.getppid(), os.getsid(0), os.getcwd(), os.environ["OF_THIS_CHILD"]
    shown = b"OF_THIS_CHILD=value" in open("/proc/self/environ", "rb").read()
    blocked = signal.SIGUSR1 in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    told.put((own, shown, blocked, imported))
    sys.exit(3)

class Imported:
    def __reduce__(self):  # what a new process has imported before it does anything
        return eval, ("'torch' in __import__('sys').modules",)

if __name__ == "__main__":
    os.environ["OF_THIS_CHILD"] = "value"
    os.chdir("..")
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    context = multiprocessing.get_context("spawn")
    told = context.SimpleQueue()
    process = context.Process(target=child, args=(told, Imported()))
    process.start()
    own, *seen = told.get()
    process.join()
    same = own == (process.pid, os.getpid(), os.getsid(0), os.getcwd(), "value")
    print(same, process.exitcode, *seen)
"""


async def test_what_a_twin_forks_is_as_what_a_program_starts(tmp_path: Path) -> None:
    program = tmp_path / "folder" / "program.py"
    program.parent.mkdir()
    program.write_text(_STARTS_CHILDREN)
    for twin in (False, True):
        _, said, errors = await run_program(program, directory=program.parent, twin=twin)
        assert not errors
        # All but the last, whether torch is imported, as it is with a new interpreter.
        assert said == f"True 3 True True {twin}\n"


def test_what_stands_in_for_a_worker_passes_on_what_it_says_and_how_it_ends() -> None:
    with tempfile.TemporaryDirectory(
        prefix="ts-", dir="/tmp"
    ) as folder:  # a socket's path is short
        variables = {**os.environ, "MONARCH_ERROR_DURING_BOOTSTRAP_FOR_TESTING": "1"}
        with forking(Path(folder), os.environ) as command:
            done = subprocess.run(
                command, env=variables, capture_output=True, text=True, timeout=200, check=False
            )
    assert done.returncode == 1
    assert "Failed to bootstrap proc due to: Error during bootstrap for testing" in done.stderr


_KEPT = ("Umask", "PPid", "SigBlk", "SigIgn", "SigCgt", "CapEff", "NoNewPrivs", "Cpus_allowed")


def _seen(pid: int) -> dict[str, object]:
    """What the system tells of a server's process, and what is the same for each."""
    own = Path(f"/proc/{pid}")
    status = [line.partition(":\t") for line in own.joinpath("status").read_text().splitlines()]
    return {
        **{name: value for name, _, value in status if name in _KEPT},
        "command": own.joinpath("cmdline").read_bytes().rstrip(b"\0").split(b"\0")[:4],
        "directory": os.readlink(own / "cwd"),
        "files": sorted(file.split(":")[0] for file in open_files(pid).values()),
        "session": os.getsid(pid) == pid,
        "limits": own.joinpath("limits").read_text(),
    }


async def _keeper(made: Starter) -> tuple[int, dict[str, object]]:
    """How many processes were made from the prepared one for a store, and its keeper as seen."""
    before, started = children(), made.started
    async with running_store("local"):
        (keeper,) = commands(b"torchstore_core.server", children() - before)
        return made.started - started, _seen(keeper)


async def test_a_server_of_the_prepared_process_is_as_one_of_a_new_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with starter() as made:
        prepared, like = await _keeper(made)
        monkeypatch.setenv("TORCHSTORE_OF_THIS_TEST", "another environment")
        anew, as_users_have_it = await _keeper(made)
    assert (prepared, anew) == (1, 0)
    assert like == as_users_have_it


async def test_what_another_process_would_not_get_is_started_anew() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with starter() as made:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
        try:
            limited, _ = await _keeper(made)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        before = os.umask(0o027)
        try:
            masked, _ = await _keeper(made)
        finally:
            os.umask(before)
        usual, _ = await _keeper(made)
    assert (limited, masked, usual) == (0, 0, 1)
