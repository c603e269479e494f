"""A small /dev/shm, one OpenMP thread, spawned processes, owners that forget to shut down."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from tests.processes import Script, run_script
from tests.reliability import children
from tests.reliability.harness import MB, Child, directory_of, is_running
from tests.support import disk_of, running_store, until

import torchstore_core as ts

ROUND_TRIP = """
    await ts.initialize(capacity=320 << 20, prefault=0)
    value = torch.arange(32 << 20, dtype=torch.int32)
    await ts.put("a", value)
    held = await ts.get("a")
    assert torch.equal(held, value)
    mine = torch.zeros_like(value)
    await ts.get("a", mine)
    assert torch.equal(mine, value)
    await ts.put("a", value + 1)
    assert torch.equal(held, value)
    held += 1
    assert torch.equal(await ts.get("a"), held)
    del held
    await ts.shutdown()
"""


def _small_shm() -> list[str]:
    """A command that runs another where /dev/shm has 1 MB; skips where that is not permitted."""
    script = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"'
    for unshare in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        command = [*unshare, "sh", "-c", script, "sh"]
        try:
            subprocess.run([*command, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = getattr(error, "stderr", None) or error
            continue
        return command
    pytest.skip(f"no mount namespace with a /dev/shm of its own: {why!r}")


async def test_a_dev_shm_of_1_mb_does_not_matter():
    body = """
    import os
    small = os.statvfs("/dev/shm")
    assert small.f_blocks * small.f_frsize == 1 << 20
"""
    wrapper = await asyncio.to_thread(_small_shm)
    await run_script(body + ROUND_TRIP, wrapper=wrapper)


@pytest.mark.parametrize("killed", [False, True])
async def test_a_directory_of_sockets_that_somebody_has_removed_is_made_again(
    killed: bool, monkeypatch: pytest.MonkeyPatch
):
    """As what cleans up temporary files does, or a system when the user's last session ends."""
    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        for name in ("before", "after"):
            os.makedirs(f"{base}/{name}/torchstore", mode=0o700)
        os.symlink("before", f"{base}/run")
        os.symlink("after", f"{base}/later")
        monkeypatch.setenv("XDG_RUNTIME_DIR", f"{base}/run")
        async with running_store() as store:
            value = torch.arange(1 << 20)
            await store.put("w", value)
            os.chmod(f"{base}/after/torchstore", 0o755)  # where no server makes anything
            os.replace(f"{base}/later", f"{base}/run")
            with pytest.raises(ts.StoreClosedError, match="somebody has removed the socket"):
                await asyncio.to_thread(lambda: asyncio.run(store.exists("w")))
            os.chmod(f"{base}/after/torchstore", 0o700)
            if killed:
                os.kill((await store.status()).controller_pid, signal.SIGKILL)
            else:
                directory = directory_of(store.address)
                await until(lambda: len(list(directory.glob("*.sock"))) == 2)
            assert torch.equal(await store.get("w"), value)
            other = await ts.connect(store.address, store_name="other")
            assert (await other.explain(value.nbytes))[0]["chosen"] == "shm"
            assert torch.equal(await other.get("w"), value)
            await ts.shutdown("other")
        assert os.listdir(f"{base}/after/torchstore") == []


async def test_a_disk_without_room_for_a_socket_is_named(monkeypatch: pytest.MonkeyPatch):
    with tempfile.TemporaryDirectory(dir="/tmp") as base, disk_of(Path(base) / "run", MB) as run:
        # It has room for itself and for two directories.
        subprocess.run(["mount", "-o", "remount,nr_inodes=3", str(run)], check=True)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
        with pytest.raises(ts.ConfigurationError, match=rf"No space left.*{run}/.*or TMPDIR"):
            await ts.initialize(capacity=MB, prefault=0)
        assert list(run.glob("torchstore/*")) == []


async def test_a_limit_of_the_size_of_files_is_named():
    """It counts for memory that is shared, too."""
    await run_script("""
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    try:
        await ts.initialize(capacity=64 << 20, prefault=0)
    except ts.StoreFullError as error:
        assert "ulimit -f" in str(error)
    else:
        raise AssertionError
    """)


