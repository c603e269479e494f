"""When a keeper gives up its server: programs that do what a server says, and die."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Of each life of its server: it says that it is ready, or not; and dies, or ends well in the last.
PROGRAM = """
import os, signal, sys
from torchstore_core.server.keeping.keeper import Keeper

told, always_ready, last = sys.argv[1], sys.argv[2] == "True", int(sys.argv[3])

def serve(keeper):
    with open(told, "a") as file:
        file.write("x")
    if keeper.life == 1 or always_ready:
        keeper.ready()
    if keeper.life < last:
        os.kill(os.getpid(), signal.SIGKILL)
    return 0

sys.exit(Keeper(serve, print).run())
"""


def lives(tmp_path: Path, *, ready: bool, last: int) -> tuple[int, int]:
    """How many lives a keeper has made, and its exit status."""
    told = tmp_path / "lives"
    quiet = {**os.environ, "TORCHSTORE_LOG_LEVEL": "ERROR"}
    keeper = [sys.executable, "-c", PROGRAM, str(told), str(ready), str(last)]
    ended = subprocess.run(keeper, env=quiet, timeout=200, stdout=subprocess.DEVNULL, check=False)
    return len(told.read_text()), ended.returncode


def test_a_server_that_always_comes_up_is_started_again(tmp_path: Path) -> None:
    assert lives(tmp_path, ready=True, last=70) == (70, 0)


def test_one_that_does_not_come_up_is_given_up(tmp_path: Path) -> None:
    made, status = lives(tmp_path, ready=False, last=200)
    assert 30 <= made < 200
    assert status == 1


@pytest.mark.soak
def test_one_that_comes_up_faster_than_any_server_can_is_given_up(tmp_path: Path) -> None:
    made, status = lives(tmp_path, ready=True, last=5000)
    assert 100 < made < 5000
    assert status == 1


# Its server cannot start again at the moment, more often than it may die before it is given up.
LATER = """
import os
from torchstore_core.server.keeping import keeper as keeping

keeping._MOST_DEATHS = 1.5

def serve(keeper):
    if keeper.life == 1:
        keeper.ready()
        os.abort()
    return os.EX_TEMPFAIL if keeper.life < 4 else 0

raise SystemExit(keeping.Keeper(serve, print).run())
"""


def test_a_server_that_cannot_start_at_the_moment_is_not_given_up() -> None:
    program = [sys.executable, "-c", LATER]
    ended = subprocess.run(program, text=True, timeout=200, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 0, ended.stderr


# The owner ends when its server cannot start again, and never can.
WITHOUT_OWNER = """
import os, sys, time
from torchstore_core.server.keeping import keeper as keeping

keeping._MOST_DEATHS = 2.5
if not (owner := os.fork()):
    sys.stdin.readline()
    os._exit(0)

def serve(keeper):
    if keeper.life == 1:
        keeper.ready()
        os.abort()
    os.write(2, b"\\n")
    return os.EX_TEMPFAIL

raise SystemExit(keeping.Keeper(serve, print, owner).run())
"""


def test_a_keeper_whose_owner_has_ended_does_not_wait_for_ever() -> None:
    program = [sys.executable, "-c", WITHOUT_OWNER]
    pipe = subprocess.PIPE
    with subprocess.Popen(program, text=True, stdin=pipe, stderr=pipe) as keeper:
        assert keeper.stdin is not None
        assert keeper.stderr is not None
        while keeper.stderr.readline() != "\n":
            assert keeper.poll() is None
        keeper.stdin.close()
        assert keeper.wait(60) == 1


# The owner ends while its server hangs, in each life but the last; or is only slow, and hears it.
HANGING = """
import asyncio, os, sys, time
from torchstore_core.server.keeping import keeper as keeping

keeping._HEAR_S = 0.5
if not (owner := os.fork()):
    sys.stdin.readline()
    os._exit(0)

async def main(keeper):
    ended = asyncio.Event()
    keeper.watch(ended.set, exit)
    keeper.ready()
    await ended.wait()
    time.sleep(1.5)  # it has heard, and may take its time

def serve(keeper):
    os.write(2, b"\\n")
    if keeper.life == 1 and sys.argv[1] == "hangs":
        keeper.ready()
        time.sleep(1000)
    asyncio.run(main(keeper))
    return 0

raise SystemExit(keeping.Keeper(serve, print, owner).run())
"""


@pytest.mark.parametrize("how", ["hangs", "hears"])
def test_a_server_that_hangs_does_not_outlive_its_owner(how: str) -> None:
    program = [sys.executable, "-c", HANGING, how]
    heard = {**os.environ, "TORCHSTORE_LOG_LEVEL": "WARNING"}
    pipe = subprocess.PIPE
    with subprocess.Popen(program, env=heard, text=True, stdin=pipe, stderr=pipe) as keeper:
        assert keeper.stdin is not None
        assert keeper.stderr is not None
        assert keeper.stderr.readline() == "\n"
        keeper.stdin.close()
        said = keeper.stderr.read()
        assert keeper.wait(60) == 0, said
    assert ("killing it" in said) == (how == "hangs"), said


# What a server knows of a volume in another process, at most: see ``messages.MAX_HELLO_FRAME``.
LONG = """
import os
from torchstore_core.server.keeping.keeper import Keeper

def serve(keeper):
    if keeper.life == 1:
        keeper.note(volume="x" * 90_000)
        keeper.ready()
        os.abort()
    assert len(keeper.facts["volume"]) == 90_000
    return 0

