"""File systems that lack something: hard links, renames that replace, folders that can be flushed;
and what is flushed, in which order, on one that lacks nothing.
"""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]
from tests.processes import run_script

import torchstore_core as ts
from torchstore_snapshot import (
    NotAtomicError,
    Series,
    Snapshot,
    SnapshotExistsError,
    SnapshotStorageError,
    StateDict,
    gc,
)
from torchstore_snapshot.format.paths import MANIFEST
from torchstore_snapshot.storage import remote
from torchstore_snapshot.storage.opening import open_storage


def state(fill: float) -> dict[str, StateDict]:
    return {"m": StateDict(w=torch.full((3000,), fill))}


def value(path: Path | str) -> float:
    return float(Snapshot(path).read_object("m/w")[0])


class _Server(LocalFileSystem):  # type: ignore[misc]
    """A server of files, which writes one in place: readers can see the half of it."""

    protocol = "files-of-a-server"
    writing: Callable[[str], object] | None = None

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        with open(path, "wb") as file:
            file.write(value[: len(value) // 2])
            file.flush()
            if _Server.writing is not None:
                _Server.writing(path)
            file.write(value[len(value) // 2 :])

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return super()._strip_protocol(str(path).partition("://")[2] or path)


class _Renames(_Server):
    """One whose renames replace a file in one step, as those of sftp."""

    protocol = ("files-of-a-server-that-renames", "sftp")


@pytest.fixture
def servers() -> Iterator[None]:
    fsspec.register_implementation("files-of-a-server", _Server, clobber=True)
    fsspec.register_implementation("files-of-a-server-that-renames", _Renames, clobber=True)
    yield
    _Server.writing = None
    remote._known.clear()


@pytest.mark.usefixtures("servers")
@pytest.mark.parametrize("scheme", ["files-of-a-server", "files-of-a-server-that-renames"])
def test_a_server_of_files(tmp_path: Path, scheme: str) -> None:
    """Whatever is being written, there is a whole snapshot, or none; and what cannot be replaced in
    one step is not replaced.
    """
    url, folder = f"{scheme}://{tmp_path}/s", tmp_path / "s"
    seen: list[float | None] = []

    def look(path: str) -> None:
        there = (folder / MANIFEST).exists()
        seen.append(value(folder) if there else None)

    _Server.writing = look
    Snapshot.take(url, state(1))
    assert set(seen) == {None, 1.0}  # the last ones: of what is beside the manifest
    with pytest.raises(SnapshotExistsError):
        Snapshot.take(url, state(2))
    seen.clear()
    if scheme == "files-of-a-server":
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(NotAtomicError, match="another path"):
            Snapshot.take(url, state(2), overwrite=True)
        with pytest.raises(NotAtomicError):
            Snapshot.async_take(url, state(2), overwrite=True)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
        assert seen == []
        Snapshot.take(f"{url}2", state(2), overwrite=True)  # there is nothing to replace
        assert gc(f"{scheme}://{tmp_path}", keep_last=1, grace=0).dropped == ("s",)
        assert value(tmp_path / "s2") == 2.0
    else:
        Snapshot.take(url, state(2), overwrite=True)
        assert set(seen) == {1.0, 2.0}
        assert value(folder) == 2.0
        assert gc(f"{scheme}://{tmp_path}", grace=0).files == ()
    assert not [*tmp_path.glob("*/*.tmp")]


# A program for the kernel's filter of system calls, in this process and its children: the numbers
# given fail with the error given.
_FILTER = """
import ctypes, errno, struct
def refuse(*calls):
    code = [(0x20, 0, 0, 0)]  # load the number of the call
    for number, error in calls:
        code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | error)]
    code.append((0x06, 0, 0, 0x7FFF0000))  # allow
    program = b"".join(struct.pack("HBBI", *line) for line in code)
    buffer = ctypes.create_string_buffer(program)
    pair = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    whole = ctypes.create_string_buffer(pair)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.addressof(whole), 0, 0) == 0
NUMBERS = {"x86_64": {"link": 86, "linkat": 265, "renameat2": 316, "fsync": 74},
           "aarch64": {"link": 37, "linkat": 37, "renameat2": 276, "fsync": 82}}[os.uname().machine]
"""


async def _where(tmp_path: Path, refused: dict[str, str], body: str) -> str:
    """What a script prints where system calls fail."""
    calls = ", ".join(f"(NUMBERS[{name!r}], errno.{code})" for name, code in refused.items())
    names = "NotAtomicError, Snapshot, SnapshotExistsError, StateDict"
    lines = f"import os\n{_FILTER}\nfrom torchstore_snapshot import {names}\nrefuse({calls})\n"
    lines += f"path = {str(tmp_path / 's')!r}\n"
    lines += "def state(fill): return {'m': StateDict(w=torch.full((3000,), fill))}\n"
    return await run_script(lines + body)


_NO_LINKS = {"link": "EPERM", "linkat": "EPERM"}
_NO_FLAGS = {"renameat2": "EINVAL"}
_TAKES_TWICE = """
Snapshot.take(path, state(1.0))
try:
    Snapshot.take(path, state(2.0))
except SnapshotExistsError:
    print("exists")
Snapshot.take(path, state(3.0), overwrite=True)
print(float(Snapshot(path).read_object("m/w")[0]), sorted(os.listdir(path))[0][:2])
"""


@pytest.mark.parametrize("refused", [_NO_LINKS, _NO_FLAGS], ids=["no links", "no flags"])
async def test_either_hard_links_or_renames_are_enough(
    tmp_path: Path, refused: dict[str, str]
) -> None:
    assert (await _where(tmp_path, refused, _TAKES_TWICE)).split() == ["exists", "3.0", "m-"]


async def test_a_file_system_that_does_not_rename_folders(tmp_path: Path) -> None:
    """As gcsfuse, by default, with those that are not empty."""
    body = """
def refuse_folders(event, args):
    if event == "os.rename" and os.path.isdir(args[0]):
        raise OSError(errno.EMFILE, "too many open files")
sys.addaudithook(refuse_folders)
"""
    said = await _where(tmp_path, {}, f"import sys\n{body}{_TAKES_TWICE}")
    assert said.split() == ["exists", "3.0", "m-"]
    assert [*tmp_path.iterdir()] == [tmp_path / "s"]


async def test_a_file_system_with_neither_is_refused_first(tmp_path: Path) -> None:
    said = await _where(
        tmp_path,
        _NO_LINKS | _NO_FLAGS,
        """
for take in (Snapshot.take, Snapshot.async_take):
    try:
        take(path, state(1.0))
    except NotAtomicError as error:
        print(error.code, os.path.exists(path))
""",
    )
    assert said == "snapshot-not-atomic False\n" * 2


async def test_a_take_that_does_not_flush_needs_no_flush(tmp_path: Path) -> None:
    body = """
Snapshot.take(path, state(1.0), fsync=False)
Snapshot.take(path + "2", state(2.0), fsync=False, base=path)
Snapshot.take(path, state(3.0), fsync=False, overwrite=True)
try:
    Snapshot.take(path, state(4.0), overwrite=True)
except OSError as error:
    print(error.errno == errno.EIO, error.code, os.path.splitext(error.details["file"])[1])
    print(float(Snapshot(path).read_object("m/w")[0]))
"""
    said = await _where(tmp_path, {"fsync": "EIO"}, body)
    assert said.split() == ["True", "snapshot-not-written", ".safetensors", "3.0"]


async def test_folders_that_cannot_be_flushed(tmp_path: Path) -> None:
    """Some file systems answer that with EINVAL, and files are another matter."""
    body = """
real = os.fsync
def flush(file):
    if os.path.isdir(f"/proc/self/fd/{file}"):
        raise OSError(errno.EINVAL, "Invalid argument")
    real(file)
os.fsync = flush
Snapshot.take(path, state(1.0))
print(float(Snapshot(path).read_object("m/w")[0]))
"""
    assert await _where(tmp_path, {}, body) == "1.0\n"


_CALL = re.compile(r"(fsync|rename|renameat2|unlink)\((.*)\) += 0")
_BEGUN = re.compile(r"(\d+) +(.*) <unfinished \.\.\.>")
_ENDED = re.compile(r"(\d+) +<\.\.\. \w+ resumed>(.*)")


def _calls(log: Path) -> Iterator[str]:
    """The lines of calls. What others do meanwhile is between the two halves of one."""
    begun: dict[str, str] = {}
    for line in log.read_text().splitlines():
        if half := _BEGUN.fullmatch(line):
            begun[half[1]] = half[2]
        elif (rest := _ENDED.fullmatch(line)) and rest[1] in begun:
            yield begun.pop(rest[1]) + rest[2]
        else:
            yield line


def _traced(log: Path, root: Path) -> list[str]:
    """What was flushed, renamed and removed below a folder, in order, in short words."""
    found: list[str] = []
    for line in _calls(log):
        match = _CALL.search(line)
        if match is None or str(root) not in line:
            continue
        paths = [Path(p) for p in re.findall(r'["<](/[^">]*)[">]', match[2])]
        names = [str(p.relative_to(root)) for p in paths if p.is_relative_to(root)]
        for name in names[-1:]:
            short = re.sub(
                r"[0-9a-f]{12}-[0-9a-f]{8}(\.[0-9a-f]{16}-[0-9a-f]+-[0-9a-f]+\.[0-9a-f]{8})?",
                "T",
                name,
            )
            found.append(f"{match[1][:6]} {short}")
    return found


@pytest.mark.thorough
async def test_what_is_flushed_and_when(tmp_path: Path) -> None:
    """Seen from outside, by strace: data, then the names of data files, then the manifest, then its
    name, the names of all new folders, and nothing of what it replaces is removed before that. What
    it refers to in another snapshot is flushed, too, since that may not have been.
    """
    log, root = tmp_path / "log", tmp_path / "r"
    root.mkdir()
    calls = "fsync,rename,renameat2,unlink"
    wrapper = ["strace", "-f", "-qq", "-y", "-e", f"trace={calls}", "-o", str(log)]
    try:
        subprocess.run([*wrapper, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no strace here, or it may not trace: {error}")
    await run_script(
        f"""
        import os
        from torchstore_snapshot import Snapshot, StateDict
        folder = {str(root / "a")!r}
        def state(fill):
            return {{"m": StateDict(w=torch.full((3000,), fill), same=torch.ones(3000))}}
        Snapshot.take(folder + "/b/0", state(1.0), fsync=False)
        open({str(root / "begin")!r}, "w").close()
        os.unlink({str(root / "begin")!r})
        Snapshot.take(folder + "/c/1", state(1.0))
        Snapshot.take(folder + "/b/1", state(2.0), base=folder + "/b/0")
        Snapshot.take(folder + "/b/1", state(3.0), overwrite=True)
        """,
        wrapper=wrapper,
    )
    seen = _traced(log, root)
    without, rest = seen[: seen.index("unlink begin")], seen[seen.index("unlink begin") + 1 :]
    assert not [call for call in without if call.startswith("fsync")]
    rest = [call for call in rest if ".try-" not in call and "claim" not in call]
    first, second, third = _split(rest, "rename a/c/1/snapshot.json", "rename a/b/1/snapshot.json")
    assert {"fsync a/c", "fsync a"} <= {*first[0]}  # two folders are new
    for before, after, folder in ((*first, "a/c/1"), (*second, "a/b/1"), (*third, "a/b/1")):
        tail = before[-4:]
        assert tail == [
            f"fsync {folder}/.snapshot.json-T.tmp",
            f"fsync {folder}",
            f"fsync {folder.rpartition('/')[0]}",
            f"rename {folder}/snapshot.json",
        ]
        assert f"fsync {folder}/m-T-0-0.safetensors" in before[:-4]
        assert after[0] == f"fsync {folder}"
    for (_, after), folder in ((first, "a/c/1"), (third, "a/b/1")):  # the other one has no map
        assert f"fsync {folder}/.m.safetensors.index.json-T.tmp" in after
    assert {"fsync a/b/0/m-T-0-0.safetensors", "fsync a/b/0", "fsync a/b"} <= {*second[0]}
    removed = "unlink a/b/1/m-T-0-0.safetensors"
    assert removed in third[1]
    assert removed not in third[0]


def _split(calls: list[str], first: str, other: str) -> list[tuple[list[str], list[str]]]:
    """For each take, the calls up to that which makes it visible, and those after it."""
    at = [i for i, call in enumerate(calls) if call in (first, other)]
    assert [calls[i] for i in at] == [first, other, other]
    # A take begins with flushing what it has written.
    data = "fsync a/b/1/m-T-0-0.safetensors"
    begins = [0, *(calls.index(data, i) for i in at[:-1])]
    ends = [*begins[1:], len(calls)]
    return [(calls[b : i + 1], calls[i + 1 : e]) for b, i, e in zip(begins, at, ends, strict=True)]


def test_a_folder_that_is_the_root_of_a_file_system(tmp_path: Path) -> None:
    """With ``lost+found``, which nobody but root may look into."""
    (tmp_path / "lost+found").mkdir(mode=0)
    for step in range(3):
        Snapshot.take(tmp_path / str(step), state(step), fsync=False)
    report = gc(tmp_path, keep_last=1, grace=0)
    assert (report.dropped, report.unreadable) == (("0", "1"), {})
    assert open_storage(tmp_path / "0").siblings() == ["2"]


@pytest.mark.parametrize("url", ["memory://", "memory:///", "s3://", "simplecache::memory://"])
def test_a_url_of_no_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    """Without the slashes at its end, it would be a relative path."""
    monkeypatch.chdir(tmp_path)
    for call in (Snapshot, partial(Snapshot.take, app_state={}), Series, gc):
        with pytest.raises(ts.ConfigurationError, match="names no folder"):
            call(url)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("url", ["s3://bucket/step?versionId=7", "memory://a?versionId=b/c"])
def test_a_url_of_a_version_of_an_object_is_refused(url: str) -> None:
    """All files of a snapshot there would be one object, for which s3fs takes what follows."""
    for call in (Snapshot, partial(Snapshot.take, app_state={}), Series, gc):
        with pytest.raises(ts.ConfigurationError, match="names a version of one object"):
            call(url)


class _Plain(SimpleHTTPRequestHandler):
    """Sends whole files, whatever part of them was asked for."""

    def log_message(self, *_: object) -> None:
        """Nobody reads it."""


def test_a_server_without_ranges_is_not_taken_for_damage(tmp_path: Path) -> None:
    Snapshot.take(tmp_path / "s", {"m": StateDict(w=torch.ones(5000), n=1)}, fsync=False)
    handler = partial(_Plain, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            snapshot = Snapshot(f"http://127.0.0.1:{server.server_port}/s")
            assert snapshot.read_object("m/n") == 1
            own = StateDict(w=torch.zeros(5000), n=0)
            with pytest.raises(SnapshotStorageError, match="a part of a file"):
                snapshot.restore({"m": own})
            assert (int(own["w"].sum()), own["n"]) == (0, 0)
        finally:
            server.shutdown()
            thread.join()