# Lets a system call fail with an errno (seccomp), in this process and all that it starts.
REFUSED = """
    import ctypes, errno, os, signal, struct
    calls = {"pidfd_open": 434, "memfd_create": 279 if os.uname().machine == "aarch64" else 319}

    def refuse(call, error):
        load, equal, give, rest = 0x20, 0x15, 0x06, 0x7FFF0000
        code = [(load, 0, 0, 0), (equal, 0, 1, calls[call]), (give, 0, 0, 0x50000 | error)]
        code = b"".join(struct.pack("HBBI", *line) for line in (*code, (give, 0, 0, rest)))
        held = ctypes.create_string_buffer(code)
        program = struct.pack("HxxxxxxQ", 4, ctypes.addressof(held))
        prctl = ctypes.CDLL(None, use_errno=True).prctl
        assert prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
        assert prctl(22, 2, ctypes.create_string_buffer(program)) == 0  # PR_SET_SECCOMP
"""


@pytest.mark.parametrize("error", ["ENOSYS", "EPERM"])
async def test_a_server_comes_back_and_ends_where_there_are_no_pidfds(error: str, tmp_path: Path):
    """As in gVisor, and where a container's filter is older than they are."""
    script = (
        REFUSED
        + f"""
    refuse("pidfd_open", errno.{error})
    await ts.initialize(capacity=64 << 20, prefault=0)
    await ts.put("a", torch.ones(1 << 20))
    for _ in range(2):
        os.kill((await ts.status()).controller_pid, signal.SIGKILL)
        assert (await ts.get("a", timeout=20)).sum() == 1 << 20
    keeper = (await ts.status()).keeper_pid
    await ts.shutdown()  # by a signal; after three seconds it would kill
    assert not os.path.exists(f"/proc/{{keeper}}")
    await ts.initialize(capacity=64 << 20, prefault=0)
    status = await ts.status()
    with open("{tmp_path}/pids", "w") as file:
        print(status.controller_pid, status.keeper_pid, file=file)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    )
    with Script(script, fresh=True) as killed, pytest.raises(AssertionError, match=r"\(-9\)"):
        await killed.output()
    server, keeper = map(int, (tmp_path / "pids").read_text().split())
    await until(lambda: not is_running(server) and not is_running(keeper))


async def test_a_filter_that_forbids_the_memory_of_a_store_is_named():
    await run_script(
        REFUSED
        + """
    refuse("memfd_create", errno.EPERM)
    try:
        await ts.initialize(capacity=64 << 20, prefault=0)
    except ts.ConfigurationError as error:
        assert "memfd_create" in str(error) and "seccomp" in str(error)
    else:
        raise AssertionError
    """,
        fresh=True,
    )


async def test_signals_that_the_owner_ignores_or_blocks_do_not_matter():
    """A process inherits both. Of children that are ignored, nobody learns how they have ended."""
    printed = await run_script("""
    import logging, os, signal, sys
    logging.basicConfig(stream=sys.stdout)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    blocked = signal.SIGCHLD, signal.SIGTERM, signal.SIGINT
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    await ts.initialize(capacity=64 << 20, prefault=0)
    await ts.put("a", 1)
    for _ in range(2):
        os.kill((await ts.status()).controller_pid, signal.SIGKILL)
        assert await ts.get("a", timeout=20) == 1
    keeper = (await ts.status()).keeper_pid
    await ts.shutdown()  # by a signal; after three seconds it would kill
    assert not os.path.exists(f"/proc/{keeper}")
    await ts.initialize(capacity=64 << 20, prefault=0, keeper=False)
    await ts.shutdown()
    """)
    assert "killing it" not in printed


async def test_an_owner_that_may_start_no_process_says_so():
    """The kernel does not limit those of root: it becomes another user, who has imported all."""
    await run_script("""
    import os, resource
    await ts.initialize(capacity=64 << 20, prefault=0)
    await ts.shutdown()
    if not os.getuid():
        os.setresuid(12345, 12345, 12345)
    before = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, before[1]))
    try:
        await ts.initialize(capacity=64 << 20, prefault=0)
    except ts.StoreClosedError as error:
        assert "no process can be started for a server" in str(error)
        assert "ulimit -u" in str(error)
    else:
        raise AssertionError
    resource.setrlimit(resource.RLIMIT_NPROC, before)
    """)


@pytest.mark.parametrize("unknown", [None, ""])
async def test_a_python_that_does_not_know_its_executable_says_so(
    monkeypatch: pytest.MonkeyPatch, unknown: str | None
):
    """It was a TypeError, or a hint at the limit of processes."""
    monkeypatch.setattr("sys.executable", unknown)
    with pytest.raises(ts.ConfigurationError, match=r"sys\.executable is empty"):
        await ts.initialize(store_name="embedded", capacity=MB)


async def test_a_python_that_may_not_be_run_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It pointed at the limit of processes, too."""
    python = tmp_path / "python"
    python.touch(0o600)
    monkeypatch.setattr("sys.executable", str(python))
    with pytest.raises(ts.StoreClosedError, match=rf"Permission denied: '{python}'$"):
        await ts.initialize(store_name="embedded", capacity=MB)


