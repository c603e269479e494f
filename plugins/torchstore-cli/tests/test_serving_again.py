"""``torchstore serve``: a server that is killed comes back, and clients go on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.object_storage.object_store import BUCKET, object_store
from tests.support import until

import torchstore_core as ts

SCRIPT = str(Path(sys.executable).with_name("torchstore"))
QUIET = {**os.environ, "TORCHSTORE_LOG_LEVEL": "ERROR"}


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """The command, and its ready line."""
    command = [SCRIPT, "serve", "--json", "--capacity", "64MiB", "--prefault", "0"]
    process = subprocess.Popen([*command, *arguments], env=QUIET, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def directory() -> Iterator[Path]:
    """For sockets, which have short paths: not in ``tmp_path``. It does not exist yet."""
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as folder:
        yield Path(folder) / "sockets"


async def test_clients_go_on_when_the_server_is_killed(tmp_path: Path, directory: Path) -> None:
    """Also what is on disk is there again; and the user's directory stays in the end."""
    directory.mkdir(mode=0o700)
    (directory / "other").write_text("not the store's")
    with serving("--directory", str(directory), "--spill", str(tmp_path / "disk")) as (
        process,
        ready,
    ):
        assert ready["address"] == f"unix:{directory}/control.sock"
        assert parent_of(ready["pid"]) == process.pid
        client = await ts.connect(ready["address"], timeout=60)
        values = [torch.full((4 << 20,), float(at)) for at in range(6)]
        for at, value in enumerate(values):  # 96 MB
            await client.put(f"k{at}", value, when_full="spillable")
        mapped = await client.get("k5")
        pids = {ready["pid"]}
        for _ in range(2):
            pid = (await client.status()).controller_pid
            os.kill(pid, signal.SIGKILL)
            for at, value in enumerate(values):
                assert torch.equal(await client.get(f"k{at}", torch.empty(4 << 20)), value)
            assert torch.equal(mapped, values[5])
            pids.add((await client.status()).controller_pid)
        assert len(pids) == 3
        assert (await client.status()).keeper_pid == process.pid
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
        assert not any(map(is_there, pids))
        await ts.shutdown()
    assert [path.name for path in directory.iterdir()] == ["other"]


async def test_all_end_with_the_command() -> None:
    with serving() as (process, ready):
        client = await ts.connect(ready["address"], timeout=10)
        process.kill()
        await until(lambda: not is_there(ready["pid"]), 20)
        with pytest.raises(ts.StoreClosedError):
            await client.put("k", 1)
        await ts.shutdown()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("--strategy", "nonsense"), "plugin"),
        (("--spill", "/proc/nowhere"), "configuration"),
        (("--spill", "nowhere://bucket/folder"), "configuration"),
        (("--spill-capacity", "1GiB"), "configuration"),
    ],
)
def test_why_it_cannot_start(arguments: tuple[str, ...], code: str) -> None:
    done = subprocess.run(
        [SCRIPT, "serve", "--json", *arguments],
        env=QUIET,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"] == code


async def test_a_directory_to_spill_to_may_be_a_url(tmp_path: Path, directory: Path) -> None:
    """As for ``initialize``; it was taken for a path below the working directory."""
    place = tmp_path / "disk"
    with serving("--directory", str(directory), "--spill", place.as_uri()) as (_, ready):
        client = await ts.connect(ready["address"], timeout=60)
        assert (await client.status()).spill.directory == str(place)
        await ts.shutdown()


@pytest.mark.thorough
async def test_object_storage_is_empty_when_the_command_has_ended(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its URL, which may have a password, is in a variable."""
    with object_store() as objects:
        monkeypatch.setitem(QUIET, "TORCHSTORE_SPILL_URL", f"s3://{BUCKET}/spilled")
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            monkeypatch.setitem(QUIET, name, os.environ[name])
        arguments = ("--capacity", "8MiB", "--when-full", "spillable")
        with serving("--directory", str(directory), *arguments) as (process, ready):
            client = await ts.connect(ready["address"], timeout=60)
            for at in range(6):
                await client.put(f"k{at}", torch.full((2 << 20,), at, dtype=torch.uint8))
            assert (await client.get("k0"))[-1] == 0
            assert objects.listed()
            process.terminate()
            assert await asyncio.to_thread(process.wait, 30) == 0
            await ts.shutdown()
        assert not objects.listed()


@pytest.mark.parametrize("option", ["--timeout", "--wait"])
def test_nan_is_no_number_of_seconds(option: str) -> None:
    command = [SCRIPT, "drain", "any", option, "nan"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "'nan' is not a number of seconds" in done.stderr


@pytest.mark.soak
async def test_a_server_that_dies_again_and_again_is_given_up(directory: Path) -> None:
    with serving("--directory", str(directory)) as (process, _):
        while process.poll() is None:
            for pid in _children(process.pid):
                with contextlib.suppress(ProcessLookupError):  # it ends while this looks
                    os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.005)
        assert process.returncode == 1
        assert process.stdout is not None
        assert "given up" in json.loads(process.stdout.read())["message"]
    assert not directory.exists()


def _children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except (FileNotFoundError, ProcessLookupError):
        return []
