"""The commands of ``torchstore``, on stores of other processes: in this process where that makes
no difference, else as the installed script.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tests.support import running_store, until
from tests.unit.plugins.test_plugins import (
    OBSERVERS,
    RUNTIME,
    RUNTIMES,
    STRATEGIES,
    TRANSPORT,
    TRANSPORTS,
    Site,
)

import torchstore_core as ts
from torchstore_cli import main
from torchstore_cli.doctor import plugin_check
from torchstore_core.errors import StoreClosedError
from torchstore_core.wire import messages as m

from .terminals import on_a_terminal

SCRIPT = Path(sys.executable).parent / "torchstore"
MB = 1 << 20


class Result(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def lines(self) -> list[str]:
        return self.out.splitlines()


@pytest.fixture(autouse=True)
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Servers of this test meet no others. (A socket's path is short: not ``tmp_path``.)"""
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory) / "torchstore"


# What is loaded for seconds is blocked here as in all tests (see the root's conftest.py), unless a
# test is about all that is installed: it gives this environment.
EVERYTHING = {"TORCHSTORE_BLOCK": ""}


def _is_ours(name: str) -> bool:
    """Whether a variable of this process is about stores, and not which transports tests see."""
    return name.startswith("TORCHSTORE_") and name != "TORCHSTORE_BLOCK"


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if not _is_ours(k)}
    return {**inherited, **changes}


def _also_blocked(*names: str) -> str:
    return ",".join(filter(None, [*names, os.environ.get("TORCHSTORE_BLOCK", "")]))


async def torchstore(*arguments: str, **environment: str) -> Result:
    """Run a command in this process; what this process has in TORCHSTORE_… it does not see."""
    return await asyncio.to_thread(_call, arguments, environment)


def _call(arguments: Sequence[str], environment: Mapping[str, str]) -> Result:
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for name in filter(_is_ours, [*os.environ]):
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        status = main(arguments)
    return Result(status, *(_written(stream) for stream in (out, err)))


def _written(stream: io.TextIOWrapper) -> str:
    stream.flush()
    stream.seek(0)
    return stream.read()


async def installed(*arguments: str, **environment: str) -> Result:
    """Run the installed script, where it matters that it is a process of its own."""
    done = await asyncio.to_thread(
        subprocess.run,
        [SCRIPT, *arguments],
        env=_environment(environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    return Result(done.returncode, done.stdout, done.stderr)


async def fails(code: str, *arguments: str, status: int = 1, **environment: str) -> Any:
    """The command must fail with ``code``, in one line and in JSON; the JSON."""
    run = installed if arguments[0] == "serve" else torchstore  # which sets up logging
    result = await run(*arguments, "--json", **environment)
    assert result.status == status
    assert result.json["error"] == code
    assert result.err.splitlines()[0] == f"torchstore: {code}: {result.json['message']}"
    assert len(result.err.splitlines()) == 1 + len(result.json.get("details", {}).get("stores", ()))
    return result.json


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """``torchstore serve --json``, and its ready line."""
    process = subprocess.Popen(
        [SCRIPT, "serve", "--json", "--prefault", "0", *arguments],
        env=_environment(environment),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


async def _listed() -> list[str]:
    return [e["key"] for e in (await torchstore("ls", "--json")).json["entries"]]


# ---- status, ls, stat, rm -----------------------------------------------------------------


async def test_status_in_json(store: ts.Client):
    await store.put("large", torch.zeros(2 * MB, dtype=torch.uint8))
    await store.put("small", torch.zeros(3))
    held = await store.get("large")
    result = await installed("status", "--json")
    assert (result.status, result.err) == (0, "")
    status = result.json
    truth = await store.status()
    assert status["address"] == store.address
    assert status["store_name"] == "torchstore"
    assert status["controller_pid"] == truth.controller_pid
    assert status["strategy"] == "singleton"
    assert status["keys"] == 2
    assert status["uptime_s"] > 0
    assert status["incarnation"] == truth.incarnation
    assert 0 < truth.incarnation < 1 << 53
    assert status["operations"]["Put"] == 2
    assert status["operations_per_s"] >= 0
    (volume,) = status["volumes"]
    assert volume["id"] == truth.volumes[0].id
    assert volume["pid"] == truth.controller_pid
    assert volume["capacity_bytes"] == 256 * MB
    assert volume["used_bytes"] == 2 * MB + 12
    assert volume["leased_bytes"] == 2 * MB
    assert volume["free_bytes"] == 254 * MB - 12
    assert volume["unfinished_bytes"] == 0
    (session,) = status["sessions"]  # ours, and not that of the tool
    assert session["pid"] == os.getpid()
    assert (session["leases"], session["leased_bytes"]) == (1, held.nbytes)
    assert (session["unfinished_puts"], session["unfinished_bytes"]) == (0, 0)


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.soak)])
async def test_status_for_people(width: int, store: ts.Client):
    await store.put("large", torch.zeros(2 * MB, dtype=torch.uint8))
    held = await store.get("large")
    result = await installed("status", COLUMNS=str(width))
    assert result.status == 0
    assert result.lines[0].startswith("torchstore  up ")
    assert result.lines[1] == store.address
    assert "2.0 MiB of 256 MiB (1%)" in result.out
    assert all(len(line) <= width and line == line.rstrip() for line in result.lines)
    head = next(line for line in result.lines if line.startswith("VOLUME"))
    row = next(line for line in result.lines if line.startswith("torchstore-0"))
    for title, cell in {"CAPACITY": "256 MiB", "LEASED": "2.0 MiB", "FREE": "254 MiB"}.items():
        end = head.index(title) + len(title)
        assert row[:end].endswith(f"  {cell}")
    assert any(line.split()[0] == str(os.getpid()) for line in result.lines if line.strip())
    assert "\x1b" not in result.out  # it is no terminal
    del held