raise SystemExit(Keeper(serve, print).run())
"""


def test_a_keeper_hears_the_longest_message() -> None:
    program = [sys.executable, "-c", LONG]
    ended = subprocess.run(program, text=True, timeout=200, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 0, ended.stderr


# Its server leaves the descriptor of a pipe with a keeper that has none left: while it starts; or
# later, and again when there are some.
WITHOUT_DESCRIPTORS = """
import asyncio, os, resource, sys
from torchstore_core.server.keeping.keeper import Keeper

before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
at_start = sys.argv[1] == "at start"

def limit(number):
    resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (number, most))

async def main(keeper):
    pipe, _ = os.pipe()
    answers = asyncio.Queue()
    keeper.watch(sys.exit, sys.exit)
    keeper.unkept = answers.put_nowait
    keeper.ask_to_keep("first", pipe, answers.put_nowait)
    assert await answers.get() is True
    if not at_start:
        keeper.ready()
    limit(5)
    if at_start:
        keeper.keep("pipe", pipe)
        await asyncio.Event().wait()
    keeper.keep("pipe", pipe)
    assert await answers.get() == "pipe"
    keeper.ask_to_keep("pipe", pipe, answers.put_nowait)
    assert await answers.get() is False
    limit(before)
    keeper.ask_to_keep("pipe", pipe, answers.put_nowait)
    assert await answers.get() is True
    keeper.rename("pipe", "first")
    os.abort()

def serve(keeper):
    if keeper.life == 1:
        asyncio.run(main(keeper))
    assert keeper.names() == ["first"]
    return 0

sys.exit(Keeper(serve, print).run())
"""


def run_without_descriptors(when: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-c", WITHOUT_DESCRIPTORS, when]
    return subprocess.run(program, text=True, timeout=200, stderr=subprocess.PIPE, check=False)


def test_a_keeper_without_descriptors_says_what_it_does_not_hold() -> None:
    ended = run_without_descriptors("later")
    assert ended.returncode == 0, ended.stderr


def test_a_server_that_cannot_be_kept_is_not_started() -> None:
    ended = run_without_descriptors("at start")
    assert ended.returncode == 1
    assert ended.stderr.strip().endswith("OSError: [Errno 24] Too many open files")


# Its server dies in its first life, when the keeper may start no other process. The kernel does not
# limit those of root.
WITHOUT_PROCESSES = """
import os, resource, signal, sys
from torchstore_core.server.keeping.keeper import Keeper

def serve(keeper):
    keeper.ready()
    if keeper.life == 1:
        _, most = resource.getrlimit(resource.RLIMIT_NPROC)
        resource.prlimit(os.getppid(), resource.RLIMIT_NPROC, (0, most))
        os.kill(os.getpid(), signal.SIGKILL)
    return 0

if not os.getuid():
    os.setresuid(12345, 12345, 12345)
limits = resource.getrlimit(resource.RLIMIT_NPROC)
if not os.fork():  # only the same user may change it
    os.close(2)
    sys.stdin.readline()
    resource.prlimit(os.getppid(), resource.RLIMIT_NPROC, limits)
    os._exit(0)
sys.exit(Keeper(serve, print).run())
"""


def test_a_keeper_that_may_start_no_process_waits_until_it_may() -> None:
    program = [sys.executable, "-c", WITHOUT_PROCESSES]
    heard = {**os.environ, "TORCHSTORE_LOG_LEVEL": "WARNING"}
    pipe = subprocess.PIPE
    with subprocess.Popen(program, env=heard, text=True, stdin=pipe, stderr=pipe) as keeper:
        assert keeper.stdin is not None
        assert keeper.stderr is not None
        said = ""
        while "cannot be started" not in said:
            said = keeper.stderr.readline()
            assert said, "the keeper has ended"
        keeper.stdin.close()
        assert keeper.wait(60) == 0


# Its server leaves more with a keeper that is stopped than the kernel takes for it, and goes on.
STOPPED = """
import asyncio, os, signal
from torchstore_core.errors import StoreFullError
from torchstore_core.server.keeping import link
from torchstore_core.server.keeping.keeper import Keeper

link._LATE_S = 0.1
COUNT = 600

async def main(keeper):
    late, answers = asyncio.Event(), asyncio.Queue()
    keeper.watch(exit, exit)
    keeper.late = late.set
    pipe, _ = os.pipe()
    keeper.ready()
    os.kill(os.getppid(), signal.SIGSTOP)
    before = len(os.listdir("/proc/self/fd"))
    for at in range(COUNT):
        keeper.keep(str(at), pipe)
    await late.wait()
    assert len(os.listdir("/proc/self/fd")) > before  # copies of what could not be sent
    keeper.keep("1", pipe)  # the first is on its way, and this one waits
    for at in range(COUNT):
        if at % 3:
            keeper.drop(str(at))
    keeper.keep("3", pipe, said="last")
    try:
        keeper.rename("0", "renamed")
    except StoreFullError:
        keeper.ask_to_keep("end", pipe, answers.put_nowait)
    os.kill(os.getppid(), signal.SIGCONT)
    assert await answers.get() is True
    assert len(os.listdir("/proc/self/fd")) == before
    keeper.rename("0", "renamed")
    os.abort()

def serve(keeper):
    if keeper.life == 1:
        asyncio.run(main(keeper))
    names = [str(at) for at in range(3, COUNT, 3)]
    assert sorted(keeper.names()) == sorted(["end", "renamed", *names]), keeper.names()
    assert keeper.facts["said"] == "last"
    return 0

raise SystemExit(Keeper(serve, print).run())
"""


def test_a_server_does_not_wait_for_a_keeper_that_is_stopped() -> None:
    program = [sys.executable, "-c", STOPPED]
    ended = subprocess.run(program, text=True, timeout=200, stderr=subprocess.PIPE, check=False)
    assert ended.returncode == 0, ended.stderr
