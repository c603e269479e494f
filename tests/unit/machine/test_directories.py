"""The directories of servers, which come and go while others look at them."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

import pytest

from torchstore_core.errors import ConfigurationError
from torchstore_core.machine.directories import (
    PrivateDirectory,
    find_files,
    remove_stale,
    runtime_directory,
)


def test_files_are_found_by_name(tmp_path: Path) -> None:
    for folder in ("b", "a"):
        (tmp_path / folder).mkdir()
        for name in ("control.sock", "other", "note-1"):
            (tmp_path / folder / name).touch()
    (tmp_path / "control.sock").touch()  # no directory
    found = find_files(tmp_path, "note-*")
    assert found == [tmp_path / "a" / "note-1", tmp_path / "b" / "note-1"]
    assert find_files(tmp_path, "control.sock") == [p.with_name("control.sock") for p in found]


def test_directories_may_vanish_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "stays").mkdir()
    (tmp_path / "stays" / "note").touch()
    done = threading.Event()

    def come_and_go() -> None:
        while not done.is_set():
            for i in range(20):
                (tmp_path / f"d{i}").mkdir()
            for i in range(20):
                shutil.rmtree(tmp_path / f"d{i}")

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(2000):
            assert find_files(tmp_path, "n*") == [tmp_path / "stays" / "note"]
    finally:
        done.set()
        thread.join()


def test_what_a_server_left_that_was_killed_before_it_had_a_socket_is_removed(
    tmp_path: Path,
) -> None:
    long_ago, set_back = time.time() - 3600, time.time() + 3600
    for name in ("left", "begun", "used", "left before the clock was set back"):
        (tmp_path / name).mkdir()
    (tmp_path / "used" / "note").touch()
    (tmp_path / "no directory").touch()
    for name in ("left", "used", "no directory"):
        os.utime(tmp_path / name, (long_ago, long_ago))
    os.utime(tmp_path / "left before the clock was set back", (set_back, set_back))
    remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun", "no directory", "used"]


def test_a_socket_fits_where_a_character_has_several_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp", suffix="\u5f20" * 25) as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        directory = PrivateDirectory()
        try:
            assert len(os.fsencode(directory.control)) <= 107
        finally:
            directory.remove()


def test_paths_of_sockets_lead_there_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "run")  # by its standard it counts for nothing
    assert runtime_directory() == Path(tempfile.gettempdir()) / f"torchstore-{os.getuid()}"
    with tempfile.TemporaryDirectory(prefix="ts-", dir="/tmp") as folder:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
        monkeypatch.chdir(folder)
        monkeypatch.setattr(tempfile, "tempdir", ".")
        assert runtime_directory().parent == Path(folder)
        assert PrivateDirectory("given").control == f"{folder}/given/control.sock"


def test_where_no_directory_can_be_made_another_place_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        (Path(folder) / "torchstore").symlink_to("missing/missing")
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        for make in (runtime_directory, PrivateDirectory):
            with pytest.raises(ConfigurationError, match="Set XDG_RUNTIME_DIR or TMPDIR"):
                make()


def test_they_have_all_rights_of_their_owner_whatever_the_umask_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no user may pass through, no socket can be made, nor connected to."""
    with tempfile.TemporaryDirectory(prefix="ts-") as folder:
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        before = os.umask(0o177)  # no execution, of files
        try:
            directory = PrivateDirectory()
        finally:
            os.umask(before)
        for path in (runtime_directory(), directory.path):
            assert path.stat().st_mode & 0o777 == 0o700
        directory.remove()