async def test_ls(store: ts.Client):
    await store.put("model/w", torch.zeros(4, 5, dtype=torch.bfloat16))
    await store.put("model/w", torch.zeros(256, 512, dtype=torch.bfloat16))
    await store.put("model/step", torch.tensor(7))
    await store.put("config", {"lr": 0.1})
    result = await torchstore("ls", "--json")
    assert result.status == 0
    entries = {e["key"]: e for e in result.json["entries"]}
    assert [*entries] == ["config", "model/step", "model/w"]
    w = entries["model/w"]
    assert (w["version"], w["kind"], w["dtype"], w["codec"]) == (2, "tensor", "bfloat16", None)
    assert (w["shape"], w["nbytes"], w["inline"]) == ([256, 512], 256 * 1024, False)
    assert (w["volume"], w["leases"], w["creator_pid"]) == ("torchstore-0", 0, os.getpid())
    assert abs(w["created"] - time.time()) < 60
    assert (entries["model/step"]["shape"], entries["model/step"]["inline"]) == ([], True)
    config = entries["config"]
    assert (config["kind"], config["codec"], config["dtype"]) == ("object", "msgpack", None)

    table = await torchstore("ls", "model/")
    assert table.lines[0].split() == ["SIZE", "TYPE", "SHAPE", "VERSION", "KEY"]
    assert table.lines[1].split() == ["8", "B", "int64", "scalar", "1", "model/step"]
    assert table.lines[2].split() == ["256", "KiB", "bfloat16", "256×512", "2", "model/w"]
    assert table.lines[1].index("model/") == table.lines[2].index("model/")
    assert table.lines[-1] == "2 keys, 256 KiB"
    long = await torchstore("ls", "model/w", "--long")
    titles = "SIZE TYPE SHAPE VERSION AGE LEASES PID VOLUME KEY"
    assert long.lines[0].split() == titles.split()
    assert long.lines[1].split()[-3:] == [str(os.getpid()), "torchstore-0", "model/w"]
    nothing = await torchstore("ls", "none of it")
    assert (nothing.status, nothing.out) == (0, "no key starts with 'none of it'\n")


async def test_ls_shows_any_key_on_one_line(store: ts.Client):
    odd = "evil\x1b[31m [bold]x[/bold]\n\r:smile: ü"
    long = "x" * 300
    await store.put_batch({odd: 1, long: 2})
    table = await torchstore("ls", COLUMNS="80")
    assert table.lines[1].endswith(r"  evil\x1b[31m [bold]x[/bold]\n\r:smile: ü")
    assert table.lines[2].endswith(f"  {long}")
    assert await _listed() == [odd, long]


@pytest.mark.thorough
async def test_ls_long_fits_the_terminal(store: ts.Client):
    key = "policy/model.layers.17.self_attn.q_proj.weight"
    odd = "x\n" * 40  # wider than the terminal, and shown with escapes
    values = {key: torch.zeros(256, 512, dtype=torch.bfloat16), odd: 1, "s": "ü"}
    await store.put_batch(values)
    await store.put_state_dict({"w": torch.zeros(3)}, "half", participants=2, participant=1)
    environment = _environment({})

    async def wrote(width: int, **changes: str) -> list[str]:
        written = await asyncio.to_thread(
            on_a_terminal, width, "ls", "-l", environment={**environment, **changes}
        )
        return written.splitlines()

    piped = await torchstore("ls", "-l")
    titles = ["SIZE", "TYPE", "SHAPE", "VERSION", "AGE", "LEASES", "PID", "VOLUME"]
    assert piped.lines[0].split() == [*titles, "KEY"]
    assert all(name in piped.out for name in (key, "half (1 of 2 done)", "object (msgpack)"))
    wide = await wrote(300, NO_COLOR="1")
    assert [line.split()[-1] for line in wide if line] == [
        line.split()[-1] for line in piped.lines if line
    ]
    for width in (100, 90, 60):
        await store.delete_batch([*values])
        await store.put_batch(values)  # an age of minutes takes space from what else is shown
        lines = await wrote(width, NO_COLOR="1")
        assert lines[0] == "KEY"
        assert lines[1].split() == titles
        at = lines.index(key)  # whole, on a line of its own, and all else of it below
        assert lines[at + 1].split()[:2] == ["256", "KiB"]
        assert ("bfloat16" in lines[at + 1]) is (width > 60)
        assert lines[at + 1].split()[-2] == str(os.getpid())
        assert "half (1 of 2 done)" in lines
        shown = r"x\n" * 40
        assert shown in lines
        assert all(len(line) <= width or line == shown for line in lines)
        assert any("…" in line for line in lines) is (width == 60)


@pytest.mark.thorough
async def test_colour(store: ts.Client):
    await store.put("k", 1)
    environment = _environment({})
    environment.pop("NO_COLOR", None)
    environment.pop("FORCE_COLOR", None)

    def terminal(**changes: str) -> str:
        return on_a_terminal(120, "ls", "-l", environment={**environment, **changes})

    coloured, plain, empty = await asyncio.gather(
        asyncio.to_thread(terminal),
        asyncio.to_thread(terminal, NO_COLOR="1"),
        asyncio.to_thread(terminal, NO_COLOR=""),
    )
    assert "\x1b[1mk\x1b[0m" in coloured
    assert "\x1b" in empty  # set, but to nothing: it does not count
    assert "\x1b" not in plain
    assert plain.splitlines()[1].split()[-1] == "k"
    long = "x" * 300
    await store.put(long, 1)
    forced = await torchstore("ls", "-l", FORCE_COLOR="1", TERM="xterm")
    assert f"\x1b[1m{long}\x1b[0m" in forced.out  # and nothing is folded: it is a pipe
    assert "KEY" in forced.lines[0]
    both = await torchstore("ls", FORCE_COLOR="1", NO_COLOR="1")
    assert "\x1b" not in both.out + both.err
    assert "\x1b" not in (await torchstore("doctor")).out