async def test_a_frozen_program_is_not_started_again_as_a_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """It would start itself, and that itself once more, without end."""
    started = tmp_path / "started"
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o700)
    python = sys.executable
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setattr("sys.frozen", True, raising=False)
    with pytest.raises(ts.ConfigurationError, match="this program is frozen"):
        await ts.initialize(store_name="frozen", capacity=MB)
    assert not started.exists()
    monkeypatch.setattr("sys.executable", python)  # as the error says
    await ts.initialize(store_name="frozen", capacity=MB, prefault=0)
    await ts.shutdown("frozen")


async def test_a_path_of_thousands_of_folders_fits(monkeypatch: pytest.MonkeyPatch):
    """As of programs that are built by Bazel: no argument of a command may be so long."""
    many = [f"/missing/{number:0>99}" for number in range(1500)]
    monkeypatch.setattr(sys, "path", [*sys.path, *many])
    async with running_store() as client:
        await client.put("a", torch.arange(MB))
        assert (await client.explain(MB))[0]["chosen"] == "shm"


async def test_names_in_any_script_where_the_locale_has_only_ascii(monkeypatch: pytest.MonkeyPatch):
    """The name of the store could not be an argument of a command."""
    for name, setting in (("LC_ALL", "C"), ("PYTHONCOERCECLOCALE", "0"), ("PYTHONUTF8", "0")):
        monkeypatch.setenv(name, setting)
    out = await run_script(
        fresh=True,
        body="""
    assert (sys.flags.utf8_mode, sys.getfilesystemencoding()) == (0, "ascii")
    name = "\\N{LATIN SMALL LETTER E WITH ACUTE}\\N{FOX FACE}"
    client = await ts.initialize(store_name=name, capacity=8 << 20, prefault=0)
    await ts.put(name, {name: name}, store_name=name)
    other = await ts.connect(client.address, store_name="other")
    assert (await other.status()).store_name == name
    assert await other.get(name) == {name: name}
    try:
        await ts.get(name + "?", store_name=name)
    except ts.KeyNotFoundError as error:
        assert name in error.message
    await ts.shutdown(name)
    print("done")
""",
    )
    assert out.split() == ["done"]


async def test_a_directory_whose_name_is_no_text_is_named(monkeypatch: pytest.MonkeyPatch):
    """It would be a part of addresses. A name in UTF-8 is none where the locale has only ASCII."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = os.fsdecode(os.fsencode(short) + b"/\xff")
        os.mkdir(folder)
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        with pytest.raises(ts.ConfigurationError, match="it is no text") as raised:
            await ts.initialize(store_name="nameless", capacity=MB, prefault=0)
        assert ascii(folder)[1:-1] in raised.value.message
        assert os.listdir(f"{folder}/torchstore") == []


async def test_what_a_site_prints_is_not_the_word_of_the_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """Every Python of that site prints it first."""
    (tmp_path / "sitecustomize.py").write_text("print('Welcome!')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    async with running_store() as client:
        await client.put("a", 1)
        assert await client.get("a") == 1


async def test_an_executable_that_is_no_python_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.executable", "/bin/true")
    with pytest.raises(ts.StoreClosedError, match=r"run by sys\.executable, /bin/true"):
        await ts.initialize(store_name="embedded", capacity=MB)


async def test_one_openmp_thread_does_not_matter(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = await run_script(
        fresh=True,
        body=ROUND_TRIP
        + """
    import os, threading
    copying = [t for t in threading.enumerate() if t.name.startswith("torchstore-copy")]
    print(torch.get_num_threads(), len(copying) == min(len(os.sched_getaffinity(0)), 8))
""",
    )
    assert out.split() == ["1", "True"]


@pytest.mark.parametrize("start", ["spawn", "fork"])
async def test_children_find_the_store_through_the_environment(start: str):
    async with running_store() as client:
        value = torch.arange(MB)
        await ts.put("a", value)
        with Child(children.add_one, start=start) as child:
            assert await child.said(180) == client.address
        assert torch.equal(await ts.get("b"), value + 1)


async def test_the_server_ends_with_an_owner_that_forgets_it():
    out = await run_script(
        fresh=True,
        body="""
        await ts.initialize(capacity=8 << 20, prefault=0)
        await ts.put("a", torch.ones(1 << 20))
        held = await ts.get("a")
        print((await ts.status()).controller_pid, await ts.address())
        """,
    )
    pid, address = out.split()
    assert not is_running(int(pid))
    assert not directory_of(address).exists()