async def test_unfinished_versions_are_shown(store: ts.Client):
    part = {"w": torch.zeros(500), "b": torch.zeros(24, dtype=torch.uint8)}
    await store.put_state_dict(part, "policy", participants=3, participant=1)
    await store.put("t", 1)
    shard = ts.TensorShard(torch.zeros(2, 2), ts.TensorSlice((0, 0), (2, 2), (2, 4)))
    await store.put("t", shard)
    listed = (await torchstore("ls", "--json")).json
    assert [e["key"] for e in listed["entries"]] == ["t"]
    shown = {p["key"]: p for p in listed["pending"]}
    policy = shown["policy"]
    assert (policy["version"], policy["participants"], policy["nbytes"]) == (1, 3, 2024)
    assert (policy["committed"], policy["missing_participants"]) == (["1"], ["0", "2"])
    assert (shown["t"]["version"], shown["t"]["missing"]) == (2, [["t", [0, 2], [2, 2]]])
    assert (await torchstore("ls", "pol", "--json")).json["pending"] == [policy]
    status = (await torchstore("status", "--json")).json
    assert (status["pending_versions"], status["pending_bytes"]) == (2, 2040)
    assert {p["key"]: p for p in status["pending"]} == shown

    table = (await torchstore("ls")).lines
    assert table[1].split() == [
        "2.0",
        "KiB",
        "unfinished",
        "–",
        "1",
        "policy",
        "(1",
        "of",
        "3",
        "done)",
    ]
    assert table[2].split()[-2:] == ["1", "t"]
    assert table[3].split()[-5:] == ["t", "(1", "of", "?", "done)"]
    assert table[-1] == "1 key, 1 B; 2 unfinished versions, 2.0 KiB"
    page = (await torchstore("status")).out
    assert "1; 2 unfinished versions, 2.0 KiB" in page
    (line,) = [line for line in page.splitlines() if line.startswith("policy ")]
    assert line.endswith("not whole yet: 1 of 3 done, 0 writing, nothing from participants 0, 2")
    await store.put_state_dict(part, "policy", participants=3, participant=0)
    await store.put_state_dict(part, "policy", participants=3, participant=2)
    await store.delete("t")
    assert "unfinished" not in (await torchstore("ls")).out.lower()


async def test_ls_asks_a_page_at_a_time(store: ts.Client):
    many = {f"many/{i:05}": i for i in range(m.MAX_LISTED + 1)}
    long = {f"long/{i:03}".ljust(m.MAX_KEY, "-"): i for i in range(300)}
    assert len(long) * m.MAX_KEY > m.MAX_LISTED_CHARS
    await store.put_batch({**many, **long, "other": 0})

    async def asked() -> int:
        return (await store.status()).operations.get("List", 0)

    assert await _listed() == [*sorted(long), *many, "other"]
    assert 2 <= await asked() <= 4
    before = await asked()
    result = await torchstore("ls", "many/", "--json")
    assert [e["key"] for e in result.json["entries"]] == [*many]
    assert await asked() == before + 2
    result = await torchstore("ls", "long/", "--json")
    assert [e["key"] for e in result.json["entries"]] == sorted(long)
    assert await asked() == before + 4


@pytest.mark.thorough
@pytest.mark.parametrize("options", [(), ("--json",)])
async def test_ls_into_a_pipe_that_closes(options: tuple[str, ...], store: ts.Client):
    await store.put_batch({f"key/{i:05}": i for i in range(5000)})
    with subprocess.Popen(
        [SCRIPT, "ls", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert await asyncio.to_thread(process.stderr.read) == ""
        assert await asyncio.to_thread(process.wait, 60) == 128 + signal.SIGPIPE


@pytest.mark.thorough
@pytest.mark.parametrize(
    "command",
    [["ls"], ["stat", "k"], ["status", "--json"], ["doctor"], ["--help"], ["ls", "-h"]],
    ids=" ".join,
)
async def test_what_nobody_reads_ends_a_command_as_the_signal_would(
    command: list[str], store: ts.Client
):
    await store.put("k", 1)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        ended = await asyncio.to_thread(
            subprocess.run, [SCRIPT, *command], stdout=closed, stderr=subprocess.PIPE, timeout=300
        )
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, b"")


def test_a_server_stays_although_nobody_reads_where_it_is(tmp_path: Path):
    reader, writer = os.pipe()
    os.close(reader)
    where = f"unix:{tmp_path}/control.sock"
    command = [SCRIPT, "serve", "--capacity", "64MiB", "--prefault", "0", "--directory", tmp_path]
    with subprocess.Popen(command, stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        try:
            assert process.stderr is not None
            assert b"torchstore" in process.stderr.readline()  # it says that it has started
            with ts.blocking.connect(where, store_name="unread") as client:
                client.put("k", 1)
        finally:
            process.terminate()
        assert process.wait(60) == 0


@pytest.mark.thorough
async def test_an_error_that_cannot_be_printed_as_json_is_still_a_line(store: ts.Client):
    """Where nobody reads standard output any more, and where the disk is full."""
    command = [SCRIPT, "stat", "missing", "--json"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed, open("/dev/full", "wb") as full:
        for out in (closed, full):
            ended = await asyncio.to_thread(
                subprocess.run, command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=300
            )
            assert ended.stderr == "torchstore: key-not-found: no such key: 'missing'\n"
            assert ended.returncode == 1


async def test_stat(store: ts.Client):
    await store.put("w", torch.zeros(256, 512, dtype=torch.bfloat16))
    held = await store.get("w")
    found = (await torchstore("stat", "w", "--json")).json
    assert (found["key"], found["version"], found["kind"]) == ("w", 1, "tensor")
    assert (found["dtype"], found["shape"], found["nbytes"]) == ("bfloat16", [256, 512], 262144)
    assert (found["volume"], found["inline"], found["segment"]) == ("torchstore-0", False, 0)
    assert (found["offset"] % 64, found["leases"]) == (0, 1)
    assert found["creator"]["pid"] == os.getpid()
    human = await torchstore("stat", "w")
    assert human.lines[0] == "w"
    assert "bfloat16 tensor" in human.out
    assert "256×512" in human.out
    assert "256 KiB (262,144 bytes)" in human.out
    assert f"pid {os.getpid()}" in human.out
    del held
    await store.put("w", {"a": 1})
    found = (await torchstore("stat", "w", "--json")).json
    assert (found["version"], found["kind"], found["codec"]) == (2, "object", "msgpack")
    assert (found["inline"], found["segment"], found["offset"]) == (True, None, None)


async def test_a_key_that_does_not_exist(store: ts.Client):
    await store.put("a", 1)
    error = await fails("key-not-found", "stat", "nothing")
    assert error["key"] == "nothing"
    error = await fails("key-not-found", "rm", "a", "nothing", "nor this")
    assert error["details"]["missing"] == ["nothing", "nor this"]
    assert await store.keys() == ["a"]


async def test_rm(store: ts.Client):
    await store.put_batch({"a": 1, "b": 2, "ab/1": 3, "ab/2": 4, "c/1": 5, "d": 6})
    result = await torchstore("rm", "a", "b", "--json")
    assert result.status == 0
    assert (result.json["deleted"], result.json["keys"]) == (2, ["a", "b"])
    assert await store.keys() == ["ab/1", "ab/2", "c/1", "d"]
    result = await torchstore("rm", "--prefix", "ab/", "c")
    assert (result.status, result.out) == (0, "deleted 3 keys: ab/1, ab/2, c/1\n")
    assert await store.keys() == ["d"]
    result = await torchstore("rm", "--prefix", "ab/", "--json")
    assert (result.status, result.json["deleted"], result.json["keys"]) == (0, 0, [])
    assert await store.keys() == ["d"]


async def test_rm_of_everything_needs_all(store: ts.Client):
    await store.put_batch({"a": 1, "b": 2})
    for arguments in (["--prefix", ""], ["--prefix", "a", ""], ["a", "", "--prefix"]):
        error = await fails("usage", "rm", *arguments, status=2)
        assert "--all" in error["message"]
    await fails("usage", "rm", "a", "--all", status=2)
    assert await store.keys() == ["a", "b"]
    result = await torchstore("rm", "--prefix", "", "--all", "--json")
    assert (result.status, result.json["keys"]) == (0, ["a", "b"])
    await store.put("c", 3)
    assert (await torchstore("rm", "--all")).out == "deleted 1 key: c\n"
    assert await store.keys() == []


# ---- which store --------------------------------------------------------------------------


async def test_no_store(runtime_directory: Path):
    error = await fails("store-closed", "status")
    assert str(runtime_directory) in error["message"]
    assert "torchstore serve" in error["message"]


async def test_several_stores(runtime_directory: Path):
    odd, shown = "two\x1b[31m\n", r"two\x1b[31m\n"
    async with running_store(store_name="one") as one, running_store(store_name=odd) as two:
        await one.put("of one", 1)
        await two.put("of two", 2)
        error = await fails("configuration", "ls")
        assert {(s["store_name"], s["address"]) for s in error["details"]["stores"]} == {
            ("one", one.address),
            (odd, two.address),
        }
        human = await torchstore("ls")
        assert (human.status, human.out) == (1, "")
        for client, name in ((one, "one"), (two, shown)):
            pid = (await client.status()).controller_pid
            assert f"  {client.address}  {name} (pid {pid})" in human.err.splitlines()
        status = await torchstore("status", "--address", two.address)
        assert status.lines[0].startswith(f"{shown}  up ")
        for before, after in ((("--address", two.address), ()), ((), ("--address", two.address))):
            result = await torchstore(*before, "ls", "--json", *after)
            assert [e["key"] for e in result.json["entries"]] == ["of two"]
        path = one.address.removeprefix("unix:")
        result = await torchstore("--json", "ls", "--address", path)
        assert [e["key"] for e in result.json["entries"]] == ["of one"]
        result = await torchstore("ls", "--json", TORCHSTORE_ADDRESS=two.address)
        assert [e["key"] for e in result.json["entries"]] == ["of two"]
        result = await torchstore(
            "ls", "--json", "--address", one.address, TORCHSTORE_ADDRESS=two.address
        )
        assert [e["key"] for e in result.json["entries"]] == ["of one"]
    assert [*runtime_directory.iterdir()] == []


@pytest.mark.thorough
async def test_an_address_of_a_job(store: ts.Client):
    for address in ("monarch:policy", "any:thing", "nonsense"):
        error = await fails("configuration", "status", "--address", address)
        assert repr(address) in error["message"]
        assert "leave the address out" in error["message"]
    error = await fails("configuration", "ls", TORCHSTORE_ADDRESS="monarch:policy")
    assert "unset TORCHSTORE_ADDRESS" in error["message"]
    doctor = await torchstore("doctor", "--address", "monarch:policy")
    assert doctor.status == 1
    assert "only processes of that job" in " ".join(doctor.out.split())
    bench = await fails("configuration", "bench", "--address", "monarch:policy")
    assert "only processes of that job" in bench["message"]


async def test_a_dead_and_a_silent_server():
    with serving("--name", "dead") as (dead, ready):
        dead.kill()
        dead.wait()
        error = await fails("store-closed", "ls", "--address", ready["address"])
        assert ready["address"] in error["message"]
        error = await fails("store-closed", "ls", TORCHSTORE_ADDRESS=ready["address"])
        assert "TORCHSTORE_ADDRESS" in error["message"]
        # Its socket is still there, but it is not one of the stores that run.
        assert "no store of yours" in (await fails("store-closed", "status"))["message"]
    with serving("--name", "silent") as (_, ready):
        os.kill(ready["pid"], signal.SIGSTOP)
        where = ("--address", ready["address"], "--timeout", "0.3")
        assert "0.3 s" in (await fails("timeout", "status", *where))["message"]
        os.kill(ready["pid"], signal.SIGCONT)
        assert (await torchstore("status", *where[:2])).status == 0


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_closed_standard_streams_do_not_matter(monkeypatch, closed):
    """Python has None for them: the command ended with an AttributeError."""
    monkeypatch.setattr(sys, closed, None)
    assert main(["--version"]) == 0
    assert main(["no such command"]) == 2


async def test_wrong_usage():
    for arguments in (["nonsense"], ["rm"], ["ls", "--no-such-option"]):
        error = await fails("usage", *arguments, status=2)
        assert "--help" in error["message"]
    for option, value in {"--capacity": "much", "--volumes": "0", "--prefault": "MiB"}.items():
        error = await fails("usage", "serve", option, value, status=2)
        assert option in error["message"]
    alone = await torchstore()
    assert alone.status == 2
    for name in ("doctor", "status", "ls", "stat", "rm", "bench", "serve"):
        assert f"\n  {name} " in alone.out
    helped = await torchstore("rm", "--help")
    assert (helped.status, helped.err) == (0, "")
    assert "KEY..." in helped.out
    version = await torchstore("--version")
    assert version.out == f"torchstore {importlib.metadata.version('torchstore-core')}\n"


# ---- serve --------------------------------------------------------------------------------


async def test_serve(runtime_directory: Path):
    options = ("--capacity", "64MiB", "--volumes", "2", "--strategy", "host", "--name", "mine")
    with serving(*options) as (process, ready):
        assert (ready["store_name"], ready["num_storage_volumes"]) == ("mine", 2)
        assert (ready["capacity_bytes"], ready["strategy"]) == (64 * MB, "host")
        client = await ts.connect(ready["address"])
        value = torch.arange(MB)
        await client.put("w", value)
        assert torch.equal(await client.get("w"), value)
        status = (await torchstore("status", "--json")).json
        assert (status["store_name"], status["controller_pid"]) == ("mine", ready["pid"])
        assert status["keeper_pid"] == process.pid
        assert [v["capacity_bytes"] for v in status["volumes"]] == [32 * MB, 32 * MB]
        assert await _listed() == ["w"]
        for pid in (process.pid, ready["pid"]):
            assert not any("libtorch" in path for path in _mapped(pid))
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
        with pytest.raises(StoreClosedError):
            await client.put("w", value)
        await ts.shutdown()
    assert [*runtime_directory.iterdir()] == []


async def test_serve_with_fields_of_a_strategy(runtime_directory: Path):
    strategy = '{"type": "replicated", "base": {"type": "hash"}, "copies": 3}'
    options = ("--capacity", "64MiB", "--volumes", "4", "--strategy", strategy)
    with serving(*options) as (process, ready):
        assert ready["strategy"] == "replicated"
        client = await ts.connect(ready["address"])
        await client.put("w", torch.arange(MB))
        assert (await client.stat("w")).copies == 3
        await ts.shutdown()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0


def _mapped(pid: int) -> list[str]:
    return [line.split()[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]


async def test_serve_for_people():
    process = subprocess.Popen(
        [SCRIPT, "serve", "--capacity", "64MB", "--prefault", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = await asyncio.to_thread(process.stdout.readline)
        assert first.startswith("torchstore is up: 61.0 MiB in 1 volume, strategy singleton, pid ")
        address = (await asyncio.to_thread(process.stdout.readline)).split()[1]
        shell = await asyncio.to_thread(process.stdout.readline)
        assert f"export TORCHSTORE_ADDRESS={address}" in shell
        assert (await torchstore("status", "--address", address)).status == 0
        process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.thorough
async def test_serve_in_a_directory(runtime_directory: Path):
    new = runtime_directory.parent / "new"
    with serving("--directory", os.path.relpath(new)) as (process, ready):
        assert ready["address"] == f"unix:{new}/control.sock"
        assert new.stat().st_mode & 0o777 == 0o700
        error = await fails("configuration", "serve", "--directory", str(new))
        assert "running in" in error["message"]
        assert (await torchstore("status", "--address", ready["address"])).status == 0
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    assert not new.exists()
    new.mkdir()
    new.chmod(0o777)
    error = await fails("configuration", "serve", "--directory", str(new))
    assert "nobody else may write" in error["message"]
    new.chmod(0o755)
    with serving("--directory", str(new)) as (process, _):
        process.kill()
        process.wait()
    assert (new / "control.sock").exists()
    with serving("--directory", str(new)) as (process, ready):  # over what the killed one left
        assert (await torchstore("status", "--address", ready["address"])).status == 0
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0
    assert not (new / "control.sock").exists()
    assert new.exists()  # it was there before


@pytest.mark.thorough
async def test_serve_that_cannot_start(runtime_directory: Path):
    error = await fails("plugin", "serve", "--strategy", "nonsense")
    assert "'nonsense'" in error["message"]
    error = await fails("plugin", "serve", "--strategy", '{"type": "hash", "nonsense": 1}')
    assert "it has no 'nonsense'" in error["message"]
    for wrong, says in (('{"type": "hash"', "is not JSON"), ("{}", 'as "type"')):
        error = await fails("usage", "serve", "--strategy", wrong, status=2)
        assert says in error["message"]
    error = await fails("configuration", "serve", TORCHSTORE_LOG_LEVEL="loud")
    assert "TORCHSTORE_LOG_LEVEL" in error["message"]
    error = await fails("configuration", "serve", TORCHSTORE_BLOCK="shn")
    assert "did you mean 'shm'" in error["message"]
    for nowhere in ("/proc", "/proc/new", "/nowhere/new"):  # no sockets, no files, no parent
        error = await fails("configuration", "serve", "--directory", nowhere)
        assert error["message"].startswith(f"cannot make sockets in {nowhere}: ")
        assert "/tmp, or leave it out" in error["message"]
    assert not runtime_directory.exists() or [*runtime_directory.iterdir()] == []


# ---- doctor -------------------------------------------------------------------------------


@pytest.mark.thorough
async def test_doctor_without_a_store(runtime_directory: Path):
    result = await asyncio.to_thread(_torch_free, TORCH_FREE, "doctor --json", **EVERYTHING)
    assert (result.status, result.err) == (0, "")
    report = result.json
    assert (report["ok"], report["problems"], report["stores"]) == (True, [], [])
    assert report["runtime_directory"] == str(runtime_directory)
    assert report["host"]["cpus"] == len(os.sched_getaffinity(0))
    assert report["copy"]["threads"] >= 1
    # That of the distribution: builds for CUDA append theirs to what the module says.
    assert report["versions"]["torch"] == importlib.metadata.version("torch")
    link = report["link"]
    assert (link["chosen"], link["same_host"]) == ("shm", True)
    assert 1024 < link["inline_up_to"] < MB
    bids = {bid["transport"]: bid for bid in link["bids"]}
    assert {"shm", "inline"} <= set(bids)
    assert bids["inline"]["max_bytes"] == m.MAX_INLINE
    assert bids["shm"]["bytes_per_s"] > bids["inline"]["bytes_per_s"]
    assert set(bids) & {"monarch-rpc", "monarch-rdma"} == set()
    for name in ("monarch-rpc", "monarch-rdma"):
        assert link["refusals"][name].startswith("only in a Monarch job")
    plugins = {(p["group"], p["name"]): p for p in report["plugins"]}
    shm = plugins["torchstore.transports", "shm"]
    assert (shm["distribution"], shm["state"], shm["error"]) == (
        "torchstore-transports",
        "ok",
        None,
    )
    assert plugins["torchstore.strategies", "singleton"]["state"] == "ok"
    assert plugins["torchstore.runtimes", "local"]["state"] == "ok"


async def test_doctor_where_temporary_files_have_long_paths(tmp_path: Path):
    """No socket can have such a path: shm was said not to start."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    report = (await installed("doctor", "--json", TMPDIR=str(deep))).json
    assert (report["problems"], report["link"]["chosen"]) == ([], "shm")
    assert not [note for note in report["notes"] if "'shm'" in note]


@pytest.mark.thorough
@pytest.mark.parametrize(("width", "loaded"), [(80, EVERYTHING), (120, {})], ids=["80", "120"])
async def test_doctor_for_people(width: int, loaded: dict[str, str], store: ts.Client):
    result = await torchstore("doctor", COLUMNS=str(width), **loaded)
    assert result.status == 0
    assert result.lines[-1] == "✓ a store works here"
    assert all(len(line) <= width or store.address in line for line in result.lines)
    assert all(line == line.rstrip() for line in result.lines)
    assert "values ride in the message; larger ones take shm" in result.out
    assert store.address in result.out
    assert "volume torchstore-0" in result.out
    assert "torchstore-transports" in result.out


async def test_doctor_with_a_store(store: ts.Client):
    explained = await store.explain()
    doctor = await torchstore("doctor", "--json")
    (report,) = doctor.json["stores"]
    assert (report["address"], report["error"]) == (store.address, None)
    assert report["pid"] == (await store.status()).controller_pid
    (link,) = report["links"]
    assert link["volume"] == explained[0]["volume"]
    assert link["chosen"] == explained[0]["chosen"] == "shm"
    assert link["inline_up_to"] == explained[0]["inline_up_to"]
    (bid,) = [b for b in link["bids"] if b["transport"] == "shm"]
    (expected,) = [b for b in explained[0]["bids"] if b["transport"] == "shm"]
    assert bid == {**{k: expected[k] for k in bid if k in expected}, "max_bytes": None}
    assert link["refusals"] == explained[0]["refusals"]


@pytest.mark.thorough
async def test_doctor_finds_what_stops_a_store(store: ts.Client):
    async def problems(*arguments: str, **environment: str) -> str:
        result = await torchstore("doctor", "--json", *arguments, **environment)
        assert result.status == 1
        assert result.json["ok"] is False
        return "\n".join(result.json["problems"])

    block = _also_blocked("shm", "tcp")
    blocked = await problems(TORCHSTORE_BLOCK=block)
    assert "no transport moves large values" in blocked
    assert "shm: blocked" in blocked
    human = await torchstore("doctor", TORCHSTORE_BLOCK=block)
    assert human.status == 1
    shown = [line for line in human.lines[:-1] if line.startswith("✗")]
    assert shown == [f"✗  {problem}" for problem in blocked.splitlines()]
    assert human.lines[-1] == "✗ 2 problems"  # a volume on this host, and that of the store
    assert "TORCHSTORE_COPY_THREADS" in await problems(TORCHSTORE_COPY_THREADS="many")
    assert "did you mean 'shm'" in await problems(TORCHSTORE_PREFER="shn")
    switches = {"TORCHSTORE_ALLOW_PICKLE": "perhaps", "TORCHSTORE_TRACE_REFS": "all"}
    said = await problems(**switches)
    assert all(name in said for name in switches)
    assert "/nowhere" in await problems("--address", "unix:/nowhere")
    assert "/nowhere" in await problems(TORCHSTORE_ADDRESS="unix:/nowhere")


async def test_doctor_and_a_runtime_directory_open_to_others(runtime_directory: Path):
    runtime_directory.mkdir()
    runtime_directory.chmod(0o777)
    result = await torchstore("doctor", "--json")
    assert result.status == 1
    assert any(str(runtime_directory) in problem for problem in result.json["problems"])


def _distribution(where: Path, name: str, entry_points: str) -> None:
    info = where / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


@pytest.mark.thorough
async def test_doctor_names_packages_of_another_release(tmp_path: Path):
    entry = "[torchstore.strategies]\nacme = no_such_module\n"
    Site(tmp_path).describe("acme-store", entry, requires="torchstore-core>=99")
    report = (await installed("doctor", "--json", PYTHONPATH=_python_path(tmp_path))).json
    says = "acme-store 1.0 requires torchstore-core >=99, and "
    assert [note for note in report["notes"] if note.startswith(says)]
    (acme,) = [p for p in report["plugins"] if p["name"] == "acme"]
    assert says in acme["error"]


@pytest.mark.thorough
async def test_doctor_names_broken_and_blocked_plugins(tmp_path: Path):
    _distribution(tmp_path, "acme-store", "[torchstore.transports]\nacme = no_such_module\n")
    result = await installed("doctor", "--json", PYTHONPATH=_python_path(tmp_path))
    assert (result.status, result.json["problems"]) == (0, [])
    (acme,) = [p for p in result.json["plugins"] if p["name"] == "acme"]
    assert (acme["group"], acme["distribution"]) == ("torchstore.transports", "acme-store")
    assert acme["state"] == "error"
    assert "no_such_module" in acme["error"]
    human = await installed("doctor", PYTHONPATH=_python_path(tmp_path))
    assert any("acme-store" in line and "no_such_module" in line for line in human.lines)
    block = _also_blocked("acme")
    blocked = await installed(
        "doctor", "--json", PYTHONPATH=_python_path(tmp_path), TORCHSTORE_BLOCK=block
    )
    (acme,) = [p for p in blocked.json["plugins"] if p["name"] == "acme"]
    assert (acme["state"], acme["error"]) == ("blocked", None)
    assert "blocked" in blocked.json["link"]["refusals"]["acme"]


HALVES = """
@hookimpl
def torchstore_transport():
    return TransportSpec(
        {name!r}, bid=lambda context: Bid(1e-6, 1e12, "it"), client=CLIENT, server=SERVER
    )

CLIENT = "torchstore_transports.shm.link:ShmLink"
SERVER = "torchstore_transports.shm.server:ShmServer"
"""
CRASHES = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
TROUBLE: dict[str, tuple[str, str, str]] = {
    # name: group, source, what is said of it ("": nothing); what is in capitals ends the process
    "a_fine": (TRANSPORTS, HALVES, ""),
    "b_no_link": (
        TRANSPORTS,
        HALVES + "CLIENT = 'site_acme_b_no_link:Link'",
        "no attribute 'Link'",
    ),
    "c_no_module": (TRANSPORTS, HALVES + "SERVER = 'surely_not_here:S'", "surely_not_here"),
    "d_no_class": (TRANSPORTS, HALVES + "SERVER = CLIENT", "is no subclass of TransportServer"),
    "e_exits": (TRANSPORTS, "raise SystemExit(3)", r"SystemExit\(3\)"),
    "f_VANISHES": (
        TRANSPORTS,
        "import os\nos._exit(0)",
        r"importing it ended the process \(exit sta",
    ),
    "g_CRASHES": (TRANSPORTS, HALVES + "CLIENT = 'site_crash:L'", r"site_crash:L ended .*SIGSEGV"),
    "h_does_not_start": (
        TRANSPORTS,
        HALVES + "SERVER = 'site_no_start:S'",
        r"started.*no such card",
    ),
    "i_fine_too": (TRANSPORTS, HALVES, ""),
    "j_strategy": (STRATEGIES, "import surely_not_here", "surely_not_here"),
    "k_runtime": (RUNTIMES, RUNTIME, "'nowhere:Class'"),
    "l_observer": (OBSERVERS, "def (:", "SyntaxError"),
}
NO_START = """
from torchstore_transports.shm.server import ShmServer

class S(ShmServer):
    async def start(self, context, segments):
        print("on standard output")
        raise OSError("no such card")
"""


@pytest.mark.thorough
async def test_doctor_tries_what_plugins_name_and_outlives_it(tmp_path: Path):
    site = Site(tmp_path)
    by_group: dict[str, dict[str, str]] = {}
    for name, (group, source, _) in TROUBLE.items():
        by_group.setdefault(group, {})[name] = source
    for group, plugins in by_group.items():
        site.install("acme" if group == TRANSPORTS else f"acme-{group[11:]}", group, **plugins)
    (tmp_path / "site_crash.py").write_text(CRASHES)
    (tmp_path / "site_no_start.py").write_text(NO_START)
    result = await installed("doctor", "--json", PYTHONPATH=_python_path(tmp_path))
    report = result.json
    lines = {p["name"]: p for p in report["plugins"]}
    bids = {bid["transport"] for bid in report["link"]["bids"]}
    for name, (group, _, says) in TROUBLE.items():
        line = lines[name]
        assert (line["group"], line["state"]) == (group, "error" if says else "ok"), line
        assert re.search(says, line["error"] or ""), line
        named = [p for p in report["problems"] if repr(name) in p]
        noted = [n for n in report["notes"] if repr(name) in n]
        fatal = name.lower() != name
        assert (len(named), len(noted)) == (fatal, bool(says) and not fatal), name
        assert all(f"TORCHSTORE_BLOCK={name}" in problem for problem in named)
        if group == TRANSPORTS:
            assert (name in bids) is not bool(says)
            assert report["link"]["refusals"].get(name) == line["error"]
    assert lines["shm"]["state"] == lines["local"]["state"] == "ok"
    assert (result.status, len(report["problems"])) == (1, 2)


VERSIONED = HALVES.replace(
    'bid=lambda context: Bid(1e-6, 1e12, "it")',
    "bid=lambda context: Refusal(f'offered {context.offer!r}')",
).replace("@hookimpl", "from torchstore_core.contracts.transport import Refusal\n\n@hookimpl")
OWN_OFFER = """
from torchstore_transports.shm.server import ShmServer

class S(ShmServer):
    async def start(self, context, segments):
        await super().start(context, segments)
        return b"version 2"
"""


async def test_doctor_shows_bids_the_offer_that_a_volume_would_make(tmp_path: Path):
    """That of its half, or of its spec if the half is isolated: bids may look at versions in it."""
    own = VERSIONED + "SERVER = 'site_own_offer:S'\n"
    apart = own.replace("server=SERVER", "server=SERVER, isolated=True, offer=lambda: b'it alone'")
    quiet = own.replace("server=SERVER", "server=SERVER, isolated=True")
    Site(tmp_path).install("acme", TRANSPORTS, own=own, apart=apart, quiet=quiet)
    (tmp_path / "site_own_offer.py").write_text(OWN_OFFER)
    report = (await installed("doctor", "--json", PYTHONPATH=_python_path(tmp_path))).json
    refusals = report["link"]["refusals"]
    assert refusals["own"] == "offered b'version 2'"
    assert refusals["apart"] == "offered b'it alone'"
    assert refusals["quiet"] == "offered b''"


@pytest.mark.thorough
async def test_doctor_gives_up_a_plugin_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    site = Site(tmp_path)
    hangs = "import threading\nthreading.Event().wait()"
    site.install("acme", TRANSPORTS, hangs=hangs, fine=TRANSPORT)
    monkeypatch.setenv("PYTHONPATH", _python_path(tmp_path))
    monkeypatch.setattr(plugin_check, "_LONGEST_S", 6.0)  # an interpreter starts meanwhile
    one, other = (TRANSPORTS, "hangs"), (TRANSPORTS, "fine")
    outcomes = await plugin_check.check_plugins([one, other], [])
    assert outcomes[one].error == "importing it did not end within 6 s"
    assert outcomes[other] == plugin_check.Outcome()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seconds", "periods", "error"),
    [(4, 40, None), (600, 2, "importing it did not end within 6 s")],
    ids=["slow", "never"],
)
async def test_doctor_waits_for_a_plugin_that_takes_long_on_a_slow_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, periods: int, error: str | None
):
    """As long as it computes, some of the time; and not for ever."""
    computes = (
        f"import time\nends = time.monotonic() + {seconds}\n"
        "while time.monotonic() < ends:\n    sum(range(50_000))\n    time.sleep(0.01)\n"
    )
    Site(tmp_path).install("acme", TRANSPORTS, slow=computes + TRANSPORT)
    monkeypatch.setenv("PYTHONPATH", _python_path(tmp_path))
    monkeypatch.setattr(plugin_check, "_LONGEST_S", 3.0)
    monkeypatch.setattr(plugin_check, "_PERIODS", periods)
    slow = TRANSPORTS, "slow"
    assert (await plugin_check.check_plugins([slow], []))[slow].error == error


async def test_doctor_and_a_plugin_that_ends_by_a_signal_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It ended with a traceback."""
    nameless = signal.SIGRTMIN + 1
    kills = f"import os\nos.kill(os.getpid(), {nameless})"
    Site(tmp_path).install("acme", TRANSPORTS, kills=kills)
    monkeypatch.setenv("PYTHONPATH", _python_path(tmp_path))
    outcomes = await plugin_check.check_plugins([(TRANSPORTS, "kills")], [])
    error = outcomes[TRANSPORTS, "kills"].error
    assert error == f"importing it ended the process (signal {nameless:d})"


def _python_path(first: Path) -> str:
    return os.pathsep.join([str(first), os.environ.get("PYTHONPATH", "")])


async def test_doctor_names_both_claimants_of_a_name(tmp_path: Path):
    _distribution(tmp_path, "acme-store", "[torchstore.transports]\nshm = acme.plugin\n")
    result = await installed("doctor", "--json", PYTHONPATH=_python_path(tmp_path))
    assert result.status == 1
    (problem, *_) = result.json["problems"]
    assert "acme-store" in problem
    assert "torchstore-transports" in problem


# ---- bench --------------------------------------------------------------------------------


def _positive(values: Mapping[str, Any]) -> bool:
    return all(value > 0 for value in values.values())


@pytest.mark.thorough
async def test_bench_in_a_store_of_its_own(runtime_directory: Path):
    status, out, err = await asyncio.to_thread(_torch_free, TORCH_FREE, "bench --size 4MB --json")
    assert (status, err) == (0, "")
    report = json.loads(out)
    assert (report["address"], report["verified"]) == (None, True)
    assert report["large"]["nbytes"] == 4_000_000
    assert report["small"]["nbytes"] == 1024
    for part in ("floors", "small", "large", "ratios"):
        assert _positive(report[part])
    ratio = report["floors"]["warm_copy_s"] / report["large"]["put_s"]
    assert report["ratios"]["put"] == pytest.approx(ratio)
    assert [*runtime_directory.iterdir()] == []


@pytest.mark.soak  # the ones above and below have a store of their own, and a given one
async def test_bench_in_a_given_store(store: ts.Client):
    await store.put("mine", 1)
    result = await torchstore("bench", "--size", "4MiB", "--address", store.address, COLUMNS="80")
    assert result.status == 0, result.err
    assert store.address in result.out
    for what in ("put 4.0 MiB, again", "get 4.0 MiB in place", "get 4.0 MiB zero-copy"):
        assert any(line.startswith(what) for line in result.lines)
    assert all(len(line) <= 80 or store.address in line for line in result.lines)
    assert await store.keys() == ["mine"]
    operations = (await store.status()).operations
    assert operations["Put"] > 1000

    async def it_has_left() -> bool:
        return [s.pid for s in (await store.status()).sessions] == [os.getpid()]

    await until(it_has_left)


@pytest.mark.thorough
async def test_bench_that_does_not_fit():
    async with running_store(capacity=4 * MB) as store:
        error = await fails("store-full", "bench", "--size", "8MiB", "--address", store.address)
        assert error["details"]["requested_bytes"] == 8 * MB
        assert await store.keys() == []


# ---- what it needs ------------------------------------------------------------------------

TORCH_FREE = """
import json, sys
from torchstore_cli import main
for command in json.loads(sys.argv[1]):
    status = main(command.split())
    heavy = {"torch", "numpy"} & set(sys.modules)
    if status or heavy:
        sys.exit(f"{command}: status {status}, imported {heavy}")
"""


def _torch_free(source: str, *commands: str, **environment: str) -> Result:
    done = subprocess.run(
        [sys.executable, "-c", source, json.dumps(commands)],
        env=_environment(environment),
        capture_output=True,
        text=True,
        timeout=200,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.thorough
async def test_torch_is_not_imported(store: ts.Client):
    await store.put("w", torch.zeros(MB))
    short = ("status", "ls --long", "stat w", "rm w", "doctor")
    status, _, err = await asyncio.to_thread(_torch_free, TORCH_FREE, *short)
    assert (status, err) == (0, "")
    source = TORCH_FREE.replace("status = ", "import numpy; status = ")
    status, _, err = _torch_free(source, "--version")
    assert (status, err) == (1, "--version: status 0, imported {'numpy'}\n")  # the check works
